"""What is foreseen, for people and for programs."""

from dataflow.foresight.foresee import Foreseen
from dataflow.planning.placement import amount


def lines(found: Foreseen) -> str:
    """A table, and sentences below it."""
    head = ("operator", "devices", "replicas x ranks", "memory of a rank", "busy, s", "idle")
    rows = [
        (
            each.node, each.devices, each.cut, f"{amount(each.need_bytes)} of {amount(each.room_bytes)}",
            _number(each.seconds), f"{found.idle(each):.0%}",
        )
        for each in found.operations
    ]  # fmt: skip
    widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]
    ]
    table.insert(1, "  ".join("-" * width for width in widths))
    how = "generation and training at once" if found.overlaps else "generation, then training"
    said = [
        f"a step of {found.rollouts:,.0f} rollouts takes {_number(found.step_s)} s ({how}); "
        f"'{found.bottleneck.node}' is busy longest",
        f"a version of the weights takes {_number(found.weights_s)} s, "
        + ("while both compute" if found.overlaps else "which is in the step"),
    ]
    if found.overlaps:
        said.append(f"staleness is {found.staleness:.1f} versions in the mean, {found.max_staleness} at most")
    if found.gpu_hours is not None:
        said.append(f"all steps take {found.gpu_hours:,.1f} GPU hours")
    return "\n".join([*table, *said, "assumed: " + "; ".join(found.assumed)])


def _number(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"
