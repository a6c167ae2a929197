"""Model folders to share out, and engines on several ranks that end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from slices_rig import Rig

from dataflow.limits import Limits
from dataflow.model import Model
from dataflow.runtime import Context, RunSettings
from operators.engine.build import make_engine
from operators.engine.parallel import lockstep
from operators.engine.parallel.lockstep import make_parallel
from operators.generator import Generator

CONTEXT = Context(node="generator")


@pytest.fixture
def declare(
    make_model: Callable[..., Any], tokenizer: Any, tmp_path: Path
) -> Callable[..., Generator]:
    """A generator of a tiny model that is saved in a folder; knobs go to the generator, `changes`
    to the config.
    """

    def made(
        family: str = "llama", changes: dict[str, Any] | None = None, **knobs: Any
    ) -> Generator:
        folder = tmp_path / family
        make_model(family, **(changes or {})).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        given = {"slots": 6, "context_tokens": 64, "cache_bytes": 1 << 22, **knobs}
        return Generator(Model(str(folder)), **given)

    return made


@pytest.fixture
def interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are interpreters that start, as on a GPU."""
    monkeypatch.setattr(lockstep, "has_used_cuda", lambda: True)


@pytest.fixture
def alone() -> Callable[[Generator], Any]:
    """The engine of one process."""
    return lambda declaration: make_engine(declaration, CONTEXT).engine


@pytest.fixture
def together() -> Iterator[Callable[..., Any]]:
    """The engine of several ranks; this process is rank 0."""
    made: list[Any] = []

    def make(declaration: Generator, size: int = 2, timeout_s: float = 30.0) -> Any:
        limits = Limits(start_s=90.0, exchange_s=timeout_s)
        made.append(
            make_parallel(
                declaration, replace(CONTEXT, run=RunSettings(limits=limits)), size
            ).engine
        )
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def fed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Rig]]:
    """An engine of several ranks that has versions sent to all of them."""
    made: list[Rig] = []

    def make(declaration: Generator, size: int = 2, **knobs: Any) -> Rig:
        made.append(Rig(declaration, tmp_path_factory.mktemp("w"), size, **knobs))
        return made[-1]

    yield make
    for each in made:
        each.close()
