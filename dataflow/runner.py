"""`run(graph)`: plans it, runs it on this machine or inline, and returns what came of it.

Over 600 lines: `run`, `inline` and `collect` are the three ways to run a graph from Python.
"""

import collections
import contextlib
import dataclasses
import itertools
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import pyarrow as pa

from dataflow.agent.host_program import HOSTED
from dataflow.display import for_a_while, make_view
from dataflow.errors import GraphError, Replaced, checked
from dataflow.folder import run_hold
from dataflow.folder.copies.process import copies_of
from dataflow.folder.copies.store import CONFIG as COPIES
from dataflow.folder.ledger import Ledger
from dataflow.folder.ledger_service.service import LedgerProcess
from dataflow.folder.live_changes import read_changes, read_swaps
from dataflow.folder.run_folder import FORESEEN, RunFolder
from dataflow.folder.run_hold import is_over_hosts
from dataflow.folder.run_lock import held
from dataflow.foresight.choice.ways_out import plan_or_advise
from dataflow.gguf.conversion import converted, file_fault
from dataflow.graph import Graph
from dataflow.history.bottleneck import bounded
from dataflow.history.describe import consumers, describe, graph_facts, plan_facts
from dataflow.history.environment import KEY as ENVIRONMENT
from dataflow.history.environment import environment
from dataflow.history.launch import KEY, Launch, check_text, trusted
from dataflow.history.resume import Begun, RecordedRun, check_same, go_on_with, has_begun, take_up
from dataflow.history.summary import summarize
from dataflow.history.verify import Verdict, verify
from dataflow.launchers.hosted_run import RunRequest, check_hosted, hosted, program_of
from dataflow.launchers.launcher import Launcher
from dataflow.limits import Limits
from dataflow.model import Model, is_gguf
from dataflow.node import Sink, Source, Stream
from dataflow.planning.gpu_groups import Wishes
from dataflow.planning.hosts import Devices
from dataflow.planning.inputs import Place, PlanInputs
from dataflow.planning.memory_need import by_way
from dataflow.planning.model_size import bytes_of, measure_models
from dataflow.planning.plan import Plan
from dataflow.planning.this_machine import this_machine as this_machine
from dataflow.records import GROUP_ID, MESSAGE_BYTES, POSITION, schema
from dataflow.runs.notebook import html_of
from dataflow.runtime import Batch, Context, RunSettings, Runtime
from dataflow.scheduler import orphans, scaling
from dataflow.scheduler.execute import InlineRun, RunSpec, Times, execute, take
from dataflow.scheduler.table import Table
from dataflow.scoring.joining import Join
from dataflow.structure import kept_by
from dataflow.system.files import to_json
from dataflow.system.interrupts import interrupted
from dataflow.system.log import log_to
from dataflow.system.security import check_listen
from dataflow.trackers.chosen import TRACK, ChosenTracker, Wished, choose, recorded_names
from dataflow.worker.host import Settings

KEEP = "keep_steps"
"""In config.json."""


@dataclass(frozen=True)
class Inline:
    """Run all operators in this process, in a fixed order."""


def inline() -> Inline:
    """For `run(graph, on=inline())`: one process, one thread, bit-exact for a seed, at home in a
    debugger.

    >>> from dataflow import inline
    >>> inline()
    Inline()
    """
    return Inline()


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a run.

    >>> from dataflow import Graph, inline, run
    >>> from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
    >>> g = Graph("tiny")
    >>> FakeTrainer(prompts_per_step=2)(FakeGenerator()(g.source(FakePrompts())))
    >>> result = run(g, on=inline(), steps=2, runs="runs", quiet=True)
    >>> result.steps, result.verdict.clean, [line["step"] for line in result.metrics]
    (2, True, [1, 2])
    """

    folder: Path
    seconds: float
    """Wall-clock seconds of the training phase."""
    steps: int
    verdict: Verdict
    busy_seconds: Mapping[str, float] = field(default_factory=dict)
    """By node, over the training phase."""
    efficiency: float = 0.0
    """Share of them in which what bounds the run was at work; 1: nothing else limits it
    (`history.bottleneck`)."""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return RunFolder.open(self.folder).read_metrics()

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        """(step, accuracy) of every evaluation."""
        return [
            (line["step"], line["eval_accuracy"])
            for line in self.metrics
            if "eval_accuracy" in line
        ]

    def _repr_html_(self) -> str:
        return html_of(RunFolder.open(self.folder))


@checked
def make_plan(
    graph: Graph,
    *,
    gpus: Wishes | Literal["shared"] | None = None,
    replicas: Mapping[str, int] | None = None,
    ranks: Mapping[str, int] | None = None,
    steps: int | None = None,
    devices: Devices | None = None,
    scale: Mapping[int, Mapping[str, int]] | None = None,
    weights: str | None = None,
    listen: str = "",
    message_bytes: int = MESSAGE_BYTES,
    link_gbps: float | None = None,
    place: Place | None = None,
    chosen: Mapping[str, Mapping[str, Any]] | None = None,
    one_process: bool = False,
) -> Plan:
    """The plan that `run` would use."""
    if link_gbps is not None and not link_gbps > 0:
        raise GraphError(
            f"a link carries more than nothing, but link_gbps is {link_gbps}; give gigabits per"
            " second"
        )
    if listen and one_process:
        raise GraphError(
            f"a run in one process listens nowhere, but listen is '{listen}'; leave it out"
        )
    if listen:
        check_listen(listen)
    devices = devices or this_machine()
    if link_gbps is not None:
        devices = dataclasses.replace(devices, link_bytes_per_s=link_gbps * 1e9 / 8)
    planned = plan_or_advise(
        graph,
        devices,
        gpus=gpus,
        replicas=replicas,
        ranks=ranks,
        steps=steps,
        sizes=measure_models(graph),
        scale=scale,
        weights=weights,
        message_bytes=message_bytes,
        place=place,
        chosen=chosen,
        one_process=one_process,
    )
    for wishes in planned.scale.values():
        scaling.check(Table(graph=graph, plan=planned), wishes)
    return dataclasses.replace(planned, listen=listen)


@checked
@interrupted()
def run(
    graph: Graph,
    *,
    on: Inline | Launcher | None = None,
    gpus: Wishes | Literal["shared"] | None = None,
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
    message_bytes: int = MESSAGE_BYTES,
    link_gbps: float | None = None,
    place: Place | None = None,
    resume: str | Path | None = None,
    standby: bool = False,
    keep_steps: int | None = None,
    checkpoint_to: str | None = None,
    track: Sequence[Wished] | None = None,
    launch: Launch | None = None,
    foreseen: Mapping[str, Any] | None = None,
) -> Result:
    """Run a graph to its end, or for so many steps.

    Args:
        on: `inline()` for one process; None for worker processes on this machine; a launcher, such
            as `local(3)`, for several hosts, each of which runs this program up to its `run`
            (docs/hosts.md).
        gpus, replicas, ranks: see `plan`.
        scale: replicas that a node is to have from a step on, {100: {"generator": 3}}.
        weights: the weight plane's executor (see `executors`); None: chosen from where the ranks
            sit.
        listen: an address of this machine; edges and control go over tcp there, encrypted, with
            keys made for this run; empty: over sockets that only this user's processes can open.
        message_bytes: most bytes of one message on a data edge: batches are cut, a larger group
            goes in parts.
        link_gbps: gigabits per second between machines, and of weights="gloo" or "nccl" wherever
            they go; where the link is slow, weights travel as what changed. None: unknown, and
            everything travels.
        place: by node, the host of its replicas, or several that they take in turn.
        seed: of prompts' order, sampling and scorers; 0 when None.
        runs: where the run folder goes.
        resume: the folder of a run of this graph that is to go on; it has its seed and, where None
            is given, its steps. Where its scheduler has died a moment ago, its workers are still at
            work, and are taken over.
        limits: how long it waits, for what; `Limits()` when None. Those that models need, and that
            are left at their defaults, grow with the models' bytes (`Limits.for_models`).
        standby: should this process die, another one takes over by itself, and writes
            logs/scheduler.log.
        keep_steps: rollouts are kept of the last so many steps, and of those that recovery and
            replay need; None: of all, or as the run that is resumed had it. See docs/recovery.md.
        checkpoint_to: an address, as `pyarrow.fs.FileSystem.from_uri` takes it, or a path: each
            checkpoint is copied there, with the ledger, so that a host which does not see the run
            folder can go on from it (`dataflow resume --from`). None: nowhere, or as the run that
            is resumed had it.
        track: who is told of the run elsewhere (docs/trackers.md). None: nobody, or the libraries
            of the resumed run.
        launch: how `dataflow resume` starts this program again; `main` knows it.
        foreseen: what `dataflow.foresight` tells of this run; kept in foreseen.json, and compared
            with what comes.

    Errors: GraphError before anything starts; RunError with the node that failed; Ctrl-C, SIGTERM
    or SIGHUP finishes the step under way, writes a checkpoint and returns, a second one raises
    KeyboardInterrupt at once, as the first does before there are workers (docs/recovery.md). What
    is raised in the midst of a run has a note with the way to go on.

    >>> from dataflow import Graph, inline, run
    >>> from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
    >>> g = Graph("tiny")
    >>> FakeTrainer(prompts_per_step=2)(FakeGenerator()(g.source(FakePrompts())))
    >>> run(g, on=inline(), steps=3, runs="runs", quiet=True).verdict.clean
    True
    """
    tell: Callable[[str], object] = _unheard if quiet else _print
    _convert_models(graph, tell)
    if (host := HOSTED.get(None)) is not None:
        _check_files(graph)
        host.serve(graph, make_plan(graph, **host.inputs.arguments))
    before, recorded, trackers = check_start(
        graph,
        on=on,
        steps=steps,
        seed=seed,
        keep_steps=keep_steps,
        resume=resume,
        track=track,
        listen=listen,
        standby=standby,
    )
    check_text(
        ("the run folder", str(Path(resume or runs).absolute())),
        ("the graph", to_json(graph_facts(graph))),
    )
    if recorded is not None:
        steps, seed = recorded.steps if steps is None else steps, recorded.seed
        keep_steps = recorded.config.get(KEEP) if keep_steps is None else keep_steps
    in_one_process = isinstance(on, Inline)
    machine = this_machine()
    inputs = PlanInputs(
        devices=dataclasses.replace(machine, cpus=1) if in_one_process else machine,
        gpus=gpus,
        replicas=replicas or {},
        ranks=ranks or {},
        steps=steps,
        scale=scale or {},
        weights=weights,
        listen=listen,
        message_bytes=message_bytes,
        link_gbps=link_gbps,
        place=place or {},
        chosen=None if recorded is None else recorded.chosen,
    )

    def may_take(planned: Plan) -> bool:
        as_it_was = {
            "steps": steps,
            KEEP: keep_steps,
            COPIES: dataclasses.asdict(copies) if copies else None,
        }
        as_it_was |= plan_facts(graph, planned)
        return recorded is not None and not in_one_process and recorded.has(as_it_was)

    with contextlib.ExitStack() as open_:
        server = None
        if isinstance(on, Launcher):
            folder = before or open_.enter_context(_made(runs, graph.name))
            hold, service = _held_over_hosts(folder, limits or Limits(), tell, open_)
            copies = copies_of(
                folder, kept_by(graph), recorded.config if recorded else None, checkpoint_to
            )
            hosted_run = open_.enter_context(
                hosted(
                    on,
                    RunRequest(
                        graph=graph,
                        inputs=inputs,
                        make_plan=lambda inputs: make_plan(graph, **inputs.arguments),
                        part=recorded.part if recorded else 0,
                        copies=copies,
                        hold=hold,
                        ledger=service,
                        launch=program_of(launch),
                        folder=folder,
                        listen=listen or on.listen,
                        limits=limits or Limits(),
                        may_take=may_take,
                        told=tell,
                    ),
                )
            )
            planned, takeover, server = hosted_run.plan, hosted_run.taken, hosted_run.server
        else:
            planned = make_plan(graph, **inputs.arguments, one_process=in_one_process)
            folder = before or open_.enter_context(_made(runs, graph.name))
            if is_over_hosts(folder):
                _held_over_hosts(folder, limits or Limits(), tell, open_)
            copies = copies_of(
                folder, kept_by(graph), recorded.config if recorded else None, checkpoint_to
            )
            takeover = open_.enter_context(
                held(folder, take=lambda: take(folder, may_take(planned)))
            )
        settings = Settings(
            folder=str(folder.path),
            run=RunSettings(
                seed=seed or 0,
                steps=steps,
                keep_steps=keep_steps,
                limits=_limits(limits or Limits(), graph, planned),
            ),
            listen=listen,
            copies=copies,
            swaps=() if recorded is None else read_swaps(folder),
            changes=() if recorded is None else read_changes(folder),
        )
        if takeover is not None:
            begun = takeover.begun
        elif recorded is None:
            orphans.clear_all(folder.path.parent)
            begun = Begun()
            if launch is not None and launch.config:
                folder.extras.attempt(
                    folder.flags, partial(folder.flags.write_text, launch.config, "utf-8")
                )
                launch = dataclasses.replace(launch, config="")
            _describe(
                folder, graph, planned, settings, {KEY: launch, TRACK: recorded_names(trackers)}
            )
            if foreseen:
                folder.write_json(FORESEEN, foreseen)
        else:
            orphans.remove(folder)
            recorded = RecordedRun.read(folder)
            begun = take_up(folder, graph, recorded, steps)
            _describe_again(folder, graph, planned, settings, recorded, begun)
        spec = RunSpec(
            graph=graph,
            plan=planned,
            settings=settings,
            begun=begun,
            quiet=quiet,
            in_one_process=in_one_process,
            takeover=takeover,
            server=server,
            track=trackers,
        )
        terminal = os.dup(2) if standby else None
        if terminal is not None:
            spec = dataclasses.replace(spec, standby=partial(_stand_in, spec, terminal))
        try:
            outcome = execute(spec)
        except Replaced:
            raise
        except BaseException as error:
            if recorded is not None or has_begun(folder):
                error.add_note(go_on_with(folder, recorded.config.get(KEY) if recorded else launch))
            raise
        finally:
            if terminal is not None:
                os.close(terminal)
    verdict = _judged(folder, quiet)
    bound = bounded(
        outcome.seconds, outcome.busy_seconds, outcome.beside_seconds, plan_facts(graph, planned)
    )
    return Result(
        folder=folder.path,
        seconds=outcome.seconds,
        steps=outcome.steps,
        verdict=verdict,
        busy_seconds=outcome.busy_seconds,
        efficiency=bound.share if bound else 0.0,
    )


def check_start(
    graph: Graph,
    *,
    on: Inline | Launcher | None,
    steps: int | None,
    seed: int | None,
    keep_steps: int | None,
    resume: str | Path | None,
    track: Sequence[Wished] | None,
    listen: str,
    standby: bool,
) -> tuple[RunFolder | None, RecordedRun | None, tuple[ChosenTracker, ...]]:
    """Refuse what no plan tells of a run that could not start; `run`, and whoever explains one, ask
    for it.

    Gives the folder of the run that goes on, what it says of its run, and the trackers. Errors:
    GraphError, RunError.
    """
    if not (on is None or isinstance(on, Inline | Launcher)):
        raise GraphError(
            f"a run goes on inline() or on a launcher, but on is {on!r:.60}; leave it out for this"
            " machine"
        )
    if steps is not None and steps < 1:
        raise GraphError(
            f"a run makes at least 1 step, but steps is {steps}; give a number above 0 or leave"
            " it out"
        )
    if keep_steps is not None and keep_steps < 0:
        raise GraphError(
            f"a run keeps the last 0 steps or more, but keep_steps is {keep_steps}; leave it out to"
            " keep all"
        )
    before, recorded = None, None
    if resume is None:
        _check_files(graph)
    else:
        before = trusted(RunFolder.open(resume))
        recorded = RecordedRun.read(before)
        check_same(before, recorded, graph_facts(graph), seed)
        track = recorded.config.get(TRACK) if track is None else track
    if isinstance(on, Launcher):
        check_hosted(listen, standby=standby)
    return before, recorded, choose(track or ())


@contextlib.contextmanager
def _made(runs: str | Path, name: str) -> Iterator[RunFolder]:
    """A new run folder; it goes where the run is refused before it begins."""
    folder = RunFolder.create(runs, name)
    try:
        yield folder
    except GraphError:
        if not folder.ledger.exists():
            shutil.rmtree(folder.path, ignore_errors=True)
        raise


def _limits(limits: Limits, graph: Graph, planned: Plan) -> Limits:
    """Those of a run of this plan."""
    sizes = measure_models(graph)
    model_bytes = [
        sizes[operator.uses.source].parameters * bytes_of(operator.uses.dtype)
        for operator in graph.operators.values()
        if operator.uses is not None and operator.uses.source in sizes
    ]
    return limits.for_models(
        max(model_bytes, default=0),
        max((path.nbytes or 0 for path in planned.weight_paths), default=0),
        compiles=any(
            by_way(operator, planned.placements[name].chosen).traits.training.compiled
            for name, operator in graph.operators.items()
        ),
    )


def _held_over_hosts(
    folder: RunFolder, limits: Limits, tell: Callable[[str], object], open_: contextlib.ExitStack
) -> tuple[run_hold.RunHold, LedgerProcess]:
    """The run in the hands of this process until `open_` ends, and the process that keeps it there,
    which can serve the ledger to other hosts. Errors: as `run_hold.held`.
    """
    hold = open_.enter_context(
        run_hold.held(folder, still_s=max(limits.hang_s, run_hold.LEAST_STILL_S), tell=tell)
    )
    if folder.ledger.exists():
        Ledger.prove(folder.ledger)
    return hold, open_.enter_context(LedgerProcess(hold.check, folder.logs / "ledger.log"))


def _unheard(text: str) -> None:
    """What nobody wants to read."""


def _print(text: str) -> None:
    """On a terminal that perhaps nobody reads."""
    for_a_while(lambda: print(text, flush=True))


def _convert_models(graph: Graph, tell: Callable[[str], object]) -> None:
    """Make the folders of models in GGUF files that can be converted; what cannot is refused with
    the rest. Errors: GGUFError where the cache cannot be written.
    """
    models = [getattr(operator, "model", None) for operator in graph.operators.values()]
    for source in dict.fromkeys(
        model.source for model in models if isinstance(model, Model) and is_gguf(model.source)
    ):
        if file_fault(source) is None:
            converted(source, tell=tell)


def _check_files(graph: Graph) -> None:
    """Refuse a graph of which an operator lacks what it needs to start. GraphError."""
    missing = [
        fault
        for fault in (operator.missing() for operator in graph.operators.values())
        if fault is not None
    ]
    if missing:
        raise GraphError("\n".join(dict.fromkeys(missing)))


def _stand_in(spec: RunSpec, terminal: int) -> int:
    """In a process of its own: go on with a run whose scheduler has died. terminal: where the user
    may read of it.
    """
    folder = RunFolder.open(spec.settings.folder)
    log = folder.logs / "scheduler.log"
    name = folder.path.name
    notice = (
        f"process {os.getpid()} takes the place of the scheduler of {name}, see {log}\n".encode()
    )
    for_a_while(lambda: os.write(terminal, notice), 0.0)
    log_to(log)
    with held(folder, take=partial(take, folder), replaces=True) as takeover:
        if takeover is None:
            return 1
        execute(dataclasses.replace(spec, begun=takeover.begun, takeover=takeover))
    return _judged(folder, spec.quiet).exit_status


def _judged(folder: RunFolder, quiet: bool) -> Verdict:
    """What `verify` says of a run that has ended; shown with its summary; where it is to be quiet,
    only if it is not clean.
    """
    verdict = verify(folder.path)
    if not quiet:
        with make_view(sys.stdout) as view:
            view.summary(summarize(folder, verdict.line, verdict.clean))
    elif not verdict.clean:
        for_a_while(lambda: print(f"{folder.path}: {verdict.line}", file=sys.stderr, flush=True))
    return verdict


def _describe(
    folder: RunFolder, graph: Graph, planned: Plan, settings: Settings, more: Mapping[str, Any]
) -> None:
    """Put down what is run before it runs."""
    how = {
        "command": [sys.executable, *sys.argv],
        **more,
        "seed": settings.run.seed,
        "steps": settings.run.steps,
        KEEP: settings.run.keep_steps,
        COPIES: settings.copies or None,
        "begun": time.time(),
        ENVIRONMENT: environment(this_machine()),
    }
    with Ledger.create(folder.ledger, consumers(graph)) as ledger:
        describe(folder, ledger, graph_facts(graph), how | plan_facts(graph, planned))
    folder.extras.attempt(folder.graph_svg, lambda: graph.draw(folder.graph_svg, planned))


def _describe_again(
    folder: RunFolder,
    graph: Graph,
    planned: Plan,
    settings: Settings,
    recorded: RecordedRun,
    begun: Begun,
) -> None:
    """Put down how a run goes on, before it does."""
    facts = {ENVIRONMENT: environment(this_machine())}
    facts = {name: fact for name, fact in facts.items() if recorded.config.get(name) != fact}
    again = {"at": time.time(), "from": begun.steps, "steps": settings.run.steps, **facts}
    resumed = [*recorded.config.get("resumed", []), again]
    now = {
        "steps": settings.run.steps,
        KEEP: settings.run.keep_steps,
        COPIES: settings.copies or None,
        "resumed": resumed,
    }
    config = {**recorded.config, **now, **plan_facts(graph, planned)}
    with Ledger.open(folder.ledger) as ledger:
        describe(folder, ledger, recorded.graph, config)
    folder.extras.attempt(folder.graph_svg, lambda: graph.draw(folder.graph_svg, planned))
    Times(folder, begun).write("not finished")
    folder.make_latest()


# `collect(stream)`: run a graph up to a stream and return its rows, for notebooks and tests.


@checked
def collect(stream: Stream[Any], *, rows: int, seed: int = 0) -> pa.Table:
    """The first `rows` rows of a stream, in the order of their groups; fewer where the prompts end
    before.

    Runs the operators upstream inline, with the weights they start from; nothing is written to
    disk.

    >>> from dataflow import Graph, collect
    >>> from dataflow.testing import FakeGenerator, FakePrompts
    >>> rollouts = FakeGenerator(group_size=2)(Graph("tiny").source(FakePrompts()))
    >>> collect(rollouts, rows=3).column("completion").to_pylist()
    ['0', '0', '1']
    """
    if rows < 1:
        raise GraphError(f"collect needs at least 1 row, but rows is {rows}; give a number above 0")
    graph, sink = _upstream(stream)
    running = InlineRun(
        graph, make_plan(graph, one_process=True), Settings(folder="", run=RunSettings(seed=seed))
    )
    try:
        running.start()
        running.run(until=lambda: sink.count() >= rows)
    finally:
        running.close()
    table = pa.Table.from_batches(sink.batches, schema(stream.columns))
    keys = [(name, "ascending") for name in (GROUP_ID, POSITION) if name in stream.columns]
    return table.sort_by(keys).slice(0, rows)


@dataclass(frozen=True, eq=False)
class _Collect(Sink):
    """Keeps the rows that arrive."""

    light: ClassVar[bool] = True
    batches: list[pa.RecordBatch] = field(default_factory=list, repr=False)

    def count(self) -> int:
        """Rows of the first groups that are all there: later groups may have come before a slow
        one.
        """
        sizes = collections.Counter(
            itertools.chain.from_iterable(
                batch.column(GROUP_ID).to_pylist() for batch in self.batches
            )
        )
        return sum(
            sizes[group] for group in itertools.takewhile(sizes.__contains__, itertools.count())
        )

    def build(self, context: Context) -> Runtime:
        return _Keep(self.batches)


class _Keep(Runtime):
    """Takes rows without end; the run stops when there are enough."""

    def __init__(self, batches: list[pa.RecordBatch]) -> None:
        self._batches = batches

    def room(self) -> int:
        return 1 << 20

    def push(self, batch: Batch) -> None:
        self._batches.append(batch.records)
        batch.ack()


def _upstream(stream: Stream[Any]) -> tuple[Graph, _Collect]:
    """The graph upstream of a stream, with a sink at its end."""
    whole = stream.graph
    assert isinstance(whole, Graph)
    needed = {(stream.node, stream.source)}
    for call in reversed(whole.calls):
        if (call.output.node, call.output.source) in needed:
            needed |= {(s.node, s.source) for s in call.inputs}
    graph, sink = Graph(whole.name), _Collect(name="collect")
    streams: dict[tuple[str, str], Stream[Any]] = {}
    for call in whole.calls:
        key = (call.output.node, call.output.source)
        if key not in needed:
            continue
        inputs = tuple(streams[s.node, s.source] for s in call.inputs)
        if isinstance(call.operator, Source):
            streams[key] = graph.source(call.operator)
        elif isinstance(call.operator, Join):
            streams[key] = graph.merge(inputs)
        else:
            streams[key] = graph.apply(call.operator, inputs[0])
    sink(streams[stream.node, stream.source])
    return graph, sink
