"""Runs whose groups are larger than a message: whoever dies, every group is trained once and
whole.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from rigs.graphs import fake_graph
from rigs.operators import Around, struck

from dataflow import Graph, Model, Result, inline, run
from dataflow.folder.arrow_reading import read_arrow
from dataflow.limits import Limits, Patience
from dataflow.node import Operator
from dataflow.records import (
    GROUP_ID,
    LEAST_MESSAGE_BYTES,
    SAMPLING_MASK,
    SAMPLING_MASK_TYPE,
    Columns,
)
from dataflow.runtime import Batch, Context, Runtime
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer

pytestmark = [pytest.mark.usefixtures("one_core"), pytest.mark.timeout(120)]

MODEL = Model("fake-policy")
PROMPTS = 32
IDS = LEAST_MESSAGE_BYTES
"""Of the one token of each rollout: four bytes each, so a group of four rollouts goes in sixteen
parts or more."""
QUICK = Limits(stop_s=2.0, patience=Patience(first_s=0.05, of_one=2))


@dataclass(frozen=True, eq=False)
class Wide(FakeGenerator):
    """Its rollouts record a very wide sampling mask: as many ids as said, counted up from the
    group's number.
    """

    name: str = field(default="generator", kw_only=True)
    ids: int = IDS

    def provides(self, columns: Columns) -> Columns:
        return {**super().provides(columns), SAMPLING_MASK: SAMPLING_MASK_TYPE}

    def build(self, context: Context) -> Runtime:
        return _Widening(super().build(context), self.ids)


class _Widening(Around):
    def __init__(self, inner: Runtime, ids: int) -> None:
        super().__init__(inner)
        self._ids = ids

    def work(self) -> list[Batch] | None:
        made = super().work()
        return made and [Batch(batch.source, self._widened(batch.records)) for batch in made]

    def _widened(self, records: pa.RecordBatch) -> pa.RecordBatch:
        groups_R = records.column(GROUP_ID).to_numpy()
        ids = pa.array((groups_R[:, None] + np.arange(self._ids)).astype(np.int32).reshape(-1))
        inner = pa.ListArray.from_arrays(
            np.arange(len(groups_R) + 1, dtype=np.int32) * self._ids, ids
        )
        outer = pa.ListArray.from_arrays(np.arange(len(groups_R) + 1, dtype=np.int32), inner)
        return records.append_column(SAMPLING_MASK, outer)


def graph_with(blow: Callable[[], None] = lambda: None, at: str = "") -> Graph:
    parts: dict[str, Operator] = {
        "source": FakePrompts(size=PROMPTS),
        "generator": Wide(model=MODEL),
    }
    parts["trainer"] = FakeTrainer(model=MODEL)
    if at:
        parts[at] = struck(parts[at], blow, after=2)
    return fake_graph(scorers=(), **parts)  # type: ignore[arg-type]


def check_whole(result: Result) -> None:
    """Every group is trained once, and its rows are those that the generator made."""
    assert result.verdict.clean, result.verdict.line
    assert f"{PROMPTS} groups issued = {PROMPTS} trained" in result.verdict.line
    files = sorted((result.folder / "rollouts").glob("*.arrow"))
    seen: list[int] = []
    for file in files:
        table = read_arrow(file)
        for group, mask in zip(
            table.column(GROUP_ID).to_pylist(), table.column(SAMPLING_MASK), strict=True
        ):
            ids = mask.values.flatten().to_numpy()
            assert len(ids) == IDS and ids[0] == group and ids[-1] == group + IDS - 1
            seen.append(group)
    assert sorted(seen) == [group for group in range(PROMPTS) for _ in range(4)]


def test_groups_above_the_cap_are_trained_in_a_run_in_one_process(tmp_path: Path) -> None:
    check_whole(
        run(graph_with(), on=inline(), runs=tmp_path, quiet=True, message_bytes=LEAST_MESSAGE_BYTES)
    )


@pytest.mark.parametrize(
    "killed",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("", "generator")), "trainer"],
)
def test_groups_above_the_cap_are_trained_once_and_whole_whoever_dies(
    killed: str, light: None, tmp_path: Path
) -> None:
    mark = tmp_path / "struck"

    def blow() -> None:
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    graph = graph_with(blow, killed)
    check_whole(
        run(
            graph,
            runs=tmp_path / "runs",
            quiet=True,
            limits=QUICK,
            message_bytes=LEAST_MESSAGE_BYTES,
        )
    )
    assert mark.exists() == bool(killed)
