"""Pieces of HTML about a run, for its report and for notebooks; whatever comes from outside goes
through `escaped`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dataflow.display.formatting import count, duration, score
from dataflow.draw.charts import Chart, chart_svg
from dataflow.runs.drawing import Shape, svg_of
from dataflow.runs.examples import Examples, scores_of
from dataflow.runs.tables import Course, Figures
from dataflow.runs.texts import escaped, visible

ONE_LINE = 300
"""Characters of what stands in a cell of a table."""
LARGE = 1600
"""Pixels from which on a graph is not made to fit."""


def tiles(figures: Figures, state: str) -> str:
    """The figures that matter first."""
    figure_tiles = [("state", state, "")]
    figure_tiles.append(
        (
            "steps",
            count(figures.steps),
            f"in {duration(figures.seconds)}" if figures.seconds else "",
        )
    )
    for name, course in (
        ("accuracy", figures.accuracy),
        ("reward", figures.reward),
        ("loss", figures.loss),
    ):
        if course is not None:
            figure_tiles.append((name, _course(course), f"best {score(course.best)}"))
    if figures.rollouts:
        per_s = f"{figures.rollouts_per_s:.3g} per second" if figures.rollouts_per_s else ""
        figure_tiles.append(("rollouts trained", f"{figures.rollouts:,}", per_s))
    if figures.step_s is not None:
        figure_tiles.append(("seconds of a step", f"{figures.step_s:.3g}", "median"))
    if figures.staleness_mean is not None:
        figure_tiles.append(
            (
                "staleness",
                f"{figures.staleness_mean:.2f}",
                (
                    f"versions, mean; {figures.staleness_max:g} at most"
                    if figures.staleness_max is not None
                    else "versions, mean"
                ),
            )
        )
    if figures.efficiency is not None:
        figure_tiles.append(
            ("efficiency", f"{figures.efficiency:.0%}", f"bounded by {figures.bounded_by}")
        )
    if figures.faults:
        figure_tiles.append(("faults", count(figures.faults), f"{figures.restarts} came back"))
    return f'<dl class="tiles">{"".join(_tile(*tile) for tile in figure_tiles)}</dl>'


def _tile(name: str, value: str, note: str) -> str:
    below = f"<small>{escaped(note)}</small>" if note else ""
    return f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}{below}</dd></div>"


def charts(drawn: Iterable[Chart]) -> str:
    """Small pictures beside each other."""
    pictures = "".join(f"<div>{chart_svg(chart)}</div>" for chart in drawn)
    return (
        f'<div class="charts">{pictures}</div>'
        if pictures
        else '<p class="muted">No step was finished.</p>'
    )


def graph(drawing: Shape | None) -> str:
    """The graph's drawing: as wide as the page, unless its text would be too small then."""
    if drawing is None:
        return '<p class="muted">The folder has no drawing that can be shown (graph.svg).</p>'
    large = " large" if float(drawing[1].get("width", 0)) > LARGE else ""
    return f'<div class="wide{large}">{svg_of(drawing)}</div>'


def rollouts(examples: Examples) -> str:
    """Those that were found, kind by kind."""
    if not examples.looked:
        return '<p class="muted">The folder has no rollouts of steps.</p>'
    note = (
        f"{examples.looked:,} rollouts of {examples.files} of {examples.of_files} steps were"
        " looked at."
    )
    body = [f'<p class="muted">{note}</p>']
    by = f", by <code>{escaped(examples.by)}</code>" if examples.by else ""
    for title, rows in (
        (f"Best{by}", examples.best),
        (f"Worst{by}", examples.worst),
        ("By chance", examples.random),
        ("With an error", examples.failed),
    ):
        if rows:
            body += [f"<h3>{title}</h3>", *map(rollout, rows)]
    return "".join(body)


def rollout(row: Mapping[str, Any]) -> str:
    """One rollout: what it was asked, what it wrote, what it was given."""
    where = f"rollout {row.get('rollout_id')}, group {row.get('group_id')}, step {row.get('step')}"
    if row.get("staleness") is not None:
        where += f", {row['staleness']} versions behind"
    row_figures = [*scores_of(row).items(), ("ended by", row.get("finish_reason"))]
    figures = "".join(
        f"<li>{escaped(name, 60)} <b>{escaped(_value(value), 200)}</b></li>"
        for name, value in row_figures
    )
    error = (
        f'<p class="label bad">error</p><pre>{escaped(row["error"])}</pre>'
        if row.get("error")
        else ""
    )
    texts = "".join(
        f'<div><p class="label">{name}</p><pre>{escaped(row.get(name))}</pre></div>'
        for name in ("prompt", "completion")
    )
    return (
        f'<article><h4>{escaped(where)}</h4><ul class="scores">{figures}</ul>'
        f'<div class="texts">{texts}</div>{error}</article>'
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Text in rows under headings."""
    top = "".join(f"<th>{escaped(head)}</th>" for head in heads)
    body = "".join(
        f"<tr>{''.join(f'<td>{escaped(cell, ONE_LINE)}</td>' for cell in row)}</tr>" for row in rows
    )
    return (
        "<div"
        f' class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def pairs(rows: Iterable[tuple[str, object]]) -> str:
    """Names and what they are."""
    body = "".join(
        f"<tr><th>{escaped(name)}</th><td>{escaped(value, 2000)}</td></tr>"
        for name, value in rows
        if value not in ("", None)
    )
    return f'<div class="scroll"><table><tbody>{body}</tbody></table></div>'


def _course(course: Course) -> str:
    if course.first == course.last:
        return score(course.last)
    return f"{score(course.first)} → {score(course.last)}"


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else visible(value, 200)
