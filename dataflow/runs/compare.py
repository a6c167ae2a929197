"""`dataflow compare`: what differs between two runs, and their figures beside each other."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dataflow.display.formatting import clean, sparkline
from dataflow.draw.charts import charts_svg
from dataflow.folder.live_changes import read_live_changes
from dataflow.folder.run_folder import RunFolder
from dataflow.history.describe import described
from dataflow.history.environment import KEY as ENVIRONMENT
from dataflow.history.launch import KEY as LAUNCH
from dataflow.history.resume import differences
from dataflow.history.summary import window_of
from dataflow.runs.listing import in_columns
from dataflow.runs.pictures import FIGURES, charts_of
from dataflow.runs.report import command_of
from dataflow.runs.tables import Course, Figures, Lines, figures_of, read_lines, series
from dataflow.system.files import write_atomically

SHORT, LONGEST = 44, 600
"""Characters of a setting that stands beside the other; of one that stands below it."""
RECORDED, NOT_RECORDED = "recorded", "not recorded"
"""What a folder says of versions and machine: one of an earlier version says nothing."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two."""

    name: str
    graph: Mapping[str, Any]
    config: Mapping[str, Any]
    changes: Sequence[str]
    figures: Figures
    lines: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    """Of metrics.jsonl: steps of its trainer, evaluations."""


@dataclass(frozen=True)
class Differs:
    """A setting that is not the same; None: it is not there."""

    name: str
    first: str | None
    second: str | None


def sides_of(first: RunFolder, second: RunFolder) -> tuple[Side, Side]:
    """What is compared of two runs; means are over as many steps of the one as of the other."""
    lines = read_lines(first), read_lines(second)
    window = window_of(min(len(run_lines.steps) for run_lines in lines))
    a, b = names_of(first, second)
    return _side(first, a, lines[0], window), _side(second, b, lines[1], window)


def _side(folder: RunFolder, name: str, lines: Lines, window: int) -> Side:
    graph, config = described(folder)
    changes = [f"{change.verb} {change}" for change in read_live_changes(folder)]
    return Side(
        name=name,
        graph=graph,
        config=config,
        changes=changes,
        figures=figures_of(folder, lines, window),
        lines=[*lines.steps, *lines.evaluations],
    )


def names_of(first: RunFolder, second: RunFolder) -> tuple[str, str]:
    """What the two are called: two names."""
    a, b = first.path.name, second.path.name
    return (a, b) if a != b else (f"{first.path.parent.name}/{a}", f"{second.path.parent.name}/{b}")


def graph_differences(first: Side, second: Side) -> list[str]:
    """What is not the same in the graphs and in the knobs of their operators: the first was, the
    second is.
    """
    if not {"name", "nodes", "edges"} <= first.graph.keys() & second.graph.keys():
        lacks = first.name if "nodes" not in first.graph else second.name
        return [f"the graph of {lacks} is not known: its folder has none"]
    return differences(first.graph, second.graph)


def setting_differences(first: Side, second: Side) -> list[Differs]:
    """What is not the same in program, flags and environment."""
    both = {str(node.get("name")) for node in first.graph.get("nodes", ())}
    both &= {str(node.get("name")) for node in second.graph.get("nodes", ())}
    have_environment = all(
        isinstance(side.config.get(ENVIRONMENT), dict) for side in (first, second)
    )
    a, b = _settings(first, both, have_environment), _settings(second, both, have_environment)
    return [
        Differs(name, a.get(name), b.get(name))
        for name in dict.fromkeys([*a, *b])
        if a.get(name) != b.get(name)
    ]


def _settings(side: Side, nodes: Collection[str], have_environment: bool) -> dict[str, str]:
    """By name. nodes: that both have: of others the graphs tell. known: whether both say what they
    ran on.
    """
    config = side.config
    launch = config.get(LAUNCH) or {}
    settings = {"command": command_of(config)}
    settings |= {f"flag {name}": str(value) for name, value in (launch.get("flags") or {}).items()}
    for name in ("seed", "steps", "keep_steps", "max_staleness"):
        if config.get(name) is not None:
            settings[name] = str(config[name])
    settings |= {f"changed, {number}": change for number, change in enumerate(side.changes, 1)}
    for node in sorted(nodes):
        placed, hosts = ((config.get(name) or {}).get(node) for name in ("placed", "hosts"))
        settings |= {
            f"{quantity} of {node}": str(value) for quantity, value in (placed or {}).items()
        }
        settings |= {f"hosts of {node}": ", ".join(hosts)} if hosts else {}
    environment = config.get(ENVIRONMENT)
    if not have_environment or not isinstance(environment, dict):
        return settings | {
            "environment": RECORDED if isinstance(environment, dict) else NOT_RECORDED
        }
    packages = environment.get("packages") or {}
    settings |= {f"version of {name}": str(version) for name, version in packages.items()}
    return settings | {
        name: str(value) for name, value in environment.items() if name != "packages"
    }


_ROWS: Sequence[tuple[str, Callable[[Figures], Any]]] = (
    ("steps", lambda of: of.steps),
    ("seconds of training", lambda of: of.seconds),
    ("seconds of a step, median", lambda of: of.step_s),
    ("rollouts trained", lambda of: of.rollouts),
    ("rollouts per second", lambda of: of.rollouts_per_s),
    ("tokens trained per second", lambda of: of.tokens_per_s),
    ("accuracy", lambda of: of.accuracy),
    ("reward", lambda of: of.reward),
    ("loss", lambda of: of.loss),
    ("staleness, mean", lambda of: of.staleness_mean),
    ("staleness, most", lambda of: of.staleness_max),
    ("efficiency", lambda of: of.efficiency),
    ("bounded by", lambda of: of.bounded_by),
    ("groups dropped", lambda of: of.dropped),
    ("faults", lambda of: of.faults),
    ("restarts", lambda of: of.restarts),
)


def figure_rows(first: Figures, second: Figures) -> list[tuple[str, str, str, str]]:
    """Name, the first's, the second's, and by how much the second differs; without what neither
    has.
    """
    rows = []
    for name, of in _ROWS:
        a, b = of(first), of(second)
        if isinstance(a, Course) or isinstance(b, Course):
            steps = max(course.steps for course in (a, b) if isinstance(course, Course))
            over = f" {steps} steps" if steps > 1 else ""
            for part in ("first", "last", "best"):
                rows.append(
                    _row(f"{name}, {part}{over}", getattr(a, part, None), getattr(b, part, None))
                )
        else:
            rows.append(_row(name, a, b))
    return [row for row in rows if row[1:3] != ("-", "-")]


def _row(name: str, a: Any, b: Any) -> tuple[str, str, str, str]:
    change = ""
    if isinstance(a, int | float) and isinstance(b, int | float) and a != b:
        change = f"{b - a:+.3g}" + (
            f" ({b / a - 1:+.0%})" if a > 0 and b >= 0 and abs(b / a - 1) < 99 else ""
        )
    return name, _text_of(a), _text_of(b), change


def _text_of(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def comparison(first: Side, second: Side, *, signs: str, width: int) -> list[str]:
    """All of it as lines for a terminal. signs: of a curve, from low to high. width: cells of
    one.
    """
    a, b = first.name, second.name
    lines = [f"A  {clean(a)}", f"B  {clean(b)}", ""]
    graph = graph_differences(first, second)
    lines += [
        "graph and knobs",
        *([f"  {clean(difference)}" for difference in graph] or ["  the same"]),
        "",
    ]
    settings = setting_differences(first, second)
    lines.append("program and environment")
    lines += _settings_told(settings) if settings else ["  the same"]
    figures = figure_rows(first.figures, second.figures)
    heads = ("figures", "A", "B", "B - A")
    lines += ["", *in_columns(heads, figures, right=("A", "B", "B - A"))]
    curves = [
        line
        for chart in FIGURES[:4]
        for line in _curves(chart.name, chart.title, first, second, signs, width)
    ]
    return [*lines, *(["", "curves, step by step from left to right", *curves] if curves else [])]


def _settings_told(settings: Sequence[Differs]) -> list[str]:
    """Short ones in columns, each long one below its name."""
    short = [
        setting
        for setting in settings
        if max(len(setting.first or ""), len(setting.second or "")) <= SHORT
    ]
    rows = [(setting.name, setting.first or "-", setting.second or "-") for setting in short]
    lines = [f"  {line}" for line in in_columns(("", "A", "B"), rows)] if rows else []
    for setting in settings:
        if setting not in short:
            values = (
                (letter, clean(value or "-")[:LONGEST])
                for letter, value in (("A", setting.first), ("B", setting.second))
            )
            lines += [
                f"  {clean(setting.name)}",
                *(f"    {letter}  {value}" for letter, value in values),
            ]
    return lines


def _curves(name: str, title: str, first: Side, second: Side, signs: str, width: int) -> list[str]:
    """The two curves of a figure below each other, with one scale: from the least to the most of
    both.
    """
    both = [[value for _, value in series(side.lines, name)] for side in (first, second)]
    if not all(both):
        return []
    low, high = min(map(min, both)), max(map(max, both))
    lines = [f"  {title}, {_text_of(low)} to {_text_of(high)}"]
    for letter, values in zip("AB", both, strict=True):
        lines.append(
            f"  {letter} {sparkline(values, width, signs, (low, high))} {_text_of(values[-1])}"
        )
    return lines


def plain(first: Side, second: Side) -> dict[str, Any]:
    """For JSON."""
    return {
        "runs": [first.name, second.name],
        "graph": graph_differences(first, second),
        "settings": [asdict(difference) for difference in setting_differences(first, second)],
        "figures": [asdict(first.figures), asdict(second.figures)],
    }


def draw(first: Side, second: Side, out: Path) -> None:
    """The curves of both, one over the other. Errors: RunFolderError."""
    charts = charts_of({first.name: first.lines, second.name: second.lines})
    text = charts_svg(charts, f"{first.name} and {second.name}").encode()
    write_atomically(out, lambda file: file.write(text), what="drawing", flush=False)
