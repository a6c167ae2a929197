"""The doctor's report on a run under way, as text."""

import contextlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow.doctor.facts import Facts, Node, WorkerFacts, describe_process, gather
from dataflow.doctor.verdict import MOVES_S, seconds, trouble, verdict, waits
from dataflow.errors import DeadlineError, RunError
from dataflow.folder.faults import FILE
from dataflow.folder.ledger import Ledger, LedgerError
from dataflow.folder.live_changes import read_live_changes
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.socket_folder import CONTROL
from dataflow.history.describe import described
from dataflow.history.resume import TIMES
from dataflow.planning.placement import table
from dataflow.system import processes, stacks
from dataflow.system.files import read_text, tail, to_json
from dataflow.system.processes import Process
from dataflow.system.stacks import Thread
from dataflow.worker.state_clock import STATES

# The last error of each log of a run.

_BEGIN = "Traceback (most recent call last):"
_FILE = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+)')
_SIGNS = re.compile(
    r"level='(error|critical|warning)'|^(ERROR|CRITICAL|WARNING)\b|^Fatal Python error|\bKilled\b"
)


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """The last problem in a log."""

    log: str
    text: str
    """One line."""
    where: str = ""
    """File and line, where there was a traceback."""
    lines_ago: int = 0
    """Lines after it."""


def last_errors(folder: Path) -> list[Trouble]:
    """For each log that has one, its last error, by name of the log."""
    errors = [last_error(path.name, tail(path)) for path in sorted(folder.glob("*.log"))]
    return [trouble for trouble in errors if trouble is not None]


def last_error(name: str, text: str) -> Trouble | None:
    """The last traceback, or the last line that is an error or a warning, whichever comes later."""
    lines = text.splitlines()
    begins = [at for at, line in enumerate(lines) if line.strip() == _BEGIN]
    signs = [at for at, line in enumerate(lines) if _SIGNS.search(line)]
    if begins and (not signs or begins[-1] >= signs[-1]):
        return _traceback(name, lines, begins[-1])
    if signs:
        return Trouble(
            log=name, text=lines[signs[-1]].strip(), lines_ago=len(lines) - 1 - signs[-1]
        )
    return None


def _traceback(name: str, lines: list[str], begin: int) -> Trouble:
    """Its last line that is not indented, and the innermost file outside installed packages."""
    places = []
    end = begin
    for at in range(begin + 1, len(lines)):
        if match := _FILE.match(lines[at]):
            places.append(f"{match['file']}:{match['line']}")
        elif lines[at] and not lines[at][0].isspace():
            end = at
            break
    own = [place for place in places if "site-packages" not in place] or places
    text = lines[end].strip() if end > begin else "a traceback without an end"
    return Trouble(
        log=name, text=text, where=own[-1] if own else "", lines_ago=len(lines) - 1 - end
    )


_FAULTS = 5
_MOST_TEXT = 160
_NOW_AND_THEN_S = 2.0


def report(
    folder: RunFolder, facts: Facts, *, all_stacks: bool = False, moves_s: float = MOVES_S
) -> str:
    """All that is known: the root first, as `verdict` has it, then waits, nodes, edges, workers,
    stacks, errors.
    """
    of = f" of {facts.steps}" if facts.steps else ""
    phase = facts.phase.replace("_", " ") + (", draining" if facts.draining else "")
    head = (
        f"{folder.path.name}: {phase}, step {facts.step}{of}; last movement"
        f" {seconds(facts.still_s)} ago"
    )
    parts = [
        [head, "", verdict(facts, moves_s=moves_s)],
        _section("who waits for whom", _waits(facts)),
        _section("nodes", _nodes(facts)),
        _section(
            "edges (rows that are not acknowledged yet, of the most there may be)", _edges(facts)
        ),
        _section("workers", _workers(facts)),
        _section(
            "stacks" + ("" if all_stacks else " (innermost own frames; all of them: --stacks)"),
            [line for worker in facts.workers.values() for line in _stacks(worker, all_stacks)],
        ),
        *ailments(folder),
    ]
    return "\n".join(line for part in parts for line in part) + "\n"


def ailments(folder: RunFolder) -> list[list[str]]:
    """The last errors of the logs, the last faults on record, and what was changed on the way."""
    errors = [line for error in last_errors(folder.logs) for line in _error(error)]
    path = folder.path / FILE
    faults = read_text(path).splitlines()
    shown = [f"  {_fault(line)}" for line in faults[-_FAULTS:]]
    changes = [f"  {change.verb} {change}" for change in read_live_changes(folder)[-_FAULTS:]]
    if len(faults) > _FAULTS:
        shown.insert(0, f"  {len(faults) - _FAULTS} before these, in {path.name}")
    return [
        _section("last errors of the logs", errors or ["  none"]),
        _section("workers that ended and were started again", shown),
        _section("what was changed while it went on", changes),
    ]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"  {line}" for line in table(rows)]


def _section(title: str, lines: list[str]) -> list[str]:
    return ["", title, *lines] if lines else []


def _waits(facts: Facts) -> list[str]:
    lines = []
    for wait in waits(facts):
        node = facts.nodes[wait.node]
        lines.append([wait.node, f"waits for {wait.on},", f"{_how_long(node)}:", wait.why])
    return _table(lines) if lines else ["  nobody waits"]


def _how_long(node: Node) -> str:
    """For a node that works now and then, the share of its time that it waits."""
    share = {"blocked": node.blocked, "starved": node.starved}.get(node.state, node.waiting)
    if node.for_s < _NOW_AND_THEN_S and share is not None:
        return f"{share:.0%} of the time"
    return f"{seconds(node.for_s)} now"


def _nodes(facts: Facts) -> list[str]:
    rows = [["node", "state", "since", *STATES, "holds", "step", "version", "rows in", "out"]]
    for node in facts.nodes.values():
        rows.append(
            [
                node.name,
                _state(node),
                seconds(node.for_s),
                *(_share(getattr(node, state)) for state in STATES),
                str(node.pending),
                _number(node.step),
                _number(node.version),
                f"{node.rows_in:,}",
                f"{node.rows_out:,}",
            ]
        )
    return _table(rows)


def _state(node: Node) -> str:
    ill = [worker for worker in node.workers if trouble(worker)]
    if not ill:
        return node.state
    word = ill[0].state if ill[0].state != "ready" else "stuck"
    return word if len(ill) == len(node.workers) else f"{node.state}, {len(ill)} {word}"


def _edges(facts: Facts) -> list[str]:
    measured = [edge for edge in facts.edges if edge.depth is not None]
    rows = [
        [
            f"{e.producer} > {e.consumer}",
            e.source,
            _number(e.depth),
            "of",
            _number(e.capacity),
            "full" * e.is_full,
        ]
        for e in measured
    ]
    return _table(rows)


def _workers(facts: Facts) -> list[str]:
    has_hosts = any(worker.host for worker in facts.workers.values())
    rows = [
        [
            "worker",
            *["host"] * has_hosts,
            "state",
            "pid",
            "/proc",
            "memory",
            "cores",
            "restarts",
            "last word",
            "at",
            "nodes",
        ]
    ]
    for worker in facts.workers.values():
        at = f"{worker.at} for {seconds(worker.at_s)}" if worker.at else "rest"
        last_heard = f"{seconds(worker.silent_s)} ago"
        rows.append(
            [
                worker.name,
                *[worker.host] * has_hosts,
                worker.state,
                *_process(worker.process),
                str(worker.restarts),
                last_heard,
                at,
                ", ".join(worker.nodes),
            ]
        )
        rows += [
            ["", *[""] * has_hosts, "below it", *_process(rank), "", "", "", ""]
            for rank in worker.ranks
        ]
    return _table(rows)


def _process(process: Process | None) -> list[str]:
    if process is None:
        return ["-"] * 4
    cpu = "-" if process.cpu is None else f"{process.cpu:.2f}"
    return [str(process.pid), process.state or "none", f"{process.rss_bytes / 2**20:,.0f} MiB", cpu]


def _stacks(worker: WorkerFacts, whole: bool) -> list[str]:
    if worker.state in ("left", "gone", "down"):
        return []
    if not worker.threads:
        state = trouble(worker) or "has not told its stacks in time"
        lines = worker.dump.splitlines()
        shown = lines if whole else _main_thread(lines)
        return [
            f"  {worker.name} {state}" + ("; its log now has" if shown else ""),
            *(f"    {line}" for line in shown),
        ]
    lines = []
    for thread in worker.threads:
        if whole:
            lines.append(f"  {worker.name} {thread.name}")
            lines += [f"    {_place(f.file)}:{f.line} {f.function}" for f in thread.frames]
        else:
            lines.append(f"  {worker.name} {thread.name}: {_short(thread)}")
    return lines


def _short(thread: Thread) -> str:
    return " > ".join(f"{f.function} ({_place(f.file)}:{f.line})" for f in stacks.own(thread))


def _main_thread(lines: list[str]) -> list[str]:
    """Of a dump by signal the thread that ran when it came, innermost frames first."""
    begins = [at for at, line in enumerate(lines) if line.startswith("Current thread")]
    if not begins:
        return lines[:6]
    return lines[begins[-1] : begins[-1] + 5]


def _place(file: str) -> str:
    """The end of a path: the folder and the file."""
    return "/".join(Path(file).parts[-2:])


def _error(trouble: Trouble) -> list[str]:
    after = f", {trouble.lines_ago} lines ago" if trouble.lines_ago else ""
    at = f" ({trouble.where})" if trouble.where else ""
    text = trouble.text if len(trouble.text) <= _MOST_TEXT else f"{trouble.text[:_MOST_TEXT]} ..."
    return [f"  {trouble.log}{after}: {text}{at}"]


def _fault(line: str) -> str:
    """A line of faults.jsonl as text; a torn one unchanged."""
    try:
        fault = json.loads(line)
        back = fault["recovered_s"]
        again = "not back" if back is None else f"back after {seconds(back)}"
        at = time.strftime("%H:%M:%S", time.localtime(fault["at"]))
        incident = f"{at} {fault['worker']} (attempt {fault['attempt']}) {fault['cause']}"
        return f"{incident}; noticed after {seconds(fault['noticed_s'])}, {again}"
    except (ValueError, KeyError, TypeError):
        return line


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


# The doctor's report on a run that is over, or whose scheduler is dead: what its folder holds.

_MOST_COMMAND = 100
_TOLD_OF_STEPS = (
    "step",
    "node",
    "version",
    "loss",
    "reward_mean",
    "staleness_max",
    "rollouts",
    "dropped",
)


def report_of_ended(folder: RunFolder, why: str) -> str:
    """What is left of a run. why: what is known of its scheduler."""
    using = processes.using(folder.path)
    lines = [
        f"{folder.path.name}: {_outcome(folder, bool(using))}",
        *([f"  {why}"] if why else []),
        "",
        "processes",
    ]
    looks = processes.look([pid for pid, _ in using], 0.2)
    for pid, command in using:
        lines.append(f"  {describe_process(looks[pid])}: {command[:_MOST_COMMAND]}")
    if not using:
        lines.append("  none has a file of this run open")
    lines += ["", "ledger", *_ledger_lines(folder), "", "last step", f"  {_last_step(folder)}"]
    return "\n".join([*lines, *(line for part in ailments(folder) for line in part)]) + "\n"


def _outcome(folder: RunFolder, alive: bool) -> str:
    times = folder.read_json("times.json", TIMES)
    if times:
        return (
            f"over: {times.get('outcome', 'ended')}, {seconds(float(times.get('seconds') or 0.0))}"
            " of training"
        )
    return (
        "no scheduler answers, but processes of it are alive"
        if alive
        else "it did not come to its end"
    )


def _ledger_lines(folder: RunFolder) -> list[str]:
    sinks = [
        node["name"] for node in described(folder)[0].get("nodes", []) if node.get("kind") == "sink"
    ]
    try:
        with Ledger.open(folder.ledger, readonly=True) as ledger:
            return [f"  {name}: {ledger.verdict(name)}" for name in sinks]
    except LedgerError as error:
        return [f"  {error}"]


def _last_step(folder: RunFolder) -> str:
    lines: list[dict[str, Any]] = folder.read_metrics()
    steps = [line for line in lines if "eval_accuracy" not in line]
    if not steps:
        return "none was made"
    ago = seconds(max(0.0, time.time() - folder.metrics.stat().st_mtime))
    figures = {key: steps[-1][key] for key in _TOLD_OF_STEPS if key in steps[-1]}
    return f"{to_json(figures)}, written {ago} ago; all of it in {folder.metrics.name}"


# `dataflow doctor RUN`: asks the run, or reads what it left.

ANSWER_S = 3.0
"""Seconds for a scheduler to answer."""
_STACKS_S = 1.5

Said = Mapping[str, Any]
"""What a scheduler knows of its run, in plain values."""
Ask = Callable[[RunFolder, float], Said]
"""Asks the scheduler of a run, for so many seconds: RunError when the run is over, DeadlineError
without an answer."""


def examine(run: str | Path, ask: Ask, *, all_stacks: bool = False) -> str:
    """The report on a run, whatever state it is in. Errors: RunFolderError when there is no such
    folder.
    """
    folder = RunFolder.open(run)
    try:
        answer = told(folder, ask)
    except RunError as error:
        return report_of_ended(folder, _scheduler(folder, error))
    return report(folder, gather(folder, answer), all_stacks=all_stacks)


def told(folder: RunFolder, ask: Ask, patience_s: float = _STACKS_S) -> Said:
    """What the scheduler says, asked until every worker that answers has told its stacks, or the
    time is up.

    Errors: RunError when the run is over, DeadlineError when the scheduler does not answer.
    """
    began = time.monotonic()
    answer = ask(folder, ANSWER_S)
    while time.monotonic() - began < patience_s and not _all_told(answer, time.monotonic() - began):
        time.sleep(0.1)
        with contextlib.suppress(DeadlineError):
            answer = ask(folder, ANSWER_S)
    return answer


def _all_told(answer: Said, since_s: float) -> bool:
    """Whether every worker with a heartbeat has sent its stacks within so many seconds."""
    live = [
        w
        for w in answer["workers"].values()
        if w["state"] in ("starting", "ready") and w["silent_s"] < 1.0
    ]
    return all(worker["threads"] and worker["threads_s"] <= since_s for worker in live)


def _scheduler(folder: RunFolder, error: RunError) -> str:
    """What is known of a scheduler that does not answer."""
    control = folder.read_json(CONTROL, {"pid": int, "machine": str})
    pid, machine = control.get("pid"), processes.machine()
    if pid is None or control.get("machine", machine) != machine:
        return "" if not isinstance(error, DeadlineError) else str(error)
    process = processes.look([int(pid)], 0.0)[int(pid)]
    if not process.state:
        return f"its scheduler (pid {pid}) has ended without an end of the run: it was killed"
    return f"its scheduler does not answer: {describe_process(process)}"
