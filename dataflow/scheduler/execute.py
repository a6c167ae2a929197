"""Executes a planned run, in processes or in one, and leaves its times, its curve and its trace in
the folder.
"""

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import zmq

from dataflow.display import showing
from dataflow.draw import reward_curve_svg
from dataflow.errors import DeadlineError, Replaced, RunError
from dataflow.folder import socket_folder
from dataflow.folder.live_changes import latest_swaps, read_live_changes
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.snapshot import read
from dataflow.folder.trace import merge
from dataflow.graph import Graph
from dataflow.history.resume import Begun
from dataflow.node import Generate
from dataflow.planning.plan import Plan
from dataflow.scheduler.control import Scheduler
from dataflow.scheduler.control_server import (
    ControlServer,
    HostsControlServer,
    TakenOverControlServer,
)
from dataflow.scheduler.progress import ProgressWatch
from dataflow.scheduler.state_machine import RunStateMachine
from dataflow.system.clocks import RunClock, Seldom
from dataflow.system.files import Extras, warn
from dataflow.system.interrupts import asked_to_end
from dataflow.system.processes import machine
from dataflow.trackers.children import TrackersOfRun
from dataflow.trackers.chosen import ChosenTracker
from dataflow.worker.changed_knobs import roomiest
from dataflow.worker.host import NodeLoops, Settings
from dataflow.worker.kept_counts import CrossedByFile, total
from dataflow.worker.messages import NodeCommand
from dataflow.worker.ports import Ports
from dataflow.worker.swapped import swapped

# Runs a whole graph in this process, operators taking turns in a fixed order: for debuggers, tests
# and notebooks.


_NAP_MS = 5


class InlineRun:
    """One run in one thread; the same seed gives the same losses, bit for bit.

    consumes, produces: the commands of the run state machine, within the process
    waits for: scorer processes, so that their timing cannot change the order
    unblocked by: their answers; after `Limits.stall_s` without any movement the run ends with an
    error
    """

    def __init__(self, graph: Graph, plan: Plan, settings: Settings) -> None:
        self.state, self._limits, self._wish = (
            RunStateMachine(graph, plan),
            settings.run.limits,
            False,
        )
        self._ports = Ports(
            roomiest(graph, settings.changes), plan, list(graph.operators), settings
        )
        self.host = NodeLoops(
            graph,
            plan,
            graph.operators,
            settings,
            writer_of=self._ports.writer_of,
            reader_of=self._ports.reader_of,
            device=lambda node: plan.placements[node].device(0),
        )

    def start(self) -> None:
        """Build all operators."""
        self.host.build()
        self._ports.open_inlets(self.host)
        self.host.wire(self._ports.inlets, self._ports.open_outlets(self.host, {}))
        self._pass_on(self.state.start())

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Take turns until the run state machine, or `until`, says that it is over."""
        moved_at = time.monotonic()
        while not self.state.over and not until():
            if self.turn():
                moved_at = time.monotonic()
            elif time.monotonic() - moved_at > self._limits.stall_s:
                raise DeadlineError(self._stall())
            else:
                time.sleep(0.0005)

    def wish_drain(self, within_s: float) -> None:
        """As `Scheduler.wish_drain`; there are no workers."""
        self._wish = True

    def turn(self) -> bool:
        """One round over all operators."""
        moved = False
        if self._wish and not self.state.draining:
            self._pass_on(self.state.drain())
        for node, loop in self.host.loops.items():
            moved |= loop.turn()
            operator = self.host.graph.operators[node]
            if operator.light or (isinstance(operator, Generate) and operator.asks is not None):
                moved |= self._settle(node)
            self._ports.poll()
        for node, runtime in self.host.runtimes.items():
            self._pass_on(self.state.hear(node, runtime.status()))
            if self.host.loops[node].ended:
                self._pass_on(self.state.ended(node))
        self.host.keep_trace()
        return moved

    def snapshot(self) -> dict[str, Any]:
        """The same facts that a worker's heartbeat carries."""
        return {
            "name": "inline-0",
            "state": "running",
            "nodes": self.host.report(),
            "edges": self._ports.depths(),
            "crossed": self.crossed,
        }

    @property
    def crossed(self) -> CrossedByFile:
        """What has crossed the edges so far; also once it is closed."""
        return self._ports.crossed

    def close(self) -> None:
        """Give everything back."""
        with contextlib.closing(self._ports):
            self.host.close()

    def _settle(self, node: str) -> bool:
        """Let a light operator finish what it has been given, so that its timing leaves no
        trace.
        """
        loop, runtime, moved = self.host.loops[node], self.host.runtimes[node], False
        if self.host.graph.operators[node].kind == "source":
            return moved
        deadline = time.monotonic() + self._limits.stuck_s
        while time.monotonic() < deadline:
            if loop.turn():
                moved = True
            elif runtime.pending() and (waits := runtime.waits()) and not loop.blocked:
                _await(waits)
            else:
                break
        return moved

    def _pass_on(self, commands: list[NodeCommand]) -> None:
        for command in commands:
            self.host.tell(command.node, command.message)

    def _stall(self) -> str:
        state = {name: runtime.status() for name, runtime in self.host.runtimes.items()}
        return (
            f"nothing has moved for {self._limits.stall_s:.0f} s in an inline run; the operators"
            f" say {state}; one of them waits for rows that never come"
        )


def _await(arrivals: Sequence[Any]) -> None:
    """Until something arrives, or a deadline of the operator's own may be over."""
    poller = zmq.Poller()
    for arrival in arrivals:
        poller.register(arrival, zmq.POLLIN)
    poller.poll(_NAP_MS)


def activity_every(seconds: float) -> float:
    """Seconds between two lines of activity.jsonl, after so many of the run: some thousand a day.

    >>> activity_every(10.0), activity_every(3600.0), activity_every(86400.0)
    (0.5, 18.0, 60.0)
    """
    return min(60.0, max(0.5, seconds / 200))


_KILLED_SOON_S = 2.0
TIMES_S = 5.0
"""Seconds between two writes of the times so far: a killed run loses no more."""


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """How the training phase went."""

    seconds: float
    steps: int
    stopped: bool
    """Whether the user ended it early."""
    busy_seconds: Mapping[str, float]
    beside_seconds: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The workers of a scheduler that has died, and its last snapshot."""

    server: ControlServer
    snapshot: Mapping[str, Any]

    @property
    def begun(self) -> Begun:
        """How far the run had come when that scheduler took it up."""
        return Begun(**self.snapshot["begun"])

    @property
    def away_s(self) -> float:
        """By how much this machine's clock is ahead of the run's. The scheduler of a run over hosts
        was on another machine: the run's clock goes on where it stood, after the time that agents
        have waited by theirs.
        """
        if isinstance(self.server, HostsControlServer):
            return time.monotonic() - float(self.snapshot["at"]) - self.server.alone_s
        return float(self.snapshot.get("away_s", 0.0))


def take(folder: RunFolder, may_go_on: bool = True) -> Taken | None:
    """The workers of a run whose scheduler has died; None where there are none, or none that could
    be gone on with: those are ended. may_go_on: whether the run is to go on as it was.
    """
    place = socket_folder.of(folder)
    if place is None:
        return None
    try:
        server = TakenOverControlServer(place)
    except RunError:
        return None
    with contextlib.suppress(RunError):
        if may_go_on:
            return Taken(server=server, snapshot=read(server.left))
    server.close()
    return None


class Times:
    """times.json, of all parts of the run together; written on the way too, as a run that is killed
    says nothing. Beside it activity.jsonl: what each node had done by then, now and then.
    """

    def __init__(self, folder: RunFolder, begun: Begun) -> None:
        self._folder, self._begun = folder, begun
        self._looked = self._noted = time.monotonic()

    def look(self, watch: ProgressWatch) -> None:
        """Write how far it is, now and then."""
        if time.monotonic() - self._looked > TIMES_S:
            self._looked = time.monotonic()
            self.write("not finished", watch, flush=False)
        if time.monotonic() - self._noted > activity_every(watch.seconds):
            self._noted = time.monotonic()
            self._folder.note_activity(watch.seconds, watch.activity, watch.crossed)

    def write(
        self, outcome: str, watch: ProgressWatch | None = None, *, flush: bool = True
    ) -> None:
        """Seconds, by node seconds at work, and by data edge what has crossed it, of this part, if
        it has begun, and of those before it.
        """
        before = self._begun
        times = {
            "outcome": outcome,
            "seconds": before.seconds + (watch.seconds if watch else 0.0),
            "busy_seconds": _added(before.busy_seconds, watch.busy_seconds if watch else {}),
            "beside_seconds": _added(before.beside_seconds, watch.beside_seconds if watch else {}),
            "edges": total([{"before": before.edges}, {"now": watch.crossed if watch else {}}]),
        }
        self._folder.write_json("times.json", times, flush=flush)


def _added(first: Mapping[str, float], right: Mapping[str, float]) -> dict[str, float]:
    return {node: first.get(node, 0.0) + right.get(node, 0.0) for node in {**first, **right}}


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What is to be executed."""

    graph: Graph
    plan: Plan
    settings: Settings
    begun: Begun
    quiet: bool = False
    in_one_process: bool = False
    takeover: Taken | None = None
    """The running workers, where a scheduler before has left some."""
    server: ControlServer | None = None
    """Speaks to the agents of the run's hosts, which are ready; None: all workers are on this
    machine."""
    track: Sequence[ChosenTracker] = ()
    """Who is told of it elsewhere."""
    standby: Callable[[], int] | None = None
    """What takes the scheduler's place when it dies; as `ControlServer` has it."""


def execute(run: RunSpec) -> TrainingResult:
    """Run it to its end. Errors: as `dataflow.runner.run`."""
    notices: list[str] = []
    folder = RunFolder.open(run.settings.folder, Extras(notices.append))
    clock = RunClock(0.0 if run.takeover is None else run.takeover.away_s)
    watch = ProgressWatch(
        run.graph, run.plan, folder, run.settings.run.steps, clock, run.begun.steps
    )
    times = Times(folder, run.begun)
    following = TrackersOfRun(folder, run.track, run.settings.run.limits)
    notices += following.look()
    try:
        with _told_if_it_fails(times, watch):
            outcome = (
                _inline(run, watch, times, notices, following)
                if run.in_one_process
                else _processes(run, watch, times, clock, notices, following)
            )
        times.write("stopped" if outcome.stopped else "finished", watch)
        marks = [(change.step, change.mark) for change in read_live_changes(folder)]
        folder.extras.write(
            folder.path / "curve.svg", reward_curve_svg(watch.curve(), run.graph.name, marks)
        )
        merge(folder)
    finally:
        following.close()
        for text in (*following.look(), *notices):
            warn(text)
    return outcome


@contextlib.contextmanager
def _told_if_it_fails(times: Times, watch: ProgressWatch) -> Iterator[None]:
    """Write how far the run was when it fails; another scheduler that has the run writes that
    itself.
    """
    try:
        yield
    except Replaced:
        raise
    except BaseException:
        with contextlib.suppress(RunError):
            times.write("not finished", watch)
        raise


def _processes(
    run: RunSpec,
    watch: ProgressWatch,
    times: Times,
    clock: RunClock,
    notices: list[str],
    following: TrackersOfRun,
) -> TrainingResult:
    scheduler = _scheduler(run, watch, clock)
    scheduler.snapshot.parts |= {
        "begun": lambda: asdict(run.begun),
        "watch": watch.to_plain,
        "away_s": lambda: clock.away_s,
    }
    folder = RunFolder.open(run.settings.folder, Extras(notices.append))

    def look() -> None:
        watch.note(scheduler.table.run, scheduler.heartbeats)
        times.look(watch)
        view.update(watch.snapshot())
        for texts in (scheduler.notices, watch.notices, notices, following.look()):
            while texts:
                view.message(texts.pop(0))

    def starts(late: Any) -> None:
        view.update(watch.starting(late))
        notices.extend(following.look())

    seldom, stopping = Seldom(), StopSignals(scheduler.wish_drain)
    with showing(sys.stdout, quiet=run.quiet) as view:
        with (
            stopping.heard(view.message),
            _closing(scheduler, watch, folder),
            _stacks_wished(scheduler),
            _suspends(scheduler, clock),
        ):
            asked_at = {"address": scheduler.address, "pid": os.getpid(), "machine": machine()}
            socket_folder.mark(scheduler.folder, folder)
            folder.write_json(socket_folder.CONTROL, asked_at)
            scheduler.start(progress=starts)
            while not scheduler.table.run.over:
                scheduler.turn(0.1)
                scheduler.check()
                seldom(look)
            look()
        # By now nobody waits for a sign of this process, whom a standby would replace while it
        # waits for trackers.
        following.end(_how_ended(scheduler.table.run), view.message, stopping.within_s)
    return _outcome(watch, scheduler.table.run)


@contextlib.contextmanager
def _closing(scheduler: Scheduler, watch: ProgressWatch, folder: RunFolder) -> Iterator[None]:
    """Close the scheduler at the end, and count what it has heard until then."""
    try:
        yield
    finally:
        scheduler.close()
        watch.count(scheduler.heartbeats, scheduler.crossed)
        folder.extras.remove(folder.path / socket_folder.CONTROL)


def _scheduler(run: RunSpec, watch: ProgressWatch, clock: RunClock) -> Scheduler:
    if run.takeover is not None:
        watch.take_up(run.takeover.snapshot["watch"])
        return Scheduler(
            run.graph,
            run.plan,
            run.settings,
            clock=clock,
            server=run.takeover.server,
            snapshot=run.takeover.snapshot,
        )
    scheduler = Scheduler(
        run.graph, run.plan, run.settings, clock=clock, server=run.server, standby=run.standby
    )
    if run.begun.steps:
        scheduler.table.run.go_on(run.begun.steps, run.begun.rounds)
    return scheduler


def _inline(
    run: RunSpec, watch: ProgressWatch, times: Times, notices: list[str], following: TrackersOfRun
) -> TrainingResult:
    running = InlineRun(
        swapped(run.graph, latest_swaps(run.settings.swaps)), run.plan, run.settings
    )
    if run.begun.steps:
        running.state.go_on(run.begun.steps, run.begun.rounds)

    def look() -> bool:
        watch.note(running.state, {"inline-0": running.snapshot()})
        times.look(watch)
        view.update(watch.snapshot())
        for texts in (watch.notices, notices, following.look()):
            while texts:
                view.message(texts.pop(0))
        return False

    stopping = StopSignals(running.wish_drain)
    try:
        with showing(sys.stdout, quiet=run.quiet) as view:
            running.start()
            with stopping.heard(view.message):
                running.run(until=look)
            look()
            following.end(_how_ended(running.state), view.message, stopping.within_s)
    finally:
        running.close()
        watch.count({}, running.crossed)
    return _outcome(watch, running.state)


def _outcome(watch: ProgressWatch, state: RunStateMachine) -> TrainingResult:
    return TrainingResult(
        seconds=watch.seconds,
        steps=state.step,
        stopped=state.draining,
        busy_seconds=watch.busy_seconds,
        beside_seconds=watch.beside_seconds,
    )


def _how_ended(state: RunStateMachine) -> str:
    return "stopped" if state.draining else "finished"


class StopSignals:
    """A run that Ctrl-C, SIGTERM or SIGHUP stops: the first lets it end in order, the next one
    raises.

    Whoever sends SIGTERM or SIGHUP kills what is still there a few seconds later: then nobody waits
    long for workers that have to wind down, or for trackers.
    """

    def __init__(self, drain: Callable[[float], object]) -> None:
        """drain: asks for the end, and is told how long workers have then."""
        self._drain = drain
        self.within_s = math.inf
        """How long the run waits at most for what is not a part of its last step."""

    def heard(self, say: Callable[[str], object]) -> AbstractContextManager[None]:
        """Signals are heard while this lasts."""

        def ask(number: int) -> None:
            if number == signal.SIGINT:
                say("stopping after the step under way; press Ctrl-C again to stop at once")
            else:
                say(f"stopping after the step under way, because of {signal.Signals(number).name}")
                self.within_s = _KILLED_SOON_S
            self._drain(self.within_s)

        return asked_to_end(ask)


@contextlib.contextmanager
def _stacks_wished(scheduler: Scheduler) -> Iterator[None]:
    """SIGUSR1 asks for the stacks of all workers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGUSR1, lambda number, frame: scheduler.stall_watch.wish())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@contextlib.contextmanager
def _suspends(scheduler: Scheduler, clock: RunClock) -> Iterator[None]:
    """Ctrl-Z (SIGTSTP) stops this process, as ever, and the workers with it; SIGCONT lets all go on
    where they were.
    """

    def stop() -> None:
        scheduler.pause(True)
        # this thread: nothing below runs before it goes on
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        scheduler.pause(False)

    def suspend(number: int, frame: object) -> None:
        clock.stand_still(stop)

    is_free = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL
    )
    if not is_free:
        yield
        return
    signal.signal(signal.SIGTSTP, suspend)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
