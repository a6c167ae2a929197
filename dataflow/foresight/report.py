"""A forecast, for people and for programs."""

from collections.abc import Mapping
from typing import Any

from dataflow.draw.charts import timeline_svg
from dataflow.foresight.foresee import Foreseen
from dataflow.planning.memory_need import SPARE
from dataflow.planning.placement import amount, table

_DRAWN_STEPS = 6


def lines(foreseen: Foreseen, prices: Mapping[str, float] | None = None) -> str:
    """A table, and sentences below it. prices: of a device for an hour, by kind."""
    head = ("operator", "devices", "replicas x ranks", "memory of a rank", "busy, s", "idle")
    rows = [
        (
            operation.node,
            operation.devices,
            operation.cut if operation.count else "",
            _memory(operation.need_bytes, operation.room_bytes),
            number(operation.seconds),
            f"{foreseen.idle(operation):.0%}",
        )
        for operation in foreseen.operations
    ]
    rounds = bool(foreseen.in_turn) and foreseen.max_staleness > 0
    how = "generation and training at once" if foreseen.overlaps else "generation, then training"
    how += f", in turns of {foreseen.max_staleness + 1} steps" if rounds else ""
    low, high = (number(bound) for bound in foreseen.spread_s)
    sentences = [
        f"a step of {foreseen.rollouts:,.0f} rollouts takes {number(foreseen.step_s)} s"
        + (f", eight in ten {low} to {high}" if low != high and not rounds else "")
        + f" ({how}); '{foreseen.bottleneck.node}' is busy longest",
        *(
            f"each rank of '{operation.node}' needs at least {operation.need}"
            for operation in foreseen.operations
            if operation.need
        ),
        *(
            f"left to the plan, '{operation.node}' has {operation.choice}"
            for operation in foreseen.operations
            if operation.choice
        ),
        *(
            f"'{operation.node}' leaves {amount(operation.room_bytes - operation.need_bytes)} for"
            " what frameworks"
            " take: that is little"
            for operation in foreseen.operations
            if operation.need_bytes
            and operation.room_bytes
            and SPARE * operation.room_bytes < operation.need_bytes
        ),
        f"a version of the weights takes {number(foreseen.weights_s)} s, "
        + ("while both compute" if foreseen.overlaps else "which is in the step"),
    ]
    if foreseen.in_turn:
        names = " and ".join(f"'{node}'" for node in foreseen.in_turn)
        sentences.append(
            f"{names} take turns on the same devices: one is awake at a time, and"
            f" {number(foreseen.moved_s)} s of a step their memory moves to main memory and back"
        )
    if foreseen.max_staleness:
        at_bound = foreseen.by_staleness.get(foreseen.max_staleness, 0.0)
        sentences.append(
            f"staleness is {foreseen.staleness:.1f} versions in the mean, {foreseen.max_staleness}"
            " at"
            " most" + (f" ({at_bound:.0%} of the rollouts)" if foreseen.by_staleness else "")
        )
    if foreseen.in_flight is not None:
        sentences.append(f"{foreseen.in_flight:,.0f} prompts are without an outcome in the mean")
    if foreseen.gpu_hours is not None:
        sentences.append(f"all steps take {foreseen.gpu_hours:,.1f} GPU hours")
    if prices is not None:
        sentences.append(_money(foreseen, prices))
    return "\n".join(
        [
            *table([head, *rows], ruled=True),
            *sentences,
            "foreseen, not measured; assumed:",
            *(f"- {assumption}" for assumption in foreseen.assumed),
        ]
    )


def picture(foreseen: Foreseen, title: str) -> str:
    """A time line of some steps, as an SVG. ValueError for what was not simulated."""
    if foreseen.simulated is None:
        raise ValueError("a time line is drawn of what was simulated; foresee with simulated=True")
    run = foreseen.simulated
    first = min(run.first, len(run.step_ends) - 2)
    marks = run.step_ends[first : first + _DRAWN_STEPS + 1].tolist()
    worked = {name: spans for name, spans in run.spans.items() if spans}
    return timeline_svg(worked, marks, f"{title}: {len(marks) - 1} steps, as foreseen")


def to_plain(foreseen: Foreseen) -> dict[str, Any]:
    """For JSON: seconds, bytes, versions, shares."""
    return {
        "step_s": foreseen.step_s,
        "spread_s": list(foreseen.spread_s),
        "rollouts": foreseen.rollouts,
        "bottleneck": foreseen.bottleneck.node,
        "efficiency": foreseen.efficiency,
        "weights_s": foreseen.weights_s,
        "staleness_mean": foreseen.staleness,
        "max_staleness": foreseen.max_staleness,
        "by_staleness": {str(versions): share for versions, share in foreseen.by_staleness.items()},
        "prompts_in_flight": foreseen.in_flight,
        "gpus": foreseen.gpus,
        "gpu_hours": foreseen.gpu_hours,
        "operators": [
            {
                "node": operation.node,
                "devices": operation.devices,
                "replicas_x_ranks": operation.cut,
                "busy_s": operation.seconds,
                "idle_share": foreseen.idle(operation),
                "memory_bytes": operation.need_bytes,
                "room_bytes": operation.room_bytes,
            }
            for operation in foreseen.operations
        ],
        "assumed": list(foreseen.assumed),
    }


def _money(foreseen: Foreseen, prices: Mapping[str, float]) -> str:
    step_cost = (
        foreseen.step_s / 3600 * sum(count * prices[kind] for kind, count in foreseen.taken.items())
    )
    by = ", ".join(f"{kind}={prices[kind]:g}" for kind in foreseen.taken)
    text = f"a step costs {step_cost:,.4g}"
    if foreseen.gpu_hours is not None:
        hours = foreseen.step_s / 3600 * sum(foreseen.taken.values())
        text += f", all steps {step_cost * foreseen.gpu_hours / hours:,.2f}"
    return f"{text}, at {by} an hour"


def _memory(need: int | None, room: int | None) -> str:
    if need is None:
        return ""
    return amount(need) + ("" if room is None else f" of {amount(room)}")


def number(seconds: float) -> str:
    """Three digits, or all of a large one."""
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"
