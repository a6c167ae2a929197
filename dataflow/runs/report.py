"""`dataflow report`: a run as one HTML file to send, with nothing that it would load from
anywhere.
"""

import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from dataflow.errors import RunError
from dataflow.folder.faults import describe_faults
from dataflow.folder.ledger import Ledger, LedgerError
from dataflow.folder.live_changes import LiveChange, read_live_changes
from dataflow.folder.run_folder import RunFolder
from dataflow.history.describe import described
from dataflow.history.environment import KEY as ENVIRONMENT
from dataflow.history.launch import KEY as LAUNCH
from dataflow.runs import parts
from dataflow.runs.drawing import read_picture
from dataflow.runs.examples import examples_of
from dataflow.runs.pictures import charts_of
from dataflow.runs.state import begun_at, state_of
from dataflow.runs.tables import fault_lines, figures_of, read_lines
from dataflow.runs.texts import escaped
from dataflow.runs.which import parts_of
from dataflow.system.files import to_json, write_atomically

MARK = b"<!-- dataflow report -->"
MOST_FAULTS = 200


def write_report(folder: RunFolder, out: Path, *, by: str = "reward") -> None:
    """Put the report of a run at `out`, whole or not at all. by: the figure that tells the best
    rollout.

    Errors: RunError where something else than a report stands there; RunFolderError.
    """
    if out.exists() and MARK not in _head(out):
        raise RunError(f"'{out}' is there already and is no report; name another file with --out")
    text = report(folder, by=by).encode("utf-8", "replace")
    write_atomically(out, lambda file: file.write(text), flush=False)


def report(folder: RunFolder, *, by: str = "reward") -> str:
    """The whole page."""
    graph, config = described(folder)
    state, changes = state_of(folder), read_live_changes(folder)
    lines = read_lines(folder)
    drawn = charts_of({"": [*lines.steps, *lines.evaluations]}, _marks(changes))
    begun = begun_at(folder, config)
    when = (
        time.strftime("%Y-%m-%d %H:%M", time.localtime(begun))
        if begun is not None
        else "at an unknown time"
    )
    files, notes = parts_of(folder)
    sections = [
        ("curves", "Curves", parts.charts(drawn)),
        ("graph", "Graph", parts.graph(read_picture(folder))),
        ("rollouts", "Rollouts", parts.rollouts(examples_of(files, by))),
        ("faults", "Faults and changes", _faults(folder, changes)),
        ("ledger", "Ledger", _ledger(folder, notes)),
        ("environment", "Environment", _environment(config)),
    ]
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in sections)
    note = f'<p class="muted">{escaped(state.note)}</p>' if state.note else ""
    head = (
        f"<h1>{escaped(folder.path.name)}</h1>"
        f'<p class="muted">graph <code>{escaped(graph.get("name", "?"), 200)}</code>, begun'
        f" {when}</p>{note}"
        f"{parts.tiles(figures_of(folder, lines), state.word)}<nav>{links}</nav>"
    )
    body = head + "".join(
        f'<section id="{name}"><h2>{title}</h2>{text}</section>' for name, title, text in sections
    )
    return Template(_file("report.html")).substitute(
        title=escaped(folder.path.name, 200),
        style=_file("report.css"),
        body=body,
        footer=(
            f"Written {time.strftime('%Y-%m-%d %H:%M')} by dataflow report; this file loads nothing"
            " and runs nothing. Signs that act, as control characters and marks of direction, are"
            " shown as what they are."
        ),
    )


def _faults(folder: RunFolder, changes: tuple[LiveChange, ...]) -> str:
    lines = fault_lines(folder)
    body = []
    if lines:
        newest = describe_faults(lines)[-MOST_FAULTS:]
        body.append(_list(escaped(fault, 500) for fault in newest))
    else:
        body.append("<p>No worker ended that was not to.</p>")
    if len(lines) > MOST_FAULTS:
        body.append(f'<p class="muted">The last {MOST_FAULTS} of {len(lines):,}.</p>')
    if changes:
        body += [
            "<h3>What was changed while it went on</h3>",
            _list(f"{change.verb} {escaped(change, 500)}" for change in changes),
        ]
    return "".join(body)


def _list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"


def _ledger(folder: RunFolder, notes: Sequence[str]) -> str:
    sinks = [
        str(node["name"])
        for node in described(folder)[0].get("nodes", ())
        if node.get("kind") == "sink"
    ]
    try:
        with Ledger.open(folder.ledger, readonly=True) as ledger:
            rows = [(name, ledger.verdict(name)) for name in sinks]
    except LedgerError as error:
        return f'<p class="bad">{escaped(error, 1000)}</p>'
    remarks = "".join(f'<p class="muted">{escaped(note, 1000)}</p>' for note in notes)
    return (
        f"{parts.table(('sink', 'groups'), rows)}{remarks}"
        f'<p class="muted">Counted from the ledger alone; <code>dataflow verify</code> compares it'
        f" with the files.</p>"
    )


def _environment(config: Mapping[str, Any]) -> str:
    rows = list(environment_rows(config))
    plan = "\n".join(map(str, config.get("plan") or ()))
    more = (
        f"<details><summary>the plan</summary><pre>{escaped(plan, 20_000)}</pre></details>"
        if plan
        else ""
    )
    return f"{parts.pairs(rows)}{more}"


def environment_rows(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a run was started with, and on: a name and a text each."""
    if command := command_of(config):
        yield "command", command
    for name in ("seed", "steps", "keep_steps", "checkpoint_to"):
        if config.get(name) is not None:
            yield name, str(config[name])
    yield (
        "max_staleness",
        to_json(config.get("max_staleness")) if config.get("max_staleness") else "",
    )
    yield "hosts", to_json(config["hosts"]) if config.get("hosts") else ""
    environment = config.get(ENVIRONMENT)
    if not isinstance(environment, dict):
        yield "versions", "not recorded: an earlier version of dataflow made this run"
        return
    for name, value in environment.items():
        if name == "packages" and isinstance(value, dict):
            yield from ((str(package), str(version)) for package, version in value.items())
        elif name == "memory_bytes" and isinstance(value, int | float):
            yield "memory", f"{value / 2**30:.1f} GiB"
        else:
            yield name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def command_of(config: Mapping[str, Any]) -> str:
    """The command line, without the paths of this machine where the program has a name; empty: not
    known.
    """
    launch = config.get(LAUNCH) or {}
    if module := launch.get("module"):
        return f"python -m {module} {shlex.join(map(str, launch.get('arguments', ())))}".strip()
    command = config.get("command")
    return shlex.join(map(str, command)) if isinstance(command, list) else ""


def _marks(changes: tuple[LiveChange, ...]) -> list[tuple[float, str]]:
    return [(float(change.step), change.mark) for change in changes]


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(4096)
    except OSError:
        return b""


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
