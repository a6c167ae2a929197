"""Generators join and leave while a run goes on: no group is lost, none is trained twice, the
ledger bears it out.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zmq
from rigs.graphs import fake_graph, reward, tiny_graph, words
from rigs.machine import wait_until
from rigs.operators import Around, built_by, wrapped

from dataflow import Graph, GraphError, Model, Result, RunError, inline, run
from dataflow.errors import DeadlineError
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.socket_folder import CONTROL
from dataflow.limits import Limits
from dataflow.node import Transform
from dataflow.records import GROUP_ID
from dataflow.runtime import Batch, Context, Runtime
from dataflow.scheduler.requests import ask_to_scale
from dataflow.staleness import admit
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from dataflow.worker.ports import Ports
from operators import Evaluate, Prompts
from transport.data.outbox import Outbox

pytestmark = [pytest.mark.usefixtures("forked", "one_core"), pytest.mark.timeout(120)]


ROOT = Path(__file__).parents[2]


MODEL = Model("fake-policy")


NO_BOUND = 1_000_000


PROMPTS = "prompts>generator:prompts"


QUICK = Limits(stop_s=2.0)


Holds = Mapping[int, Callable[[], object]]


"""By step: what has to come about before the trainer goes on from there."""


@dataclass
class Runs:
    """Runs graphs into a folder, and tells from the logs there who has started and who has
    stopped.
    """

    path: Path

    def __call__(self, graph: Graph, **how: Any) -> Result:
        return run(graph, runs=self.path, quiet=True, limits=QUICK, **how)

    @property
    def folder(self) -> RunFolder:
        return RunFolder.open(self.path / "latest")

    def started(self, *names: str) -> Callable[[], bool]:
        return lambda: all(self._logged(name, "started") for name in names)

    def stopped(self, *names: str) -> Callable[[], bool]:
        """Before the end of the run: for it is the trainer that waits for them."""
        return lambda: all(self._logged(name, "stopped") for name in names)

    def _logged(self, name: str, event: str) -> bool:
        log = self.folder.logs / f"{name}.log"
        return log.exists() and f"event='{event}'" in log.read_text()


@pytest.fixture
def runs(light: None, tmp_path: Path) -> Runs:
    return Runs(tmp_path / "runs")


@dataclass
class Heard:
    """What senders have heard of those they send to, in a file that all processes append to."""

    path: Path

    def add(self, *line: str) -> None:
        with self.path.open("a") as out:
            out.write(json.dumps(line) + "\n")

    def credit(self, edge: str, links: int) -> Callable[[], bool]:
        """Over so many links credit has come: their receivers may get rows, however many others
        have.
        """
        return lambda: len(set(self._lines("credit", edge))) >= links

    def retired(self, edge: str, links: int) -> Callable[[], bool]:
        """Over so many links nothing new is sent any more."""
        return lambda: len(set(self._lines("retired", edge))) >= links

    def _lines(self, what: str, edge: str) -> list[str]:
        text = self.path.read_text() if self.path.exists() else ""
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [line[2] for line in lines if line[:2] == [what, edge]]


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Heard:
    """Workers are forked, so that what is put in here is put in there."""
    heard, welcome, retire = Heard(tmp_path / "heard"), Outbox.welcome, Ports.retire

    def welcoming(outbox: Outbox, message: Any) -> bool:
        heard.add("credit", outbox._edge, f"{os.getpid()} {id(outbox)}")
        return welcome(outbox, message)

    def retiring(ports: Ports, receivers: Mapping[str, str]) -> None:
        retire(ports, receivers)
        for edge, address in receivers.items():
            heard.add("retired", edge, f"{os.getpid()} {address}")

    monkeypatch.setattr(Outbox, "welcome", welcoming)
    monkeypatch.setattr(Ports, "retire", retiring)
    return heard


class _Held(Around):
    def __init__(self, inner: Runtime, holds: Holds) -> None:
        super().__init__(inner)
        self._holds = dict(holds)

    def work(self) -> list[Batch] | None:
        return None if self._waits() else super().work()

    def pending(self) -> int:
        return super().pending() + bool(self._holds)

    def wants_devices(self) -> bool:
        return not self._waits() and super().wants_devices()

    def _waits(self) -> bool:
        step = int(self.status()["step"])
        for at in [at for at, holds in self._holds.items() if at <= step and holds()]:
            del self._holds[at]
        return any(at <= step for at in self._holds)


def held(trainer: Any, holds: Holds) -> Any:
    """The same trainer, which stays at a step until something has come about."""
    return wrapped(trainer, lambda inner: _Held(inner, holds))


def fakes(holds: Holds, count: int = 400, **knobs: Any) -> Graph:
    return fake_graph(
        generator=knobs.pop("generator", None) or FakeGenerator(model=MODEL),
        trainer=held(FakeTrainer(model=MODEL, prompts_per_step=4), holds),
        count=count,
        **knobs,
    )


def trained(result: Result) -> list[int]:
    """The group of every row that was trained, in order."""
    folder = RunFolder.open(result.folder)
    steps = range(1, result.steps + 1)
    return [
        group
        for step in steps
        for group in folder.rollouts_of().read(step).column("group_id").to_pylist()
    ]


def each_once(count: int) -> list[int]:
    return [group for group in range(count) for _ in range(4)]


def nothing_lost(result: Result) -> bool:
    """The fakes' versions are all 0: a bound of staleness, which keeps a source from giving all to
    the first replica, is all that may be broken.
    """
    return all("versions old" in fault for fault in result.verdict.faults)


# Joins and leaves


def test_one_replica_becomes_three_and_one_again_and_every_group_is_trained_once(
    runs: Runs, heard: Heard, tmp_path: Path
) -> None:
    noted, fake = Noted(tmp_path / "noted"), FakeGenerator(model=MODEL)
    generator = built_by(
        fake, lambda context: _Noting(FakeGenerator.build(fake, context), context, noted)
    )
    holds = {
        5: heard.credit(PROMPTS, 3),
        60: heard.retired(PROMPTS, 2),
        90: runs.stopped("generator-1", "generator-2"),
    }
    result = runs(
        fakes(holds, generator=generator, max_staleness=4),
        scale={5: {"generator": 3}, 60: {"generator": 1}},
    )
    assert trained(result) == each_once(400)
    assert nothing_lost(result), result.verdict.line
    took = [
        {group for first, last, _ in noted.of("took", rank) for group in range(first, last + 1)}
        for rank in range(3)
    ]
    assert len(took[1]) > 40 and len(took[2]) > 40 and max(took[1] | took[2]) < 90 * 4


@pytest.mark.slow
def test_who_takes_turns_is_joined_and_left_in_its_nodes_turns(runs: Runs) -> None:
    holds = {
        4: runs.started("generator-1", "generator-2"),
        20: runs.stopped("generator-1", "generator-2"),
    }
    generator, scale = (
        FakeGenerator(model=MODEL, in_flight=8),
        {2: {"generator": 3}, 12: {"generator": 1}},
    )
    result = runs(fakes(holds, count=120, generator=generator), gpus="shared", scale=scale)
    assert trained(result) == each_once(120)
    assert result.verdict.clean, result.verdict.line


@pytest.mark.slow
def test_a_newcomer_gets_the_threads_that_the_plan_gives_each_process(runs: Runs) -> None:
    result = runs(fakes({5: runs.started("generator-1")}), scale={0: {"generator": 2}})
    assert "threads=1" in runs.folder.log("generator", 1).read_text()
    told = RunFolder.open(result.folder).read_json("config.json")["plan"]
    assert "from step 0 on 'generator' has 2 replicas; each that joins gets 1 thread" in told


@pytest.mark.slow
def test_a_number_is_never_used_again(runs: Runs) -> None:
    holds = {
        2: runs.started("generator-1"),
        30: runs.stopped("generator-1"),
        60: runs.started("generator-2"),
    }
    scale = {2: {"generator": 2}, 30: {"generator": 1}, 60: {"generator": 2}}
    result = runs(fakes(holds), scale=scale)
    assert trained(result) == each_once(400)
    assert not (runs.folder.logs / "generator-3.log").exists()


@pytest.mark.slow
def test_a_replica_that_joins_after_the_last_prompt_ends_like_the_others(runs: Runs) -> None:
    result = runs(fakes({9: runs.started("generator-1")}, count=40), scale={9: {"generator": 2}})
    assert trained(result) == each_once(40)
    assert result.verdict.clean, result.verdict.line


@dataclass(frozen=True, eq=False)
class Stage(Transform):
    """A heavy operator that passes its rows on."""

    def build(self, context: Context) -> Runtime:
        return _Passing()


class _Passing(Runtime):
    def __init__(self) -> None:
        self._held: list[Batch] = []

    def room(self) -> int:
        return 64 if len(self._held) < 4 else 0

    def push(self, batch: Batch) -> None:
        self._held.append(batch)

    def pending(self) -> int:
        return len(self._held)

    def work(self) -> list[Batch] | None:
        if not self._held:
            return None
        batch = self._held.pop(0)
        batch.ack()
        return [Batch(batch.source, batch.records)]


@pytest.mark.slow
def test_two_stages_in_a_row_may_change_at_once(runs: Runs, heard: Heard) -> None:
    g, first, staged = Graph("stages"), FakeGenerator(model=MODEL), "generator>stage:prompts"
    holds = {
        2: lambda: heard.credit(PROMPTS, 3)() and heard.credit(staged, 3 * 2)(),
        50: lambda: heard.retired(PROMPTS, 1)() and heard.retired(staged, 3)(),
        65: runs.stopped("generator-2", "stage-1"),
        80: heard.retired(PROMPTS, 2),
        100: runs.stopped("generator-1"),
        101: runs.started("stage-2", "stage-3"),
    }
    trainer = held(FakeTrainer(model=MODEL, prompts_per_step=4), holds)
    trainer(reward(Stage(name="stage")(first(g.source(FakePrompts(size=600))))))
    g.feedback(trainer.weights, first, max_staleness=4)
    scale = {
        2: {"generator": 3, "stage": 2},
        50: {"stage": 1, "generator": 2},
        80: {"stage": 3, "generator": 1},
    }
    result = runs(g, scale=scale)
    assert trained(result) == each_once(600)
    assert nothing_lost(result), result.verdict.line


@dataclass
class Noted:
    """What the replicas of a generator take in and begin, in a file that all of them append to."""

    path: Path

    def add(self, what: str, rank: int, source: str, records: Any, step: int) -> None:
        ids = records.column(GROUP_ID).to_pylist()
        with self.path.open("a") as out:
            out.write(json.dumps([what, rank, source, min(ids), max(ids), step]) + "\n")

    def of(self, what: str, rank: int, source: str = "prompts") -> list[tuple[int, int, int]]:
        """(first group, last group, trainer's step) of each batch."""
        text = self.path.read_text() if self.path.exists() else ""
        whole = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [tuple(line[3:]) for line in whole if line[:3] == [what, rank, source]]


class _Noting(Around):
    """Notes what it takes."""

    def __init__(self, inner: Runtime, context: Context, noted: Noted) -> None:
        super().__init__(inner)
        self.rank, self.noted = context.replica, noted

    def push(self, batch: Batch) -> None:
        self.noted.add("took", self.rank, batch.source, batch.records, self._now())
        super().push(batch)

    def _now(self) -> int:
        return 0


class _Bounded(_Noting):
    """Lets no group start that runs more than `ahead` steps ahead of the trainer, as the real
    generator does.
    """

    def __init__(
        self, inner: Runtime, context: Context, step: Path, noted: Noted, ahead: int, per_step: int
    ) -> None:
        super().__init__(inner, context, noted)
        self._step, self._ahead, self._per_step = step, ahead, per_step
        self._held: list[Batch] = []

    def room(self) -> int:
        return 1024

    def push(self, batch: Batch) -> None:
        self.noted.add("took", self.rank, batch.source, batch.records, self._now())
        self._held.append(batch)

    def pending(self) -> int:
        return len(self._held) + super().pending()

    def work(self) -> list[Batch] | None:
        now = self._now()
        for batch in list(self._held):
            last = max(batch.records.column(GROUP_ID).to_pylist())
            if super().room() > 0 and admit(last, 0, now, self._per_step, self._ahead):
                self._held.remove(batch)
                self.noted.add("began", self.rank, batch.source, batch.records, now)
                self.inner.push(batch)
        return super().work()

    def _now(self) -> int:
        return int(self._step.read_text()) if self._step.exists() else 0


class _Telling(Around):
    """Writes the trainer's step down."""

    def __init__(self, inner: Runtime, step: Path) -> None:
        super().__init__(inner)
        self._path = step

    def work(self) -> list[Batch] | None:
        made = super().work()
        if made is not None:
            new = self._path.with_suffix(".new")
            new.write_text(str(self.status()["step"]))
            new.replace(self._path)
        return made


@pytest.mark.slow
def test_a_leaver_waits_until_its_prompts_may_start_and_none_of_them_is_lost(
    runs: Runs, heard: Heard, tmp_path: Path
) -> None:
    step, noted, fake = tmp_path / "step", Noted(tmp_path / "noted"), FakeGenerator(model=MODEL)

    def far_ahead() -> bool:
        return any(last > 4 * 35 for _, last, _ in noted.of("took", 1))

    def hold(inner: Runtime) -> Runtime:
        return _Held(_Telling(inner, step), holds)

    holds = {1: heard.credit(PROMPTS, 2), 10: far_ahead, 20: heard.retired(PROMPTS, 1)}
    generator = built_by(
        fake,
        lambda context: _Bounded(FakeGenerator.build(fake, context), context, step, noted, 2, 4),
    )
    trainer = wrapped(FakeTrainer(model=MODEL, prompts_per_step=4), hold)
    graph = fake_graph(generator=generator, trainer=trainer, count=600, max_staleness=40)
    result = runs(graph, scale={1: {"generator": 2}, 20: {"generator": 1}})
    assert trained(result) == each_once(600)
    assert nothing_lost(result), result.verdict.line
    took, began = noted.of("took", 1), noted.of("began", 1)
    assert sorted(batch[:2] for batch in took) == sorted(batch[:2] for batch in began)
    assert max(at for _, _, at in took) <= 20 < 30 < max(at for _, _, at in began)


@pytest.mark.slow
def test_a_replica_that_joins_during_an_evaluation_takes_part_in_it(
    runs: Runs, tmp_path: Path
) -> None:
    noted, fake, g = Noted(tmp_path / "noted"), FakeGenerator(model=MODEL), Graph("evaluated")

    class Keeping(_Noting):
        def room(self) -> int:
            """The first replica finishes none before those that join have some."""
            waits = self.rank == 0 and not all(
                noted.of("took", rank, "held_out") for rank in (1, 2)
            )
            return 0 if waits else super().room()

    generator = built_by(
        fake, lambda context: Keeping(FakeGenerator.build(fake, context), context, noted)
    )
    trainer = FakeTrainer(model=MODEL, prompts_per_step=4)
    trainer(reward(generator(g.source(Prompts(words(40), columns=("answer",))))))
    # one replica may have 512
    held_out = Prompts(words(1_500), columns=("answer",), name="held_out")
    Evaluate(every_steps=1_000)(reward(generator(g.source(held_out))))
    g.feedback(trainer.weights, generator, max_staleness=NO_BOUND)
    result = runs(g, steps=10, scale={0: {"generator": 3}})
    for rank in range(3):
        assert min(first for first, _, _ in noted.of("took", rank, "held_out")) < 1_500
    assert [step for step, _ in result.evaluations] == [0, 10]
    assert trained(result) == each_once(40)
    assert "eval: 3,000 groups issued = 3,000 evaluated" in result.verdict.summary


# What goes wrong


@pytest.mark.slow
def test_a_newcomer_that_dies_before_it_is_ready_is_started_again_and_joins(
    runs: Runs, tmp_path: Path
) -> None:
    fake, struck = FakeGenerator(model=MODEL), tmp_path / "struck"

    def build(context: Context) -> Runtime:
        if context.replica and not struck.exists():
            struck.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return FakeGenerator.build(fake, context)

    holds = {5: runs.started("generator-1")}
    result = runs(
        fakes(holds, count=100, generator=built_by(fake, build)), scale={2: {"generator": 2}}
    )
    assert struck.exists() and trained(result) == each_once(100)
    assert result.verdict.clean, result.verdict.line


@pytest.mark.slow
def test_a_newcomer_that_is_not_built_in_time_ends_the_run_and_says_what_it_waits_for(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeGenerator(model=MODEL)

    def build(context: Context) -> Runtime:
        if context.replica:
            time.sleep(60)
        return FakeGenerator.build(fake, context)

    graph = fakes({2: runs.stopped("generator-1")}, generator=built_by(fake, build))
    with pytest.raises(
        DeadlineError, match=r"waited 3 s for 'generator-1' to join.*its operator to be built"
    ):
        run(
            graph,
            runs=runs.path,
            quiet=True,
            limits=Limits(start_s=3.0, stop_s=1.0),
            scale={2: {"generator": 2}},
        )


# What goes wrong


@pytest.mark.slow
def test_a_leaver_that_dies_is_started_again_and_leaves_when_all_it_had_was_sent_on(
    runs: Runs, tmp_path: Path
) -> None:
    fake, struck = FakeGenerator(model=MODEL), tmp_path / "struck"

    class Dying(Around):
        def tell(self, message: Mapping[str, Any]) -> None:
            if "end" in message and not struck.exists():
                struck.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            super().tell(message)

    def build(context: Context) -> Runtime:
        inner = FakeGenerator.build(fake, context)
        return Dying(inner) if context.replica else inner

    holds = {5: runs.started("generator-1"), 9: struck.exists}
    graph = fakes(holds, count=100, generator=built_by(fake, build))
    result = runs(graph, scale={5: {"generator": 2}, 9: {"generator": 1}})
    assert struck.exists() and trained(result) == each_once(100)
    assert result.verdict.clean, result.verdict.line


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        ({3: {"generater": 2}}, "did you mean 'generator'"),
        ({3: {"trainer": 2}}, "'trainer' cannot run as 2 replicas"),
        ({3: {"reward": 2}}, "'reward' cannot run as 2 replicas"),
        ({3: {"generator": 0}}, "'generator' cannot run as 0 replicas"),
        ({-1: {"generator": 2}}, "scale names step -1"),
    ],
)
def test_a_wish_that_cannot_be_is_refused_before_anything_starts(
    scale: dict[int, dict[str, int]], said: str, tmp_path: Path
) -> None:
    with pytest.raises(GraphError, match=said):
        run(fake_graph(), runs=tmp_path / "runs", scale=scale)
    assert not (tmp_path / "runs").exists()


def test_a_run_in_one_process_is_not_scaled(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="one replica of everything"):
        run(fake_graph(), on=inline(), runs=tmp_path / "runs", scale={1: {"generator": 2}})


# The command


def typed(runs: Runs, *wishes: str) -> tuple[int, str]:
    """The command as a user types it: its status, and what it prints."""
    program = "from dataflow.cli import main; main()"
    words = [sys.executable, "-c", program, "scale", str(runs.path / "latest"), *wishes]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, timeout=60
    )
    return done.returncode, " ".join(done.stdout.split())


def test_the_command_reaches_the_run_which_does_what_can_be_and_says_what_cannot(
    runs: Runs, tmp_path: Path
) -> None:
    """A thread asks, since the run has the main one."""
    heard: dict[str, object] = {}

    def ask() -> None:
        try:
            wait_until(
                lambda: any(runs.path.glob("latest/rollouts/*.arrow")),
                30.0,
                "a run that has made a step",
            )
            heard["done"] = typed(runs, "generator=2")
            for node in ("generater", "trainer"):
                with pytest.raises(RunError) as refused:
                    ask_to_scale(runs.folder, {node: 2})
                heard[node] = str(refused.value)
        finally:
            (tmp_path / "heard").touch()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    result = runs(
        fakes({5: (tmp_path / "heard").exists, 6: runs.started("generator-1")}, count=100)
    )
    thread.join(60)
    assert trained(result) == each_once(100)
    assert heard["done"] == (0, "generator: 1 joining, 1 live")
    assert "did you mean 'generator'" in str(heard["generater"])
    assert "'trainer' cannot run as 2 replicas" in str(heard["trainer"])


def test_a_wish_that_cannot_be_read_is_refused_with_how_to_write_it(runs: Runs) -> None:
    runs(fake_graph(count=16))
    status, said = typed(runs, "generator=two")
    assert (status, "'generator=two'; write it as generator=3" in said) == (2, True), said


def test_a_run_that_is_over_takes_no_command(runs: Runs) -> None:
    runs(fake_graph(count=16))
    with pytest.raises(RunError, match="takes no commands: it is over"):
        ask_to_scale(runs.folder, {"generator": 2})


@pytest.mark.slow
def test_a_run_whose_scheduler_was_killed_takes_no_command_either(runs: Runs) -> None:
    runs(fake_graph(count=16))
    runs.folder.write_json(CONTROL, {"address": "ipc:///nowhere/control"})
    with pytest.raises(RunError, match="takes no commands: it is over"):
        ask_to_scale(runs.folder, {"generator": 2})


def test_a_scheduler_that_does_not_answer_is_not_waited_for_longer_than_the_deadline(
    tmp_path: Path,
) -> None:
    folder = RunFolder.create(tmp_path, "silent")
    listening: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = listening.socket(zmq.ROUTER)
    router.bind(f"ipc://{tmp_path}/control")
    folder.write_json(CONTROL, {"address": f"ipc://{tmp_path}/control"})
    try:
        with pytest.raises(DeadlineError, match="has not answered within 0 s"):
            ask_to_scale(folder, {"generator": 2}, timeout_s=0.2)
    finally:
        router.close(0)
        listening.term()


# The real operators


@pytest.mark.slow
def test_real_generators_join_work_and_leave_and_every_step_trains_what_it_should(
    policy: Path, machine: None, heard: Heard, tmp_path: Path
) -> None:
    runs, others = Runs(tmp_path / "runs"), ("generator-1", "generator-2")
    graph = tiny_graph(policy, max_staleness=2, eval_every=6)
    trainer = graph.operators["trainer"]
    holds = {2: runs.started(*others), 8: heard.retired(PROMPTS, 2), 15: runs.stopped(*others)}
    build = held(trainer, holds).build
    object.__setattr__(trainer, "build", build)
    result = runs(graph, steps=16, scale={2: {"generator": 3}, 8: {"generator": 1}})
    assert (result.steps, result.verdict.clean) == (16, True), result.verdict.line
    assert sorted(trained(result)) == each_once(64)
    events = json.loads(runs.folder.trace.read_text())["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {*others, "generator-0"} <= {
        processes[event["pid"]] for event in events if event["name"] == "generator"
    }
