"""What is foreseen, for people and for programs."""

from collections.abc import Mapping, Sequence
from typing import Any

from dataflow.draw.timeline import timeline_svg
from dataflow.foresight.choice.ways_out import SPARE
from dataflow.foresight.foresee import Foreseen
from dataflow.planning.placement import amount

_DRAWN_STEPS = 6


def lines(found: Foreseen, prices: Mapping[str, float] | None = None) -> str:
    """A table, and sentences below it. prices: of a device for an hour, by kind."""
    head = ("operator", "devices", "replicas x ranks", "memory of a rank", "busy, s", "idle")
    rows = [
        (
            each.node,
            each.devices,
            each.cut if each.count else "",
            _memory(each.need_bytes, each.room_bytes),
            number(each.seconds),
            f"{found.idle(each):.0%}",
        )
        for each in found.operations
    ]
    rounds = bool(found.in_turn) and found.max_staleness > 0
    how = "generation and training at once" if found.overlaps else "generation, then training"
    how += f", in turns of {found.max_staleness + 1} steps" if rounds else ""
    low, high = (number(each) for each in found.spread_s)
    said = [
        f"a step of {found.rollouts:,.0f} rollouts takes {number(found.step_s)} s"
        + (f", eight in ten {low} to {high}" if low != high and not rounds else "")
        + f" ({how}); '{found.bottleneck.node}' is busy longest",
        *(
            f"each rank of '{each.node}' needs at least {each.need}"
            for each in found.operations
            if each.need
        ),
        *(
            f"'{each.node}' leaves {amount(each.room_bytes - each.need_bytes)} for what frameworks"
            " take: that is little"
            for each in found.operations
            if each.need_bytes and each.room_bytes and SPARE * each.room_bytes < each.need_bytes
        ),
        f"a version of the weights takes {number(found.weights_s)} s, "
        + ("while both compute" if found.overlaps else "which is in the step"),
    ]
    if found.in_turn:
        names = " and ".join(f"'{node}'" for node in found.in_turn)
        said.append(
            f"{names} take turns on the same devices: one is awake at a time, and"
            f" {number(found.moved_s)} s of a step their memory moves to main memory and back"
        )
    if found.max_staleness:
        at_bound = found.by_staleness.get(found.max_staleness, 0.0)
        said.append(
            f"staleness is {found.staleness:.1f} versions in the mean, {found.max_staleness} at"
            " most" + (f" ({at_bound:.0%} of the rollouts)" if found.by_staleness else "")
        )
    if found.in_flight is not None:
        said.append(f"{found.in_flight:,.0f} prompts are without an outcome in the mean")
    if found.gpu_hours is not None:
        said.append(f"all steps take {found.gpu_hours:,.1f} GPU hours")
    if prices is not None:
        said.append(_money(found, prices))
    return "\n".join(
        [
            *table(head, rows),
            *said,
            "foreseen, not measured; assumed:",
            *(f"- {each}" for each in found.assumed),
        ]
    )


def picture(found: Foreseen, title: str) -> str:
    """A time line of some steps, as an SVG. ValueError for what was not simulated."""
    if found.simulated is None:
        raise ValueError("a time line is drawn of what was simulated; foresee with simulated=True")
    run = found.simulated
    first = min(run.first, len(run.step_ends) - 2)
    marks = run.step_ends[first : first + _DRAWN_STEPS + 1].tolist()
    worked = {name: spans for name, spans in run.spans.items() if spans}
    return timeline_svg(worked, marks, f"{title}: {len(marks) - 1} steps, as foreseen")


def to_plain(found: Foreseen) -> dict[str, Any]:
    """For JSON: seconds, bytes, versions, shares."""
    return {
        "step_s": found.step_s,
        "spread_s": list(found.spread_s),
        "rollouts": found.rollouts,
        "bottleneck": found.bottleneck.node,
        "efficiency": found.efficiency,
        "weights_s": found.weights_s,
        "staleness_mean": found.staleness,
        "max_staleness": found.max_staleness,
        "by_staleness": {str(versions): share for versions, share in found.by_staleness.items()},
        "prompts_in_flight": found.in_flight,
        "gpus": found.gpus,
        "gpu_hours": found.gpu_hours,
        "operators": [
            {
                "node": each.node,
                "devices": each.devices,
                "replicas_x_ranks": each.cut,
                "busy_s": each.seconds,
                "idle_share": found.idle(each),
                "memory_bytes": each.need_bytes,
                "room_bytes": each.room_bytes,
            }
            for each in found.operations
        ],
        "assumed": list(found.assumed),
    }


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines, with columns as wide as they must be."""
    widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    ]
    table.insert(1, "  ".join("-" * width for width in widths).rstrip())
    return table


def _money(found: Foreseen, prices: Mapping[str, float]) -> str:
    each = found.step_s / 3600 * sum(count * prices[kind] for kind, count in found.taken.items())
    by = ", ".join(f"{kind}={prices[kind]:g}" for kind in found.taken)
    said = f"a step costs {each:,.4g}"
    if found.gpu_hours is not None:
        hours = found.step_s / 3600 * sum(found.taken.values())
        said += f", all steps {each * found.gpu_hours / hours:,.2f}"
    return f"{said}, at {by} an hour"


def _memory(need: int | None, room: int | None) -> str:
    if need is None:
        return ""
    return amount(need) + ("" if room is None else f" of {amount(room)}")


def number(seconds: float) -> str:
    """Three digits, or all of a large one."""
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"
