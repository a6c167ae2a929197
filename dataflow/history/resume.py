"""Takes up a run in its own folder: whether it may go on, how far it had come, and what is put in
order before.
"""

import contextlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dataflow.errors import GraphError, RunError
from dataflow.folder.arrow_reading import read_arrow
from dataflow.folder.finished import number_finished
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.trace import merge
from dataflow.graph import Graph
from dataflow.history.describe import consumers, described, is_whole, model_of
from dataflow.records import GROUP_ID
from dataflow.structure import own_folder
from dataflow.system.files import Kind, RunFolderError, to_json
from dataflow.worker.kept_counts import EdgeSums, known_edges

TIMES: Mapping[str, Kind] = {
    "outcome": str,
    "seconds": (int, float),
    "busy_seconds": dict,
    "beside_seconds": dict,
    "edges": dict,
}
"""The content of times.json, once it is written."""
CUT_OFF = "round cut off"
"""Why groups of an evaluation are dropped that had not finished when their run ended."""


@dataclass(frozen=True, kw_only=True)
class Begun:
    """How far a run had come."""

    steps: Mapping[str, int] = field(default_factory=dict)
    """By trainer: its last step in the ledger."""
    rounds: Mapping[str, int] = field(default_factory=dict)
    """By evaluation: the step of the last round that is recorded."""
    seconds: float = 0.0
    """Seconds of training in the earlier parts of the run, as far as known."""
    busy_seconds: Mapping[str, float] = field(default_factory=dict)
    beside_seconds: Mapping[str, float] = field(default_factory=dict)
    edges: EdgeSums = field(default_factory=dict)
    """By data edge, what crossed it in those parts; as `kept_counts.total` has it."""


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """What a run folder says of its run."""

    graph: Mapping[str, Any]
    config: Mapping[str, Any]
    times: Mapping[str, Any]

    @classmethod
    def read(cls, folder: RunFolder) -> "RecordedRun":
        """Errors: RunFolderError when neither the ledger nor graph.json and config.json say what
        the run is.
        """
        graph, config = described(folder)
        if not is_whole(graph) or "seed" not in config:
            raise RunFolderError(
                f"nothing says what '{folder.path.name}' runs: it stands neither in ledger.db nor"
                " in graph.json and config.json; take these from a backup, or start a new run"
            )
        return cls(graph=graph, config=config, times=folder.read_json("times.json", TIMES))

    @property
    def steps(self) -> int | None:
        """Steps that the run was to make."""
        steps = self.config.get("steps")
        return None if steps is None else int(steps)

    @property
    def seed(self) -> int:
        """Its seed."""
        return int(self.config["seed"])

    def has(self, facts: Mapping[str, Any]) -> bool:
        """Whether its configuration contains all of this."""
        return all(
            self.config.get(name) == value for name, value in json.loads(to_json(facts)).items()
        )

    @property
    def chosen(self) -> dict[str, Mapping[str, Any]]:
        """By node, the knobs that its plan chose."""
        return {
            node: place["chosen"]
            for node, place in self.config.get("placed", {}).items()
            if "chosen" in place
        }

    @property
    def part(self) -> int:
        """How often the run was taken up, this time included."""
        return 1 + len(self.config.get("resumed", []))

    @property
    def is_finished(self) -> bool:
        """Whether it came to its end."""
        return self.times.get("outcome") == "finished"


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences of two graph.json, as text; none where a run of the one may go on with the
    other.
    """
    changes = []
    if before["name"] != now["name"]:
        changes.append(f"the graph was called '{before['name']}' and is called '{now['name']}'")
    old, new = ({node["name"]: node for node in graph["nodes"]} for graph in (before, now))
    changes += [f"'{name}' is missing" for name in old if name not in new]
    changes += [f"'{name}' is new" for name in new if name not in old]
    both = [name for name in old if name in new]
    for name in both:
        was, is_now = old[name], new[name]
        if was["operator"] != is_now["operator"]:
            changes.append(f"'{name}' was a {was['operator']} and is a {is_now['operator']}")
        changes += [
            f"{knob} of '{name}' {change}"
            for knob, change in _changes(was["knobs"], is_now["knobs"])
        ]
        files = [{"file": str(model_of(node).get("files"))} for node in (was, is_now)]
        changes += [
            f"{fact} of the model of '{name}' {change}" for fact, change in _changes(*files)
        ]
    old, new = ({_ends(edge): edge for edge in graph["edges"]} for graph in (before, now))
    for ends in dict.fromkeys([*old, *new]):
        if ends[0] in both and ends[1] in both:
            changes += _edge_changes(ends, old.get(ends), new.get(ends))
    return changes


def check_same(
    folder: RunFolder, recorded: RecordedRun, now: Mapping[str, Any], seed: int | None
) -> None:
    """Refuse a graph or a seed that is not the run's. Errors: GraphError, which names what
    differs.
    """
    changes = differences(recorded.graph, now)
    if seed is not None and seed != recorded.seed:
        changes.append(f"the seed was {recorded.seed} and is {seed}")
    if changes:
        raise GraphError(
            f"'{folder.path.name}' cannot go on with this graph, as it is not the one that it began"
            f" with: {'; '.join(changes)}; make it the same again, or start a new run"
        )


def check_end(
    name: str, recorded: RecordedRun, steps: int | None, steps_made: Mapping[str, int]
) -> None:
    """Refuse a run that has nothing left to do. Errors: RunError.

    name: of the run. steps: that it is to make in all. steps_made: by trainer, from the ledger.
    """
    least = min(steps_made.values(), default=0)
    most = max(steps_made.values(), default=0)
    if steps is not None and steps < most:
        raise RunError(
            f"'{name}' has made {most} steps, more than the {steps} asked for; ask for more, or for"
            " none"
        )
    if not recorded.is_finished:
        return
    if recorded.steps is None or least < recorded.steps:
        raise RunError(
            f"'{name}' is finished: its prompts"
            f" ended{f' after step {least}' if steps_made else ''};"
            " start a new run, from its last checkpoint if you like"
        )
    if steps is not None and steps <= least:
        raise RunError(
            f"'{name}' is finished: it has made its {least} steps; give it more, as in --steps"
            f" {2 * least}"
        )


def take_up(folder: RunFolder, graph: Graph, recorded: RecordedRun, steps: int | None) -> Begun:
    """Put a run in order that is to go on, once nobody else has a hand in it; how far it had come.

    Rounds of evaluations that were under way are given up, as they are asked for again; what
    processes of the same names would overwrite gets another name.
    Errors: RunError when it is finished; LedgerError when its ledger is damaged or missing.
    """
    consumed = consumers(graph)
    ledger = _ledger(folder, consumed)
    with ledger:
        steps_made = {
            name: ledger.last_step(name) for name, op in graph.operators.items() if op.trains
        }
        for name in steps_made:
            if lost := forgotten(folder, ledger, name, own_folder(graph, name)):
                raise RunError(lost)
        check_end(folder.path.name, recorded, steps, steps_made)
        rounds = {}
        for name in consumed:
            if graph.operators[name].trains:
                continue
            _cut_off(ledger, name)
            if (last := ledger.last_round(name)) is not None:
                rounds[name] = last
    _number_trace(folder)
    number_finished(folder.path, recorded.part)
    times = recorded.times
    return Begun(
        steps=steps_made,
        rounds=rounds,
        seconds=float(times.get("seconds", 0.0)),
        busy_seconds=times.get("busy_seconds", {}),
        beside_seconds=times.get("beside_seconds", {}),
        edges=known_edges(times.get("edges")),
    )


def forgotten(folder: RunFolder, ledger: Ledger, node: str, own: str | None) -> str:
    """What a run's files show that its ledger has committed and does not know; empty: nothing.
    node: a trainer. own: its folder, where it has one.

    The file of a step is written once the step before it is committed, and the groups in it were
    issued; a checkpoint is marked once its step is, on the disk itself.
    """
    files, marked = folder.rollouts_of(own).files("step"), folder.checkpoints_of(own).steps()
    last_known = ledger.furthest_step(node)
    shown = max([*(step - 1 for step, _ in files), *marked], default=0)
    begun = shown <= last_known and files and files[-1][0] > last_known
    if shown <= last_known and not (begun and _are_unknown(folder, ledger, node, files[-1][1])):
        return ""
    last = (
        f"checkpoints/step-{shown:06d}"
        if shown in marked
        else files[-1][1].relative_to(folder.path)
    )
    return (
        f"ledger.db knows '{node}' up to step {last_known}, but {last} is there: what was"
        " committed last"
        " is lost, with ledger.db-wal or by a power cut; put both files back as they were, or move"
        f" what is of steps after {last_known} away from rollouts/ and checkpoints/ to have them"
        " made"
        " anew"
    )


def _are_unknown(folder: RunFolder, ledger: Ledger, node: str, path: Path) -> bool:
    """Whether the groups in a file were never issued by the one source of a trainer."""
    sources = ledger.sources(node)
    if len(sources) != 1:
        return False
    with contextlib.suppress(RunFolderError, pa.ArrowException, KeyError):
        newest = pc.max(read_arrow(path).column(GROUP_ID)).as_py()
        return newest is not None and int(newest) >= ledger.next_group_id(sources[0])
    return False


def has_begun(folder: RunFolder) -> bool:
    """Whether a run has issued anything, so that there is something to go on with."""
    try:
        with Ledger.open(folder.ledger, readonly=True) as ledger:
            return any(ledger.next_group_id(source) for source in ledger.sources())
    except RunError:
        return True


def go_on_with(folder: RunFolder, launch: object) -> str:
    """What a user does to take a run up again that has failed. launch: how it was started; None: by
    a call of run.
    """
    path = folder.path
    short = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    if launch is None:
        return f"go on with: run(graph, resume={str(short)!r})"
    return f"go on with: dataflow resume {shlex.quote(str(short))}"


def _ledger(folder: RunFolder, consumed: Mapping[str, list[str]]) -> Ledger:
    """The run's; a new one where the run ended before it had done anything."""
    if folder.ledger.exists():
        Ledger.prove(folder.ledger)
        return Ledger.open(folder.ledger)
    files = [
        path for path in (folder.rollouts, folder.path / "checkpoints") if any(path.rglob("*.*"))
    ]
    if files or folder.metrics.exists():
        name = files[0].name if files else folder.metrics.name
        raise RunError(
            f"'{folder.path.name}' has no ledger.db, but {name}: it was lost; take it from a"
            " backup, or start a new run"
        )
    return Ledger.create(folder.ledger, consumed)


def _cut_off(ledger: Ledger, evaluation: str) -> None:
    for source in ledger.sources(evaluation):
        waiting = [group.group_id for group in ledger.in_flight(source, evaluation)]
        ledger.drop(evaluation, source, dict.fromkeys(waiting, CUT_OFF))


def _number_trace(folder: RunFolder) -> None:
    """Keep the trace of the part before as trace-1.json, trace-2.json, ..."""
    if any(folder.logs.glob("*.trace")):
        merge(folder)
    if folder.trace.exists():
        number = 1 + len(list(folder.path.glob("trace-*.json")))
        folder.extras.rename(folder.trace, folder.path / f"trace-{number}.json")


def _ends(edge: Mapping[str, Any]) -> tuple[str, str, str, str]:
    # "lane" in folders made before the word was dropped
    source = edge.get("source") or edge.get("lane")
    return edge["from"], edge["to"], edge["plane"], source or ""


def _edge_changes(
    ends: tuple[str, str, str, str], was: Mapping[str, Any] | None, is_now: Mapping[str, Any] | None
) -> list[str]:
    origin, end, plane, source = ends
    name = f"{origin} -> {end} ({plane}{f', {source}' if source else ''})"
    if was is None or is_now is None:
        return [f"{name} is {'new' if was is None else 'missing'}"]
    changes = [
        f"column '{column}' of {name} {change}"
        for column, change in _changes(was["columns"], is_now["columns"])
    ]
    for fact in ("max_staleness", "refresh"):
        if was.get(fact) != is_now.get(fact):
            changes.append(f"{fact} of {name} was {was.get(fact)} and is {is_now.get(fact)}")
    return changes


def _changes(was: Mapping[str, str], is_now: Mapping[str, str]) -> list[tuple[str, str]]:
    """Differences of two mappings, as text."""
    return [
        (name, f"was {_short(was.get(name))} and is {_short(is_now.get(name))}")
        for name in dict.fromkeys([*was, *is_now])
        if was.get(name) != is_now.get(name)
    ]


def _short(value: str | None) -> str:
    text = "not given" if value is None else value
    return text if len(text) <= 80 else f"{text[:77]}..."
