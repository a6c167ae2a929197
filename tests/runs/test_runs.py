"""Whole runs, in processes and inline: they end by themselves, and their folder bears out what they
say.
"""

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from rigs.graphs import fake_graph, reward, tiny_graph, words
from rigs.operators import Keep, slow
from structlog.testing import capture_logs

from dataflow import Graph, GraphError, Model, Result, collect, inline, run, scorer, verify
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer

pytestmark = [pytest.mark.usefixtures("one_core"), pytest.mark.timeout(180)]

Runner = Callable[..., Result]


@pytest.fixture(params=[pytest.param("processes", marks=pytest.mark.slow), "inline"])
def runs(request: pytest.FixtureRequest, tmp_path: Path, light: None) -> Runner:
    """`run`, in processes and inline, into a folder of the test."""
    on = inline() if request.param == "inline" else None

    def runner(graph: Graph, **how: Any) -> Result:
        return run(graph, on=on, runs=tmp_path, quiet=True, **how)

    return runner


def outcome(result: Result) -> str:
    return str(RunFolder.open(result.folder).read_json("times.json")["outcome"])


# Runs of fakes


def test_a_run_makes_the_steps_it_was_asked_for_and_its_verdict_is_clean(runs: Runner) -> None:
    result = runs(fake_graph(count=64), steps=5)
    assert (result.steps, outcome(result)) == (5, "finished")
    assert verify(result.folder).clean, verify(result.folder).line
    assert [line["step"] for line in result.metrics] == [1, 2, 3, 4, 5]


def test_every_group_is_trained_once_and_in_the_order_of_issue(runs: Runner) -> None:
    result = runs(fake_graph(count=40, prompts_per_step=4))
    trained = []
    for step in range(1, result.steps + 1):
        trained += (
            RunFolder.open(result.folder).rollouts_of().read(step).column("group_id").to_pylist()
        )
    assert trained == [group for group in range(40) for _ in range(4)]


def test_prompts_that_end_before_the_steps_end_the_run_with_fewer_steps(runs: Runner) -> None:
    result = runs(fake_graph(count=20, prompts_per_step=8), steps=50)
    assert (result.steps, outcome(result)) == (2, "finished")
    assert result.verdict.clean, result.verdict.line


def test_a_graph_without_a_trainer_ends_when_its_last_prompt_has_reached_the_sink(
    runs: Runner, tmp_path: Path
) -> None:
    g = Graph("no-trainer")
    keep = Keep(path=tmp_path / "kept")
    keep(reward(FakeGenerator()(g.source(FakePrompts(size=30)))))
    result = runs(g)
    assert (result.steps, outcome(result)) == (0, "finished")
    assert keep.groups() == [group for group in range(30) for _ in range(4)]
    assert result.verdict.clean, result.verdict.line


def test_nothing_is_lost_when_the_trainer_is_slower_than_all_before_it(runs: Runner) -> None:
    model = Model("m")
    trainer = slow(FakeTrainer(model=model, prompts_per_step=50), seconds=0.01)
    graph = fake_graph(
        generator=FakeGenerator(model=model, group_size=16), trainer=trainer, count=1_000
    )
    result = runs(graph)
    assert result.steps == 20
    assert result.verdict.clean, result.verdict.line


def test_scores_reach_the_trainer_beside_the_rows_they_were_made_of(runs: Runner) -> None:
    @scorer
    def number(answer: str) -> float:
        return float(answer)

    @scorer(per="group")
    def largest(number: list[float]) -> list[float]:
        return [max(number)] * len(number)

    result = runs(fake_graph(scorers=(number, largest), count=16))
    table = RunFolder.open(result.folder).rollouts_of().read(2)
    assert table.column("number").to_pylist() == [
        float(g) for g in table.column("group_id").to_pylist()
    ]
    assert table.column("largest").equals(table.column("number"))


def test_the_folder_tells_what_ran(runs: Runner) -> None:
    result = runs(fake_graph(count=16), seed=7, steps=2)
    folder = RunFolder.open(result.folder)
    graph, config = folder.read_json("graph.json"), folder.read_json("config.json")
    assert [node["name"] for node in graph["nodes"]] == [
        "prompts",
        "generator",
        "reward",
        "trainer",
    ]
    assert {(e["from"], e["to"], e["plane"]) for e in graph["edges"]} == {
        ("prompts", "generator", "data"),
        ("generator", "reward", "data"),
        ("reward", "trainer", "data"),
        ("trainer", "generator", "weights"),
    }
    assert (config["seed"], config["steps"]) == (7, 2)
    assert folder.graph_svg.read_text().startswith(("<svg", "<?xml"))


def test_every_worker_has_a_log(light: None, tmp_path: Path) -> None:
    result = run(fake_graph(count=16), runs=tmp_path, quiet=True)
    names = {path.name for path in RunFolder.open(result.folder).logs.glob("*.log")}
    assert names == {
        "prompts-0.log",
        "generator-0.log",
        "reward-0.log",
        "trainer-0.log",
        "forkserver.log",
    }


def test_what_a_worker_logs_stands_in_its_log(light: None, tmp_path: Path) -> None:
    """Also where the caller has put something of its own in the place of sys.stderr, as a notebook
    does.
    """
    result = run(fake_graph(count=16), runs=tmp_path, quiet=True)
    assert "event='started'" in (RunFolder.open(result.folder).log("generator")).read_text()


def test_zero_steps_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="at least 1 step, but steps is 0"):
        run(fake_graph(), runs=tmp_path / "runs", steps=0)
    assert not (tmp_path / "runs").exists()


# collect


def test_collect_gives_exactly_the_rows_asked_for_in_order() -> None:
    g = Graph("collect")
    stream = reward(FakeGenerator(group_size=4)(g.source(FakePrompts(size=100))))
    table = collect(stream, rows=50)
    assert table.column("group_id").to_pylist() == [row // 4 for row in range(50)]
    assert table.column("position").to_pylist() == [row % 4 for row in range(50)]
    assert table.column_names == list(stream.columns)
    table.validate(full=True)


def test_collect_gives_fewer_rows_where_the_prompts_end() -> None:
    g = Graph("collect")
    table = collect(FakeGenerator(group_size=4)(g.source(FakePrompts(size=5))), rows=1_000)
    assert len(table) == 20


def test_collect_runs_only_what_lies_upstream() -> None:
    def refuse(context: Any) -> Any:
        raise AssertionError("the trainer was built")

    trainer = FakeTrainer(model=Model("m"))
    object.__setattr__(trainer, "build", refuse)
    g = Graph("collect")
    rollouts = FakeGenerator(model=Model("m"))(g.source(FakePrompts()))
    trainer(reward(rollouts))
    assert len(collect(rollouts, rows=8)) == 8


def test_collect_of_no_rows_is_refused() -> None:
    g = Graph("collect")
    with pytest.raises(GraphError, match="at least 1 row, but rows is 0"):
        collect(g.source(FakePrompts()), rows=0)


def test_collected_rollouts_are_those_of_the_first_prompts_whatever_their_length(
    policy: Path,
) -> None:
    """Groups of a real generator are complete in the order of their lengths, not of their issue."""
    from operators import Generator, Prompts

    def collected(rows: int) -> Any:
        g = Graph("collect")
        generator = Generator(
            Model(str(policy)), group_size=2, max_tokens=40, segment_tokens=4, slots=16
        )
        return collect(generator(g.source(Prompts(words(60), epochs=1))), rows=rows)

    some, more = collected(10), collected(60)
    assert some.column("group_id").to_pylist() == [row // 2 for row in range(10)]
    assert some.column("completion").equals(more.slice(0, 10).column("completion"))


# The real operators around a tiny policy


def test_evaluation_comes_before_the_first_step_every_so_often_and_after_the_last(
    policy: Path, machine: None, tmp_path: Path
) -> None:
    result = run(tiny_graph(policy, eval_every=2), steps=7, on=inline(), runs=tmp_path, quiet=True)
    rounds = {line["step"]: line for line in result.metrics if "eval_accuracy" in line}
    assert list(rounds) == [0, 2, 4, 6, 7]
    for step, line in rounds.items():
        assert (line["eval_n"], line["eval_errors"]) == (12, 0)
        assert step <= line["eval_version_min"] <= line["eval_version_max"] <= 7
        rows = RunFolder.open(result.folder).rollouts_of().read_evaluation(step)
        mean = pc.mean(rows.column("reward")).as_py()
        assert mean == pytest.approx(line["eval_accuracy"], rel=1e-12)
    assert rounds[0]["eval_version_max"] == 0
    first_step = next(at for at, line in enumerate(result.metrics) if "loss" in line)
    assert result.metrics.index(rounds[0]) < first_step
    assert result.verdict.clean, result.verdict.line
    assert "eval: 30 groups issued = 30 evaluated" in result.verdict.summary


def test_an_asynchronous_run_of_the_real_operators_in_processes_keeps_every_law(
    policy: Path, machine: None, tmp_path: Path
) -> None:
    graph = tiny_graph(policy, max_staleness=2, eval_every=3, checkpoint_every=3)
    result = run(graph, steps=6, runs=tmp_path, quiet=True)
    folder = RunFolder.open(result.folder)
    assert (result.steps, outcome(result)) == (6, "finished")
    assert result.verdict.clean, result.verdict.line
    steps = [line for line in result.metrics if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert max(line["staleness_max"] for line in steps) <= 2
    rounds = [step for step, _ in result.evaluations]
    assert rounds in ([0, 6], [0, 3, 6])  # 3 is passed over while 0 or 6 is under way
    assert set(result.busy_seconds) == {
        "prompts",
        "generator",
        "reward",
        "advantage",
        "trainer",
        "held_out",
        "eval",
    }

    from transformers import AutoModelForCausalLM

    last = folder.latest_checkpoint()
    assert last is not None and last.name == "step-000006"
    AutoModelForCausalLM.from_pretrained(last)


def test_a_synchronous_run_in_processes_trains_only_what_its_own_weights_made(
    policy: Path, machine: None, tmp_path: Path
) -> None:
    result = run(tiny_graph(policy, max_staleness=0), steps=3, runs=tmp_path, quiet=True)
    assert result.verdict.clean, result.verdict.line
    for step in (1, 2, 3):
        versions = pc.list_flatten(
            RunFolder.open(result.folder).rollouts_of().read(step).column("versions")
        )
        assert set(pc.unique(versions).to_pylist()) == {-1, step - 1}


@pytest.mark.parametrize(
    "on", [pytest.param(None, marks=pytest.mark.slow), inline()], ids=["processes", "inline"]
)
def test_a_run_ends_with_its_prompts_and_a_last_evaluation(
    on: Any, policy: Path, machine: None, tmp_path: Path
) -> None:
    """Although its generator also serves held-out prompts, which never end by themselves."""
    graph = tiny_graph(policy, prompts=words(9), epochs=1, eval_every=1)
    result = run(graph, on=on, runs=tmp_path, quiet=True)
    assert (result.steps, result.verdict.clean, outcome(result)) == (2, True, "finished")
    rounds = [step for step, _ in result.evaluations]
    assert rounds[0] == 0 and rounds[-1] == 2


def test_groups_too_few_for_a_step_are_dropped_with_that_reason_at_the_end_of_the_prompts(
    policy: Path, machine: None, tmp_path: Path
) -> None:
    graph = tiny_graph(policy, prompts=words(10), epochs=1, prompts_per_step=4)
    result = run(graph, steps=9, on=inline(), runs=tmp_path, quiet=True)
    assert (result.steps, outcome(result)) == (2, "finished")
    assert "10 groups issued = 8 trained + 2 dropped (2 too few for a step)" in result.verdict.line


def test_a_program_that_reads_the_ledger_for_ever_holds_no_checkpoint_and_no_end_up(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A browser of databases, opened on a run under way."""
    create = Ledger.create
    readers: list[sqlite3.Connection] = []

    def browsed(path: Path, *args: Any, **how: Any) -> Ledger:
        made = create(path, *args, **how)
        readers.append(sqlite3.connect(path, isolation_level=None))
        readers[-1].execute("BEGIN")
        readers[-1].execute("SELECT count(*) FROM groups").fetchone()
        return made

    monkeypatch.setattr(Ledger, "create", browsed)
    monkeypatch.setattr("operators.training.checkpoints.saving.WAL_TOLD_BYTES", 1 << 15)
    graph = tiny_graph(policy, max_staleness=0, eval_every=3, checkpoint_every=1)
    with capture_logs() as logs:
        result = run(graph, steps=3, on=inline(), runs=tmp_path, quiet=True)
    assert any("some program reads ledger.db" in line["event"] for line in logs)
    with contextlib.closing(readers[0]) as reader:
        assert reader.execute("SELECT count(*) FROM steps").fetchone() == (0,), (
            "it still reads what it began with"
        )
    assert result.verdict.clean and result.steps == 3, result.verdict
    assert RunFolder.open(result.folder).checkpoints.steps() == [1, 2, 3]
