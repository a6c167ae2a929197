"""What workers report becomes what the display shows, while replicas come and go."""

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dataflow import Graph, Model
from dataflow.display.views import plain_line
from dataflow.folder.run_folder import RunFolder
from dataflow.planning.hosts import Devices
from dataflow.planning.plan import plan
from dataflow.scheduler.progress import ProgressWatch
from dataflow.scheduler.state_machine import RunStateMachine
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer


class Scene:
    """A watch with a clock that is moved by hand, and a run that is training."""

    def __init__(self, folder: Path, gpus: Any = None, begun: int = 0) -> None:
        graph, model = Graph("test"), Model("policy")
        generator, trainer = FakeGenerator(model=model), FakeTrainer(model=model)
        trainer(generator(graph.source(FakePrompts())))
        graph.feedback(trainer.weights, generator, max_staleness=1)
        made = plan(graph, Devices(cpus=2), gpus=gpus)
        self.now = 0.0
        self.folder = RunFolder.create(folder, "test")
        self.watch = ProgressWatch(
            graph, made, self.folder, 10, clock=lambda: self.now, begun={"trainer": begun}
        )
        self.run = RunStateMachine(graph, made)
        self.run.start()

    def note(self, at_s: float, **beats: Mapping[str, Any]) -> None:
        self.now = at_s
        self.watch.note(self.run, {name.replace("_", "-"): beat for name, beat in beats.items()})

    @property
    def generator(self) -> Any:
        return next(node for node in self.watch.snapshot().nodes if node.name == "generator")


def beat(
    member: str, rows: int, busy: float, version: int = 3, ended: bool = False
) -> dict[str, Any]:
    report = {
        "status": {"version": version, "tokens": 10 * rows, "active": 0 if ended else 4},
        "rows_in": rows,
        "rows_out": rows,
        "ended": ended,
        "blocked": False,
        "starved": False,
        "seconds": {"busy": busy, "waiting": 0.0, "blocked": 0.0, "starved": 0.0},
    }
    return {"member": member, "nodes": {"generator": report}, "edges": {}}


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_what_a_node_notices_is_told_once(scene: Scene) -> None:
    noticed = beat("live", 10, 0.0)
    noticed["nodes"]["generator"]["status"]["notice"] = "most turns are none"
    for at_s, all_0 in ((0.0, beat("live", 10, 0.0)), (1.0, noticed), (2.0, noticed)):
        scene.note(at_s, all_0=all_0)
    assert scene.watch.notices == ["'generator': most turns are none"]


def test_of_nodes_that_share_devices_it_tells_who_sleeps_and_who_waits_for_whom(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path, gpus="shared")
    scene.note(0.0, all_0=beat("live", 10, 0.0))
    for generator, trainer, told in (
        ("awake", "asleep", ("working", "asleep", "")),
        ("awake", "waits", ("working", "waiting", "for generator")),
        ("asleep", "waits", ("asleep", "waiting", "for its turn")),
    ):
        reports = beat("live", 10, scene.now + 1.0)["nodes"]
        reports["trainer"] = {**reports["generator"], "status": {}, "turn": trainer}
        reports["generator"]["turn"] = generator
        scene.note(scene.now + 1.0, all_0={"member": "live", "nodes": reports, "edges": {}})
        nodes = {node.name: node for node in scene.watch.snapshot().nodes}
        assert (nodes["generator"].state, nodes["trainer"].state, nodes["trainer"].note) == told


def test_it_tells_who_is_starting_and_what_goes_on_before_and_after_the_steps(scene: Scene) -> None:
    assert scene.watch.starting(["prompts-0", "generator-1"]).doing == "starting prompts, generator"
    log = scene.folder.logs / "generator-1.log"
    log.write_text("begins\nstarting: cc compiles kernels\n")
    assert scene.watch.starting(["generator-1"]).doing == "starting generator (cc compiles kernels)"
    log.write_text(f"{log.read_text()}goes on\n")
    assert scene.watch.starting(["generator-1"]).doing == "starting generator"
    ready = scene.watch.starting([])
    assert ready.doing == ""
    assert {node.state for node in ready.nodes} == {"ready"}
    told = []
    for phase in ("first_evaluation", "training", "last_evaluation", "over"):
        scene.run.phase = phase
        scene.note(1.0)
        told.append(scene.watch.snapshot().doing)
    assert told == ["first evaluation", "", "last evaluation", ""]
    scene.run.drain()
    scene.note(2.0)
    assert scene.watch.snapshot().doing == "stopping after the step under way"


def test_a_run_that_goes_on_begins_at_the_step_that_it_had_come_to(tmp_path: Path) -> None:
    scene = Scene(tmp_path, begun=8)
    assert (scene.watch.starting(["trainer-0"]).step, scene.watch.starting([]).step) == (8, 8)
    scene.folder.append_metrics({"step": 8, "loss": 0.5, "groups": 90})
    scene.run.phase = "training"
    scene.note(100.0, generator_0=beat("live", 10, 1.0))
    assert scene.watch.snapshot().step == 8 and scene.watch.snapshot().left_s is None
    scene.folder.append_metrics({"step": 9, "loss": 0.5, "groups": 2})
    scene.note(110.0, generator_0=beat("live", 20, 2.0))
    shown = scene.watch.snapshot()
    assert (shown.step, shown.left_s) == (9, 10.0), (
        "a step of this part takes as long as the one it has made"
    )
    assert shown.groups["trained"] == 2, "what is issued and trained is of the same part"


def test_rollouts_under_way_are_told_and_their_tokens_counted_before_any_has_ended(
    scene: Scene,
) -> None:
    for second in range(90):
        scene.note(float(second), generator_0=beat("live", second // 30, 0.0))
    shown = scene.watch.snapshot()
    assert shown.rollouts_active == 4 and shown.tokens_per_s == pytest.approx(10 / 30, rel=0.05)
    assert "4 rollouts under way" in plain_line(shown) and "rollouts/s" not in plain_line(shown)
    for second in range(90, 200):
        scene.note(float(second), generator_0=beat("live", 2, 0.0))
    assert scene.watch.snapshot().tokens_per_s == 0.0, "nothing for a minute is nothing"


def test_those_at_work_are_counted_and_those_on_their_way_are_noted(scene: Scene) -> None:
    scene.note(
        0.0, generator_0=beat("live", 10, 1.0), generator_1=beat("joining", 0, 0.0, version=-1)
    )
    assert (scene.generator.replicas, scene.generator.note) == (1, "1 joining, 8 rollouts, v3")
    scene.note(1.0, generator_0=beat("live", 20, 2.0), generator_1=beat("live", 5, 1.0, version=2))
    assert (scene.generator.replicas, scene.watch.snapshot().version) == (2, 2)
    scene.note(2.0, generator_0=beat("live", 30, 3.0), generator_1=beat("leaving", 8, 1.5))
    assert (scene.generator.replicas, scene.generator.note) == (2, "1 leaving, 8 rollouts, v3")
    scene.note(
        3.0,
        generator_0=beat("live", 40, 4.0),
        generator_1=beat("left", 9, 1.6, version=1, ended=True),
    )
    assert (scene.generator.replicas, scene.generator.note) == (1, "4 rollouts, v3")


def test_failures_are_noted_by_cause_over_all_replicas_and_attempts(scene: Scene) -> None:
    one, other = beat("live", 10, 1.0), beat("live", 20, 2.0)
    one["nodes"]["generator"]["status"] |= {"failed": 3, "failed_hung": 2, "failed_raised": 1}
    other["nodes"]["generator"]["status"] |= {"failed": 2, "failed_hung": 2, "retried": 4}
    scene.note(0.0, generator_0=one, generator_1=other)
    assert scene.generator.note == "8 rollouts, v3, 5 failed (4 hung, 1 raised), 4 tried again"


def test_what_a_replica_did_before_it_left_still_counts_and_its_end_is_not_the_node_s(
    scene: Scene,
) -> None:
    scene.note(0.0, generator_0=beat("live", 0, 0.0), generator_1=beat("live", 0, 0.0))
    scene.note(1.0, generator_0=beat("live", 10, 0.5), generator_1=beat("live", 10, 0.5))
    scene.note(
        2.0, generator_0=beat("live", 20, 1.0), generator_1=beat("left", 10, 0.5, ended=True)
    )
    assert scene.generator.rate == pytest.approx(15.0)
    assert scene.generator.state != "ended"


def test_a_node_is_busy_as_its_replicas_are_on_the_mean_however_many_there_were(
    scene: Scene,
) -> None:
    """Three at work all the time for two seconds, then one for another two: busy for four seconds,
    not for eight.
    """
    everyone = {f"generator_{number}": beat("live", 0, 0.0) for number in range(3)}
    scene.note(0.0, **everyone)
    scene.note(2.0, **{name: beat("live", 0, 2.0) for name in everyone})
    left = {name: beat("left", 0, 2.0, ended=True) for name in ("generator_1", "generator_2")}
    scene.note(4.0, generator_0=beat("live", 0, 4.0), **left)
    assert scene.watch.busy_seconds["generator"] == pytest.approx(4.0)


def test_what_a_node_s_own_processes_have_of_its_work_is_counted_like_it(scene: Scene) -> None:
    for at in (0.0, 2.0):
        told = {"generator_0": beat("live", 0, at), "generator_1": beat("live", 0, at)}
        for each in told.values():
            each["nodes"]["generator"]["seconds"]["beside"] = at / 2
        scene.note(at, **told)
    assert scene.watch.busy_seconds["generator"] == pytest.approx(2.0)
    assert scene.watch.beside_seconds["generator"] == pytest.approx(1.0)


def test_a_node_whose_worker_is_away_is_told_as_restarting(scene: Scene) -> None:
    scene.note(0.0, generator_0=beat("live", 10, 1.0))
    scene.note(1.0, generator_0=beat("restarting", 10, 1.0))
    assert (scene.generator.state, scene.generator.note) == (
        "restarting",
        "1 restarting, 4 rollouts",
    )
    assert scene.watch.snapshot().version is None
    scene.note(2.0, generator_0=beat("live", 12, 1.5))
    assert scene.generator.state == "working" and scene.generator.rate == pytest.approx(1.0)


def test_it_holds_as_much_after_many_steps_as_after_few(scene: Scene) -> None:
    """What the curve needs in full stands in metrics.jsonl."""

    def make(steps: range) -> int:
        for step in steps:
            line = {
                "step": step,
                "loss": 0.5,
                "reward_mean": 0.1,
                "groups": 2,
                "dropped": {"too old": 1},
            }
            scene.folder.append_metrics(line)
            if step % 10 == 0:
                scene.folder.append_metrics({"step": step, "eval_accuracy": step / 1000})
                scene.note(float(step))
        return sum(len(gc.get_referents(value)) for value in vars(scene.watch).values())

    few, many = make(range(1, 101)), make(range(101, 1001))
    shown = scene.watch.snapshot()
    assert many <= few
    assert (
        shown.step,
        shown.accuracy_before,
        shown.accuracy,
        shown.groups["trained"],
        shown.groups["dropped"],
    ) == (
        1000,
        0.01,
        1.0,
        2000,
        1000,
    )
    curve = scene.watch.curve()
    assert len(curve) == 1100 and curve[0] == {"step": 1, "reward_mean": 0.1}


def test_a_line_that_is_being_written_is_read_once_it_is_whole(scene: Scene) -> None:
    scene.folder.append_metrics({"step": 1, "loss": 0.5, "groups": 2})
    with scene.folder.metrics.open("a") as stream:
        stream.write('{"step": 2, "loss": 0.5, ')
        stream.flush()
        scene.note(0.0)
        assert scene.watch.snapshot().step == 1
        stream.write('"groups": 2}\n')
    scene.note(1.0)
    scene.note(2.0)
    assert (scene.watch.snapshot().step, scene.watch.snapshot().groups["trained"]) == (2, 4)
