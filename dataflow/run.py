"""`run(graph)`: plans it, runs it on this machine or inline, and returns what came of it."""

import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from dataflow import command
from dataflow.conductor import Conductor
from dataflow.control import Limits, Scheduler
from dataflow.describe import consumers, graph_facts, plan_facts
from dataflow.display import SafeView, make_view
from dataflow.draw import reward_curve_svg
from dataflow.errors import GraphError
from dataflow.graph import Graph
from dataflow.host import Settings
from dataflow.inline import InlineRun
from dataflow.launch import KEY, Launch
from dataflow.ledger import Ledger
from dataflow.model_size import measure_models
from dataflow.plan import Devices, Plan, plan
from dataflow.resume import Begun, Recorded, check_same, go_on_with, take_up
from dataflow.run_folder import RunFolder
from dataflow.run_lock import held
from dataflow.scaling import Scaling
from dataflow.secure import check_listen
from dataflow.summary import summarize
from dataflow.trace import merge
from dataflow.verify import Verdict, verify
from dataflow.watch import Watch

TIMES_S = 5.0
"""Between two times that the seconds so far are written: so many a run that is killed does not know of."""


@dataclass(frozen=True)
class Inline:
    """Run all operators in this process, in a fixed order."""


def inline() -> Inline:
    """For `run(graph, on=inline())`: one process, one thread, bit-exact for a seed, at home in a debugger."""
    return Inline()


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a run."""

    folder: Path
    seconds: float
    """Wall-clock seconds of the training phase."""
    steps: int
    verdict: Verdict
    busy_seconds: Mapping[str, float] = field(default_factory=dict)
    """By node, over the training phase."""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return RunFolder.open(self.folder).read_metrics()

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        """(step, accuracy) of every evaluation."""
        return [(line["step"], line["eval_accuracy"]) for line in self.metrics if "eval_accuracy" in line]

    @property
    def efficiency(self) -> float:
        """Busy seconds of the busiest node over wall seconds; 1 means that nothing but that node limits the run."""
        return max(self.busy_seconds.values(), default=0.0) / self.seconds if self.seconds else 0.0


def this_machine() -> Devices:
    """Cores, memory and accelerators at hand, without importing torch."""
    gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) or len(list(Path("/dev").glob("nvidia[0-9]*")))
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Devices(cpus=cpus, gpus=gpus, memory_bytes=psutil.virtual_memory().total)


def make_plan(
    graph: Graph,
    *,
    gpus: Mapping[str, int | str] | None = None,
    replicas: Mapping[str, int] | None = None,
    ranks: Mapping[str, int] | None = None,
    steps: int | None = None,
    devices: Devices | None = None,
    scale: Mapping[int, Mapping[str, int]] | None = None,
    weights: str | None = None,
    listen: str = "",
    one_process: bool = False,
) -> Plan:
    """The plan that `run` would use."""
    if listen and one_process:
        raise GraphError(f"a run in one process listens nowhere, but listen is '{listen}'; leave it out")
    if listen:
        check_listen(listen)
    made = plan(
        graph, devices or this_machine(), gpus=gpus, replicas=replicas, ranks=ranks, steps=steps,
        sizes=measure_models(graph), scale=scale, weights=weights, one_process=one_process,
    )  # fmt: skip
    for wishes in made.scale.values():
        Scaling(graph, made).check(wishes)
    return dataclasses.replace(made, listen=listen)


def run(
    graph: Graph,
    *,
    on: Inline | None = None,
    gpus: Mapping[str, int | str] | None = None,
    replicas: Mapping[str, int] | None = None,
    ranks: Mapping[str, int] | None = None,
    steps: int | None = None,
    seed: int | None = None,
    runs: str | Path = "runs",
    quiet: bool = False,
    limits: Limits | None = None,
    scale: Mapping[int, Mapping[str, int]] | None = None,
    weights: str | None = None,
    listen: str = "",
    resume: str | Path | None = None,
    launch: Launch | None = None,
) -> Result:
    """Run a graph to its end, or for so many steps.

    on: `inline()` for one process; None for worker processes on this machine.
    gpus, replicas, ranks: see `plan`. scale: replicas that a node is to have from a step on, {100: {"generator": 3}}.
    weights: the weight plane's executor (see `executors`); None: chosen from where the ranks sit.
    listen: an address of this machine; edges and control go over tcp there, encrypted, with keys made for this run;
    empty: over sockets that only this user's processes can open.
    seed: of prompts' order, sampling and scorers; 0 when None. runs: where the run folder goes.
    resume: the folder of a run of this graph that is to go on; it has its seed and, where None is given, its steps.
    launch: how `dataflow resume` starts this program again; `main` knows it.
    Errors: GraphError before anything starts; RunError with the node that failed; Ctrl-C finishes the step under
    way, writes a checkpoint and returns, a second one raises KeyboardInterrupt at once. What is raised in the midst
    of a run has a note with the way to go on.
    """
    if steps is not None and steps < 1:
        raise GraphError(f"a run makes at least 1 step, but steps is {steps}; give a number above 0 or leave it out")
    before, recorded = None, None
    if resume is not None:
        before = RunFolder.open(resume)
        recorded = Recorded.read(before)
        check_same(before, recorded, graph_facts(graph), seed)
        steps, seed = recorded.steps if steps is None else steps, recorded.seed
    devices = dataclasses.replace(this_machine(), cpus=1) if on is not None else None
    planned = make_plan(
        graph, gpus=gpus, replicas=replicas, ranks=ranks, steps=steps, devices=devices, scale=scale,
        weights=weights, listen=listen, one_process=on is not None,
    )  # fmt: skip
    folder = before or RunFolder.create(runs, graph.name)
    settings = Settings(folder=str(folder.path), seed=seed or 0, steps=steps, listen=listen)
    with held(folder):
        if recorded is None:
            begun = Begun()
            _describe(folder, graph, planned, settings, launch)
        else:
            recorded = Recorded.read(folder)
            begun = take_up(folder, graph, recorded, steps)
            _describe_again(folder, graph, planned, settings, recorded, begun)
        try:
            outcome = _carry_out(graph, planned, settings, begun, on, quiet, limits)
        except BaseException as error:
            error.add_note(go_on_with(folder, recorded.config.get(KEY) if recorded else launch))
            raise
    verdict = verify(folder.path)
    if not quiet:
        with make_view(sys.stdout) as view:
            view.summary(summarize(folder, verdict.line, verdict.clean))
    return Result(
        folder=folder.path, seconds=outcome.seconds, steps=outcome.steps, verdict=verdict,
        busy_seconds=outcome.busy_seconds,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    seconds: float
    steps: int
    stopped: bool
    """Whether the user ended it early."""
    busy_seconds: Mapping[str, float]


class _Times:
    """times.json, of all parts of the run together; written on the way too, as a run that is killed says nothing."""

    def __init__(self, folder: RunFolder, begun: Begun) -> None:
        self._folder, self._begun = folder, begun
        self._looked = time.monotonic()

    def look(self, watch: Watch) -> None:
        """Write how far it is, now and then."""
        if time.monotonic() - self._looked > TIMES_S:
            self._looked = time.monotonic()
            self.write("not finished", watch.seconds, watch.busy_seconds, flush=False)

    def write(self, outcome: str, seconds: float, busy_seconds: Mapping[str, float], *, flush: bool = True) -> None:
        """Seconds and, by node, seconds at work, of this part."""
        before = self._begun
        busy = {
            node: before.busy_seconds.get(node, 0.0) + busy_seconds.get(node, 0.0)
            for node in {**before.busy_seconds, **busy_seconds}
        }
        found = {"outcome": outcome, "seconds": before.seconds + seconds, "busy_seconds": busy}
        self._folder.write_json("times.json", found, flush=flush)


def _carry_out(
    graph: Graph,
    planned: Plan,
    settings: Settings,
    begun: Begun,
    on: Inline | None,
    quiet: bool,
    limits: Limits | None,
) -> _Outcome:
    """Run it, and leave its times, its curve and its trace in the folder."""
    folder = RunFolder.open(settings.folder)
    watch = Watch(graph, planned, folder, settings.steps)
    times = _Times(folder, begun)
    if on is None:
        outcome = _run_processes(graph, planned, settings, begun, watch, times, quiet, limits)
    else:
        outcome = _run_inline(graph, planned, settings, begun, watch, times, quiet)
    times.write("stopped" if outcome.stopped else "finished", outcome.seconds, outcome.busy_seconds)
    (folder.path / "curve.svg").write_text(reward_curve_svg(watch.lines, title=graph.name), encoding="utf-8")
    merge(folder)
    return outcome


def _run_processes(
    graph: Graph,
    planned: Plan,
    settings: Settings,
    begun: Begun,
    watch: Watch,
    times: _Times,
    quiet: bool,
    limits: Limits | None,
) -> _Outcome:
    scheduler = Scheduler(graph, planned, settings, limits=limits)
    if begun.steps:
        scheduler.conductor.go_on(begun.steps, begun.rounds)
    open_for_commands = RunFolder.open(settings.folder).path / command.FILE

    def look() -> None:
        watch.note(scheduler.conductor, scheduler.beats)
        times.look(watch)
        view.update(watch.snapshot())
        while scheduler.said:
            view.message(scheduler.said.pop(0))

    try:
        with _view(quiet) as view, _interrupts(scheduler, view):
            asked_at = {"address": scheduler.address, "pid": os.getpid()}
            RunFolder.open(settings.folder).write_json(command.FILE, asked_at)
            scheduler.start(progress=lambda late: view.update(watch.starting(late)))
            while not scheduler.conductor.over:
                scheduler.turn(0.1)
                look()
            look()
    finally:
        open_for_commands.unlink(missing_ok=True)
        scheduler.close()
    return _outcome(watch, scheduler.conductor)


def _run_inline(
    graph: Graph, planned: Plan, settings: Settings, begun: Begun, watch: Watch, times: _Times, quiet: bool
) -> _Outcome:
    running = InlineRun(graph, planned, settings)
    if begun.steps:
        running.conductor.go_on(begun.steps, begun.rounds)

    def look() -> bool:
        watch.note(running.conductor, {"inline-0": running.snapshot()})
        times.look(watch)
        view.update(watch.snapshot())
        return False

    try:
        with _view(quiet) as view:
            running.start()
            running.run(until=look)
            look()
    finally:
        running.close()
    return _outcome(watch, running.conductor)


def _outcome(watch: Watch, conductor: Conductor) -> _Outcome:
    return _Outcome(
        seconds=watch.seconds, steps=conductor.step, stopped=conductor.draining, busy_seconds=watch.busy_seconds
    )


def _view(quiet: bool) -> SafeView:
    return SafeView([]) if quiet else make_view(sys.stdout)


@contextlib.contextmanager
def _interrupts(scheduler: Scheduler, view: Any) -> Iterator[None]:
    """The first Ctrl-C drains, the second one raises."""
    pressed: list[float] = []

    def press(number: int, frame: object) -> None:
        pressed.append(time.monotonic())
        if len(pressed) > 1 or number == signal.SIGTERM:
            raise KeyboardInterrupt
        view.message("stopping after the step under way; press Ctrl-C again to stop at once")
        scheduler.wish_drain()

    try:
        before = {number: signal.signal(number, press) for number in (signal.SIGINT, signal.SIGTERM)}
        before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, lambda number, frame: scheduler.attendant.wish())
    except ValueError:  # not in the main thread: the caller handles signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _describe(folder: RunFolder, graph: Graph, planned: Plan, settings: Settings, launch: Launch | None) -> None:
    """Put down what is run before it runs."""
    folder.write_json("graph.json", graph_facts(graph))
    how = {"command": [sys.executable, *sys.argv], KEY: launch, "seed": settings.seed, "steps": settings.steps}
    folder.write_json("config.json", how | plan_facts(graph, planned))
    graph.draw(folder.graph_svg, planned)
    Ledger.create(folder.ledger, consumers(graph)).close()


def _describe_again(
    folder: RunFolder, graph: Graph, planned: Plan, settings: Settings, recorded: Recorded, begun: Begun
) -> None:
    """Put down how a run goes on, before it does."""
    resumed = [*recorded.config.get("resumed", []), {"at": time.time(), "from": begun.steps, "steps": settings.steps}]
    config = {**recorded.config, "steps": settings.steps, "resumed": resumed, **plan_facts(graph, planned)}
    folder.write_json("config.json", config)
    graph.draw(folder.graph_svg, planned)
    _Times(folder, begun).write("not finished", 0.0, {})
    folder.make_latest()
