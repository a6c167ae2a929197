"""Where the prompts of an environment come from: seeds, of which it makes tasks, or rows, each of
which is one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dataflow.errors import RecordError
from dataflow.records import PROMPT
from operators.environments.playing import Play
from operators.environments.session import Session
from operators.environments.systems import at_once, made, split

TASK = "task"
"""Column that says, as JSON, what an environment is reset with."""


class SeededTasks(Sequence[dict[str, str]]):
    """Rows {"prompt", "task"}, made when they are read: a seed each, and what the environment says
    first to it."""

    def __init__(self, play: Play, seeds: range, intro: str) -> None:
        self._play, self._seeds, self._intro = play, seeds, intro

    def __len__(self) -> int:
        return len(self._seeds)

    def __getitem__(self, at: Any) -> Any:
        """The row at a place. Raises RecordError where the environment cannot make it."""
        if isinstance(at, slice):
            return SeededTasks(self._play, self._seeds[at], self._intro)
        return next(
            iter(SeededTasks(self._play, range(self._seeds[at], self._seeds[at] + 1), self._intro))
        )

    def __iter__(self) -> Iterator[dict[str, str]]:
        with self._session() as session:
            for seed in self._seeds:
                yield {
                    PROMPT: self._intro + self._first(session, seed),
                    TASK: json.dumps({"seed": seed}),
                }

    @contextlib.contextmanager
    def _session(self) -> Iterator[Session | None]:
        """One that makes all tasks; none of a server, which is asked when an episode begins."""
        name = self._play.environment
        if split(name)[0].is_served:
            yield None
            return
        try:
            session = made(name, self._play.options)
        except Exception as error:
            raise RecordError(
                f"environment '{name}' cannot be made; found {type(error).__name__}: {error}; give"
                " it other options"
            ) from error
        try:
            yield session
        finally:
            at_once(session.close())

    def _first(self, session: Session | None, seed: int) -> str:
        """What the policy hears first of a seed's task."""
        if session is None:
            return ""
        try:
            return self._play.heard(at_once(session.reset({"seed": seed}, seed)))
        except Exception as error:
            raise RecordError(
                f"environment '{self._play.environment}' makes no task of seed {seed}; found"
                f" {type(error).__name__}: {error}; give it other options or seeds"
            ) from error


def row_of(play: Play, intro: str, columns: Sequence[str]) -> Callable[[Any], dict[str, Any]]:
    """A function from a row of a file to a prompt whose task is the row."""
    system, _ = split(play.environment)

    def row(found: Any) -> dict[str, Any]:
        if not isinstance(found, Mapping):
            raise TypeError(f"a task is an object, but this is a {type(found).__name__}")
        prompt: Any = found
        for part in system.prompt_at:
            prompt = prompt.get(part) if isinstance(prompt, Mapping) else None
        if intro:
            prompt = (
                intro + (prompt or "")
                if not isinstance(prompt, list)
                else [{"role": "system", "content": intro}, *prompt]
            )
        left = () if system.reads_prompt else (PROMPT,)
        task = {key: value for key, value in found.items() if key not in left}
        kept = {key: found[key] for key in columns if key in found}
        return {**kept, PROMPT: prompt, TASK: json.dumps(task, ensure_ascii=False, default=str)}

    return row
