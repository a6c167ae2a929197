"""Taking up a run: what is refused, what differs, how it is started again, and that nobody else has
a hand in it.
"""

import json
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rigs.graphs import fake_graph
from rigs.machine import wait_until

from dataflow import Devices, Graph, GraphError, Model, Result, RunError, inline, plan, run, verify
from dataflow.folder.ledger import Ledger, LedgerError
from dataflow.folder.run_folder import RunFolder, surviving
from dataflow.folder.run_lock import FILE, UnderWay, held
from dataflow.history.describe import graph_facts
from dataflow.history.launch import Launch, check_flags, plain_flag, recorded_launch, this_launch
from dataflow.history.resume import (
    CUT_OFF,
    RecordedRun,
    check_end,
    differences,
    go_on_with,
    take_up,
)
from dataflow.scheduler.state_machine import RunStateMachine
from dataflow.system.files import RunFolderError
from dataflow.testing import FakeEvaluate, FakeGenerator, FakePrompts, FakeTrainer
from dataflow.worker.messages import NodeCommand

pytestmark = pytest.mark.usefixtures("one_core")


MODEL = Model("fake-policy")


def finished(tmp_path: Path, steps: int | None = 3, count: int = 64) -> Result:
    return run(fake_graph(count=count), on=inline(), steps=steps, runs=tmp_path, quiet=True)


def resumed(result: Result, graph: Graph | None = None, **how: Any) -> Result:
    return run(graph or fake_graph(), on=inline(), resume=result.folder, quiet=True, **how)


# What is refused


def test_a_run_that_has_made_its_steps_is_refused_unless_it_is_given_more(tmp_path: Path) -> None:
    result = finished(tmp_path)
    with pytest.raises(
        RunError, match="is finished: it has made its 3 steps; give it more, as in --steps 6"
    ):
        resumed(result)
    check_end("run", RecordedRun.read(RunFolder.open(result.folder)), 4, {"trainer": 3})


def test_a_run_whose_prompts_ended_is_refused_however_many_steps_it_is_given(
    tmp_path: Path,
) -> None:
    result = finished(tmp_path, steps=50, count=20)
    with pytest.raises(RunError, match="is finished: its prompts ended after step 2"):
        resumed(result, fake_graph(count=20), steps=90)


@pytest.mark.parametrize("part", ["name", "nodes", "edges", "operator", "knobs", "from", "columns"])
def test_a_graph_with_a_damaged_name_in_the_ledger_is_read_from_its_file(
    tmp_path: Path, part: str
) -> None:
    result = finished(tmp_path)
    folder = RunFolder.open(result.folder)
    whole = RecordedRun.read(folder).graph
    damaged = json.loads(json.dumps(whole).replace(f'"{part}":', f'"{part[:-1]}_":'))
    with Ledger.open(folder.ledger) as ledger:
        ledger.set_facts({"graph": damaged})
    assert RecordedRun.read(folder).graph == whole
    folder.write_json("graph.json", damaged)
    with pytest.raises(RunFolderError, match="nothing says what .* runs"):
        RecordedRun.read(folder)


def test_fewer_steps_than_were_made_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has made 3 steps, more than the 2 asked for"):
        resumed(finished(tmp_path), steps=2)


def test_another_graph_or_seed_is_refused_with_what_differs(tmp_path: Path) -> None:
    result = finished(tmp_path)
    with pytest.raises(GraphError, match="prompts_per_step of 'trainer' was not given and is 4"):
        resumed(result, fake_graph(prompts_per_step=4), steps=9)
    with pytest.raises(GraphError, match="the seed was 0 and is 1"):
        resumed(result, steps=9, seed=1)


def test_a_damaged_ledger_is_refused(tmp_path: Path) -> None:
    result = finished(tmp_path)
    ledger = result.folder / "ledger.db"
    with Ledger.open(ledger) as opened:
        opened.flush()
    content = bytearray(ledger.read_bytes())
    content[4096:8192] = os.urandom(4096)
    ledger.write_bytes(content)
    with pytest.raises(LedgerError, match="damaged|malformed|not a database"):
        resumed(result, steps=9)


def test_a_lost_ledger_is_refused_where_the_run_had_done_something(tmp_path: Path) -> None:
    result = finished(tmp_path)
    for path in result.folder.glob("ledger.db*"):
        path.unlink()
    with pytest.raises(RunError, match="has no ledger.db, but rollouts"):
        resumed(result, steps=9)


def test_a_run_that_ended_before_it_did_anything_starts_from_the_beginning(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "fakes")
    graph = fake_graph()
    folder.write_json("graph.json", graph_facts(graph))
    folder.write_json("config.json", {"seed": 5, "steps": 3})
    result = run(graph, on=inline(), resume=folder.path, quiet=True)
    assert (result.steps, result.verdict.clean) == (3, True)
    assert folder.read_json("config.json")["seed"] == 5


def test_a_run_that_was_cut_off_after_its_last_step_makes_no_more_and_ends(tmp_path: Path) -> None:
    result = finished(tmp_path)
    RunFolder.open(result.folder).write_json("times.json", {"outcome": "died"})
    again = resumed(result)
    assert (again.steps, again.verdict.clean) == (3, True)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no run folder at"):
        run(fake_graph(), on=inline(), resume=tmp_path / "none", quiet=True)
    with pytest.raises(RunFolderError, match="config.json|graph.json"):
        run(fake_graph(), on=inline(), resume=tmp_path, quiet=True)


# One scheduler


def in_a_fork(body: Any) -> int:
    """Run it in a process of its own, which lives until it is killed; its id."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
            time.sleep(60)
        finally:
            os._exit(0)
    return pid


def end(pid: int) -> None:
    os.kill(pid, 9)
    os.waitpid(pid, 0)


def test_a_run_under_way_is_refused_with_the_process_that_runs_it(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "fakes")

    def hold() -> None:
        with held(folder):
            (tmp_path / "held").touch()
            time.sleep(60)

    other = in_a_fork(hold)
    try:
        wait_until((tmp_path / "held").exists)
        with pytest.raises(UnderWay, match=f"is under way: process {other} runs it"), held(folder):
            pass
    finally:
        end(other)
    with held(folder, wait_s=0.0):
        assert (folder.path / FILE).read_text().split()[0] == str(os.getpid())


def test_workers_that_outlive_their_scheduler_are_waited_for_and_then_named(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "fakes")

    def schedule() -> None:
        with held(folder):
            (tmp_path / "worker").write_text(str(in_a_fork(lambda: None)))
            (tmp_path / "forked").touch()
            time.sleep(60)

    scheduler = in_a_fork(schedule)
    wait_until((tmp_path / "forked").exists)
    end(scheduler)
    worker = int((tmp_path / "worker").read_text())
    ticks = iter(range(1000))
    try:
        with (
            pytest.raises(UnderWay, match=f"has processes left, which process {scheduler} started"),
            held(folder, wait_s=0.0, clock=lambda: float(next(ticks))),
        ):
            pass
    finally:
        os.kill(worker, 9)
    with held(folder):
        pass


# What differs


def named(name: str = "g", **knobs: Any) -> dict[str, Any]:
    graph, trainer = Graph(name), FakeTrainer(model=MODEL, **knobs)
    generator = FakeGenerator(model=MODEL)
    trainer(generator(graph.source(FakePrompts())))
    graph.feedback(trainer.weights, generator, max_staleness=knobs.get("queue_prompts", 9))
    return dict(json.loads(json.dumps(graph_facts(graph))))


def test_the_same_graph_made_twice_does_not_differ() -> None:
    def made() -> Graph:
        def local(completion: str) -> float:
            return 0.0

        from dataflow import scorer

        return fake_graph(scorers=(scorer(isolate=False)(local),))

    assert differences(graph_facts(made()), graph_facts(made())) == []


def test_a_folder_that_calls_a_source_a_lane_is_of_the_same_graph() -> None:
    older = named()
    for edge in older["edges"]:
        edge["lane"] = edge.pop("source")
    assert differences(older, named()) == differences(named(), older) == []


def test_what_differs_is_told_knob_by_knob_and_edge_by_edge() -> None:
    assert differences(named(), named("h")) == ["the graph was called 'g' and is called 'h'"]
    assert differences(named(prompts_per_step=8), named(prompts_per_step=16)) == [
        "prompts_per_step of 'trainer' was not given and is 16"
    ]
    assert "max_staleness of trainer -> generator (weights) was 9 and is 40" in differences(
        named(), named(queue_prompts=40)
    )
    without = named()
    without["nodes"] = [node for node in without["nodes"] if node["name"] != "generator"]
    assert differences(named(), without) == ["'generator' is missing"]


# What is put in order


def evaluating() -> Graph:
    graph = fake_graph()
    generator = graph.operators["generator"]
    FakeEvaluate()(generator(graph.source(FakePrompts(name="held_out"))))  # type: ignore[operator]
    return graph


def test_an_evaluation_that_was_cut_off_is_dropped_with_that_reason_and_the_last_whole_one_is_known(
    tmp_path: Path,
) -> None:
    graph, folder = evaluating(), RunFolder.create(tmp_path, "fakes")
    with Ledger.create(folder.ledger, {"trainer": ["prompts"], "eval": ["held_out"]}) as ledger:
        ledger.issue("held_out", [(group, str(group)) for group in range(6)])
        ledger.issue("prompts", [(group, str(group)) for group in range(8)])
        ledger.commit_round("eval", 10, {"held_out": range(4)})
        ledger.commit_step("trainer", 1, version=1, source="prompts", trained=range(4))
    begun = take_up(folder, graph, RecordedRun(graph={}, config={}, times={"seconds": 7.0}), None)
    assert (begun.steps, begun.rounds, begun.seconds) == ({"trainer": 1}, {"eval": 10}, 7.0)
    with Ledger.open(folder.ledger, readonly=True) as ledger:
        assert ledger.counts("eval").dropped == {CUT_OFF: 2}
        assert ledger.counts("trainer").in_flight == {"issued": 4}


def test_what_later_processes_would_overwrite_gets_another_name(tmp_path: Path) -> None:
    folder, graph = RunFolder.create(tmp_path, "fakes"), fake_graph()
    Ledger.create(folder.ledger, {"trainer": ["prompts"]}).close()
    folder.finished("generator").mkdir(parents=True)
    for part in (1, 2):
        (folder.finished("generator") / "0-0-0.prompts.arrows").write_text(f"part {part}")
        folder.trace.write_text(f"part {part}")
        take_up(
            folder,
            graph,
            RecordedRun(graph={}, config={"resumed": [{}] * (part - 1)}, times={}),
            None,
        )
    names = sorted(path.name for path in folder.finished("generator").iterdir())
    assert names == ["0-part1-0-0.prompts.arrows", "0-part2-0-0.prompts.arrows"]
    assert [(folder.path / f"trace-{part}.json").read_text() for part in (1, 2)] == [
        "part 1",
        "part 2",
    ]


def test_the_last_line_of_a_step_counts() -> None:
    lines = [
        {"step": 1, "node": "a", "loss": 1.0},
        {"step": 2, "node": "a", "loss": 2.0},
        {"step": 2, "node": "b"},
        {"step": 2, "node": "eval", "eval_accuracy": 0.5},
        {"step": 2, "node": "a", "loss": 3.0},
        {"step": 2},
    ]
    assert [line.get("loss") for line in surviving(lines)] == [1.0, 3.0, None, None, None]


# How it is started again


def test_a_program_is_started_again_as_it_was_with_this_interpreter(tmp_path: Path) -> None:
    launch = Launch(module="graphs.aipo", arguments=("--policy", "p q"), folder=str(Path.cwd()))
    assert launch.command("--steps", "9") == [
        sys.executable,
        "-m",
        "graphs.aipo",
        "--policy",
        "p q",
        "--steps",
        "9",
    ]
    script = tmp_path / "train.py"
    script.touch()
    assert Launch(file=str(script), folder=str(tmp_path)).command() == [sys.executable, str(script)]


def test_a_program_that_was_moved_is_named(tmp_path: Path) -> None:
    for launch, what in (
        (
            Launch(file=str(tmp_path / "gone.py"), folder=str(tmp_path)),
            r"gone\.py', which is not there any more",
        ),
        (
            Launch(module="no_such_module.train", folder=str(tmp_path)),
            "module 'no_such_module.train', which is not",
        ),
        (
            Launch(module="graphs.aipo", folder=str(tmp_path / "gone")),
            r"gone', which is not there any more",
        ),
    ):
        with pytest.raises(RunError, match=what):
            launch.command()


def test_other_flags_are_refused_by_name() -> None:
    launch = Launch(flags={"policy": "p", "max_staleness": 0, "path": "a"})
    check_flags(launch, {"policy": "p", "max_staleness": 0, "path": Path("a"), "new": 1})
    with pytest.raises(GraphError, match="--max-staleness was 0 and is 3; leave them as they were"):
        check_flags(launch, {"policy": "p", "max_staleness": 3})


def test_a_run_knows_how_it_was_started_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    monkeypatch.setattr(sys, "argv", [str(script), "--policy", "p"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    started = this_launch()
    assert started is not None
    flags = {"policy": "p", "rate": 1e-5, "call": len}
    launch = replace(started, flags={name: plain_flag(value) for name, value in flags.items()})
    result = run(fake_graph(), on=inline(), steps=1, runs=tmp_path, quiet=True, launch=launch)
    folder = RunFolder.open(result.folder)
    found = recorded_launch(folder)
    assert found is not None and found == launch
    assert (found.file, found.arguments, found.folder) == (
        str(script),
        ("--policy", "p"),
        str(Path.cwd()),
    )
    assert go_on_with(folder, launch) == f"go on with: dataflow resume {folder.path}"
    assert go_on_with(folder, None) == f"go on with: run(graph, resume='{folder.path}')"


def test_a_failed_run_says_how_to_go_on(tmp_path: Path) -> None:
    from rigs.operators import struck

    def boom() -> None:
        raise ValueError("boom")

    graph = fake_graph(generator=struck(FakeGenerator(model=MODEL), boom))
    with pytest.raises(RunError, match="boom") as caught:
        run(graph, on=inline(), runs=tmp_path, quiet=True)
    assert caught.value.__notes__ == [
        f"go on with: run(graph, resume='{(tmp_path / 'latest').resolve()}')"
    ]


# What the scheduler makes of it


def conducted(steps: int, rounds: dict[str, int]) -> RunStateMachine:
    graph = Graph("evaluating")
    generator, trainer = FakeGenerator(model=MODEL), FakeTrainer(model=MODEL)
    trainer(generator(graph.source(FakePrompts())))
    FakeEvaluate(every_steps=10)(generator(graph.source(FakePrompts(name="held_out"))))
    graph.feedback(trainer.weights, generator, max_staleness=9)
    state = RunStateMachine(graph, plan(graph, Devices(cpus=1)))
    state.go_on({"trainer": steps}, rounds)
    return state


# What the scheduler makes of it


def asked(commands: list[NodeCommand]) -> list[int]:
    return [command.message["evaluate"] for command in commands if "evaluate" in command.message]


def test_a_run_that_goes_on_does_not_repeat_its_first_evaluation() -> None:
    state = conducted(12, {"eval": 10})
    assert asked(state.start()) == [] and (state.phase, state.step) == ("training", 12)
    assert asked(state.hear("trainer", {"step": 19})) == []
    assert asked(state.hear("trainer", {"step": 20})) == [20]


def test_a_round_that_came_due_and_was_cut_off_is_asked_for_again() -> None:
    assert asked(conducted(12, {"eval": 0}).start()) == [10]


def test_a_run_whose_first_evaluation_was_cut_off_begins_with_it() -> None:
    state = conducted(0, {})
    assert asked(state.start()) == [0] and state.phase == "first_evaluation"


def test_a_ledger_that_lost_what_it_committed_is_refused_and_told_of(tmp_path: Path) -> None:
    """As where it was copied without its log: the run would begin again at the first step."""
    result = run(fake_graph(), steps=3, on=inline(), runs=tmp_path, quiet=True)
    folder = RunFolder.open(result.folder)
    for path in folder.path.glob("ledger.db*"):
        path.unlink()
    with Ledger.create(folder.ledger, {"trainer": ["prompts"]}) as ledger:
        ledger.set_facts(
            {"graph": folder.read_json("graph.json"), "config": folder.read_json("config.json")}
        )
    said = (
        r"ledger.db knows 'trainer' up to step 0, but rollouts/step-000003.arrow is there: .* put"
        r" both files back"
    )
    with pytest.raises(RunError, match=said):
        run(fake_graph(), steps=4, on=inline(), resume=folder.path, quiet=True)
    assert any(re.match(said, fault) for fault in verify(folder.path).faults)
    for step in (2, 3):
        folder.rollouts_of().step_file(step).unlink()
    with pytest.raises(RunError, match="up to step 0, but rollouts/step-000001.arrow is there"):
        run(fake_graph(), steps=4, on=inline(), resume=folder.path, quiet=True)
    folder.rollouts_of().step_file(1).unlink()
    (folder.path / "times.json").unlink()
    assert run(fake_graph(), steps=4, on=inline(), resume=folder.path, quiet=True).verdict.clean
