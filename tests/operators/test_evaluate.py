"""Laws of the evaluation's sink: a round is written once, when it is whole; failures are not
averaged in.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from rigs.columns import whole
from rigs.operators import make_context
from trainer_rig import COLUMNS, FakeFolder, FakeLedger, group

from dataflow.errors import OperatorError
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RolloutFiles, RunFolder
from dataflow.runtime import Batch
from operators.evaluate import Evaluate, EvaluateRuntime, round_metrics
from transport.life import Life


def _held_out(
    number: int,
    *,
    step: int = 0,
    size: int = 2,
    score: float | None = 1.0,
    error: str | None = None,
    version: int = 0,
) -> pa.RecordBatch:
    batch = group(number, size=1, error=error, version=version)
    for name, value in (("min_version", step), ("round_size", size), ("reward", score)):
        place = batch.schema.get_field_index(name)
        batch = batch.set_column(
            place, batch.schema.field(place), pa.array([value], batch.schema.field(place).type)
        )
    return batch


class Folder(FakeFolder):
    """One with a place for what is kept."""

    def finished(self, node: str) -> Path:
        return self.path / "finished" / node

    def read_metrics(self) -> list[dict[str, Any]]:
        return self.metrics


class World:
    """An Evaluate among fakes."""

    def __init__(self, tmp_path: Any, sources: tuple[str, ...] = ("held_out",)) -> None:
        self.events: list[Any] = []
        self.acks: list[int] = []
        self.folder, self.ledger = Folder(tmp_path, self.events), FakeLedger(self.events)
        self.context = context = make_context(
            node="eval",
            columns=dict.fromkeys(sources, COLUMNS),
            folder=self.folder,
            ledger=self.ledger,  # type: ignore[arg-type]
        )
        self.runtime = Evaluate(every_steps=5).build(context)
        assert isinstance(self.runtime, EvaluateRuntime)

    def push(self, *groups: pa.RecordBatch, source: str = "held_out") -> None:
        first = groups[0].column("group_id")[0].as_py()
        rows = pa.Table.from_batches(groups).combine_chunks().to_batches()[0]
        self.runtime.push(
            Batch(source, rows, "reward", whole(rows, lambda: self.acks.append(first)))
        )

    def run(self) -> None:
        while self.runtime.work() is not None:
            pass


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_a_round_is_written_when_its_last_group_has_come_and_not_before(world):
    world.push(_held_out(0, score=1.0))
    world.run()
    assert world.events == []
    assert "round" not in world.runtime.status()
    world.push(_held_out(1, score=0.0))
    assert world.runtime.pending() == 2
    world.run()
    assert world.events == [("evaluation", 0), ("ledger", 0), ("metrics", 0)]
    assert world.folder.metrics == [
        {
            "step": 0,
            "node": "eval",
            "eval_accuracy": 0.5,
            "eval_n": 2,
            "eval_errors": 0,
            "eval_failed": {},
            "eval_does_not_apply": 0,
            "eval_version_min": 0,
            "eval_version_max": 0,
        }
    ]
    assert world.ledger.evaluations == {0: [0, 1]}
    assert world.runtime.status()["round"] == 0
    assert world.runtime.status()["eval_accuracy"] == 0.5


def test_rows_are_acknowledged_at_once_so_that_a_round_may_be_larger_than_its_edge(world):
    world.push(_held_out(0))
    assert world.acks == [0]


class Crashing:
    """An Evaluate that dies and is started again, with a ledger and a folder that stay."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder.create(path, "run")
        self.ledger = Ledger.create(self.folder.ledger, {"eval": ["held_out"]})
        self.ledger.issue("held_out", [(number, f"p{number}") for number in range(4)])
        self.acks: list[list[int]] = []
        self._attempt = -1
        self.start()

    def start(self) -> None:
        """The next attempt; the one before it was killed."""
        self._attempt += 1
        context = make_context(
            node="eval",
            life=Life(attempt=self._attempt),
            columns={"held_out": COLUMNS},
            folder=self.folder,
            ledger=self.ledger,
        )
        self.runtime = Evaluate().build(context)

    def push(self, *groups: pa.RecordBatch) -> None:
        rows = pa.Table.from_batches(groups).combine_chunks().to_batches()[0]
        self.runtime.push(
            Batch(
                "held_out",
                rows,
                "reward",
                whole(rows, lambda: self.acks.append(rows["group_id"].to_pylist())),
            )
        )

    def run(self) -> None:
        while self.runtime.work() is not None:
            pass

    @property
    def kept(self) -> list[Path]:
        """Files of what has come of open rounds."""
        return list(self.folder.finished("eval").glob("*"))


@pytest.fixture
def crashing(tmp_path: Path) -> Iterator[Crashing]:
    made = Crashing(tmp_path)
    yield made
    made.runtime.close()
    made.ledger.close()


def test_what_was_acknowledged_is_in_its_round_after_any_crash_and_counted_once(
    crashing: Crashing,
) -> None:
    crashing.push(_held_out(0, size=3, score=1.0))
    crashing.start()
    crashing.push(_held_out(0, size=3, score=0.0), _held_out(1, size=3, score=0.5))
    crashing.start()
    assert crashing.runtime.status()["queue"] == 2
    assert crashing.acks == [[0], [0, 1]], "the second answers what was issued again as well"
    crashing.run()
    assert crashing.folder.read_metrics() == []
    crashing.push(_held_out(2, size=3, score=0.0))
    crashing.run()
    (line,) = crashing.folder.read_metrics()
    assert (line["eval_accuracy"], line["eval_n"]) == (0.5, 3)
    assert [group.group_id for group in crashing.ledger.in_flight("held_out")] == [3]


def test_a_round_that_was_whole_is_closed_by_the_next_attempt_with_nothing_issued_again(
    crashing: Crashing,
) -> None:
    crashing.push(_held_out(0), _held_out(1))
    crashing.start()
    crashing.run()
    assert crashing.ledger.last_round("eval") == 0
    assert len(crashing.folder.read_metrics()) == 1


def test_an_acknowledgement_comes_after_the_rows_are_written(crashing: Crashing) -> None:
    found: list[int] = []
    rows = _held_out(0)
    crashing.runtime.push(
        Batch("held_out", rows, "reward", whole(rows, lambda: found.append(len(crashing.kept))))
    )
    assert found == [1]


def test_a_file_that_a_crash_tore_gives_what_stands_whole_in_it(crashing: Crashing) -> None:
    crashing.push(_held_out(0))
    (file,) = crashing.kept
    whole = file.read_bytes()
    crashing.push(_held_out(1))
    file.write_bytes(file.read_bytes()[: len(whole) + 9])
    crashing.start()
    assert crashing.runtime.status()["queue"] == 1


@pytest.mark.parametrize("dies_in", ["write_evaluation", "commit_round", "append_metrics"])
def test_metrics_tell_of_each_round_that_the_ledger_has_and_of_no_other_wherever_the_sink_dies(
    crashing: Crashing, dies_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    crashing.push(_held_out(0), _held_out(1))
    with monkeypatch.context() as patch:
        keepers = {
            "write_evaluation": RolloutFiles,
            "commit_round": Ledger,
            "append_metrics": RunFolder,
        }
        patch.setattr(keepers[dies_in], dies_in, die)
        with pytest.raises(KeyboardInterrupt):
            crashing.run()
    recorded = crashing.ledger.last_round("eval")
    assert [line["step"] for line in crashing.folder.read_metrics()] == []
    crashing.start()
    told = [
        (line["step"], line["eval_accuracy"], line["eval_n"])
        for line in crashing.folder.read_metrics()
    ]
    assert told == ([] if recorded is None else [(0, 1.0, 2)])
    crashing.run()
    crashing.start()
    assert [line["step"] for line in crashing.folder.read_metrics()] == [0]
    assert crashing.ledger.last_round("eval") == 0


def test_an_evaluation_whose_file_is_gone_goes_on_without_its_line(crashing: Crashing) -> None:
    crashing.push(_held_out(0), _held_out(1))
    crashing.run()
    crashing.folder.metrics.unlink()
    crashing.folder.rollouts_of().evaluation_file(0).unlink()
    crashing.start()
    assert crashing.runtime.status()["round"] == 0
    assert crashing.folder.read_metrics() == []


def test_nothing_is_kept_of_a_round_that_is_recorded(crashing: Crashing) -> None:
    crashing.push(_held_out(0), _held_out(1))
    crashing.run()
    assert crashing.kept == []
    crashing.push(_held_out(0))
    assert crashing.kept == [] and crashing.acks == [[0, 1], [0]]


def test_what_is_left_of_a_round_that_was_given_up_is_in_no_later_one(crashing: Crashing) -> None:
    crashing.push(_held_out(0))
    crashing.ledger.drop("eval", "held_out", {0: "round cut off", 1: "round cut off"})
    crashing.start()
    assert crashing.runtime.status()["queue"] == 0
    crashing.push(_held_out(2, step=1), _held_out(3, step=1))
    crashing.run()
    assert crashing.folder.rollouts_of().read_evaluation(1).column("group_id").to_pylist() == [2, 3]
    assert crashing.kept == []


def test_a_round_that_an_attempt_before_has_recorded_is_closed_and_told_at_once(tmp_path):
    first = World(tmp_path)
    first.push(_held_out(0, score=1.0), _held_out(1, score=0.0))
    first.run()
    again = World(tmp_path)
    again.ledger.evaluations.update(first.ledger.evaluations)
    again.folder.metrics += first.folder.metrics
    again.runtime = Evaluate(every_steps=5).build(again.context)
    assert again.runtime.status()["round"] == 0
    again.push(_held_out(0, score=1.0), _held_out(1, score=0.0))
    again.run()
    assert again.events == [] and again.acks == [0]


def test_rounds_that_overlap_are_told_apart_by_their_step(world):
    world.push(_held_out(2, step=5, score=1.0), _held_out(0, step=0, score=0.0))
    world.push(_held_out(3, step=5, score=1.0))
    world.run()
    assert [line["step"] for line in world.folder.metrics] == [5]
    world.push(_held_out(1, step=0, score=0.0))
    world.run()
    assert [(line["step"], line["eval_accuracy"]) for line in world.folder.metrics] == [
        (5, 1.0),
        (0, 0.0),
    ]


def test_a_group_that_comes_twice_is_counted_once(world):
    world.push(_held_out(0))
    world.push(_held_out(0))
    world.push(_held_out(1))
    world.run()
    world.push(_held_out(1))
    world.run()
    assert len(world.folder.metrics) == 1
    assert world.ledger.evaluations == {0: [0, 1]}


def test_rows_in_a_file_are_in_the_order_of_issue(world):
    world.push(_held_out(1))
    world.push(_held_out(0))
    world.run()
    assert world.folder.evaluations[0].column("group_id").to_pylist() == [0, 1]


def test_failures_are_counted_and_never_averaged_in(world):
    world.push(
        _held_out(0, score=None, error="scorer timed out"), _held_out(1, score=1.0, version=3)
    )
    world.run()
    (line,) = world.folder.metrics
    assert (line["eval_accuracy"], line["eval_n"], line["eval_errors"]) == (1.0, 1, 1)
    assert (line["eval_version_min"], line["eval_version_max"]) == (3, 3)


def test_a_round_of_failures_has_no_accuracy(world):
    world.push(*[_held_out(number, score=None, error="scorer timed out") for number in (0, 1)])
    world.run()
    (line,) = world.folder.metrics
    assert line["eval_accuracy"] is None
    assert line["eval_errors"] == 2
    assert world.runtime.status()["round"] == 0


def test_a_rollout_to_which_the_scorer_does_not_apply_is_in_no_mean_and_no_failure():
    late = _held_out(2, score=None, error="reward: hung: no answer within 1 s")
    found = round_metrics(
        pa.Table.from_batches([_held_out(0, score=None), _held_out(1, score=0.5), late]), "reward"
    )
    assert (found["eval_accuracy"], found["eval_n"], found["eval_errors"]) == (0.5, 1, 1)
    assert (found["eval_does_not_apply"], found["eval_failed"]) == (1, {"reward: hung": 1})


def test_a_round_waits_for_every_source_that_leads_here(tmp_path):
    world = World(tmp_path, ("easy", "hard"))
    world.push(_held_out(0, size=1, score=1.0), source="easy")
    world.run()
    assert world.folder.metrics == []
    world.push(_held_out(0, size=1, score=0.0), source="hard")
    world.run()
    assert world.folder.metrics[0]["eval_accuracy"] == 0.5
    assert world.ledger.evaluations == {0: [0, 0]}


def test_rows_of_two_sources_say_which_is_theirs_and_a_column_that_one_lacks_is_null(tmp_path):
    world = World(tmp_path, ("easy", "hard"))
    world.push(_held_out(0, size=1, score=1.0).append_column("level", pa.array([3])), source="hard")
    world.push(_held_out(0, size=1, score=0.0), source="easy")
    world.run()
    rows = (
        world.folder.evaluations[0].select(["of_source", "group_id", "reward", "level"]).to_pylist()
    )
    assert [tuple(row.values()) for row in rows] == [("easy", 0, 0.0, None), ("hard", 0, 1.0, 3)]


def test_rows_of_one_source_have_no_column_more(world):
    world.push(_held_out(0), _held_out(1))
    world.run()
    assert world.folder.evaluations[0].schema.names == _held_out(0).schema.names


def test_rows_outside_any_round_are_refused(world):
    with pytest.raises(
        OperatorError, match=r"'eval' evaluates rounds.*round_size 0.*source of another name"
    ):
        world.push(_held_out(0, size=0))


@pytest.mark.parametrize(
    ("knobs", "said"), [({"every_steps": 0}, "every_steps=0"), ({"of": ""}, "of=''")]
)
def test_knobs_that_cannot_be_right_are_refused(knobs, said):
    (fault,) = Evaluate(**knobs).faults()
    assert said in fault
    assert ";" in fault


def test_an_evaluation_reads_the_column_it_averages():
    assert Evaluate(of="exact").reads()["exact"] is float
    assert Evaluate().name == "eval"
    assert Evaluate().faults() == []


def test_a_row_that_failed_after_it_had_its_score_is_not_averaged_in(world):
    world.push(
        _held_out(0, score=0.0, error="length: no answer within 1 s"), _held_out(1, score=1.0)
    )
    world.run()
    (line,) = world.folder.metrics
    assert (line["eval_accuracy"], line["eval_n"], line["eval_errors"]) == (1.0, 1, 1)
