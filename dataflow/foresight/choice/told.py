"""A search's result as text."""

from typing import Any

from dataflow.foresight.choice.search import SearchResult, cost_of
from dataflow.foresight.report import number, table


def ways(choice: SearchResult) -> str:
    """The best ways, why the others lose, and which were refused."""
    prices, best = choice.objective.prices, choice.ways[0]
    sought = choice.objective.cost
    head = ["ways to place it", "step, s"]
    if best.foreseen.taken:
        head += ["cost of a step" if prices is not None else "device seconds"]
    rows = []
    for way in choice.ways:
        foreseen = way.foreseen
        cost = cost_of(foreseen, prices)
        least = cost_of(best.foreseen, prices) if sought else best.foreseen.step_s
        more = "" if way is best else f"{(cost if sought else foreseen.step_s) / least - 1:+.0%}"
        rows.append(
            (
                way.flags,
                number(foreseen.step_s),
                *([number(cost)] if foreseen.taken else []),
                more,
                f"'{foreseen.bottleneck.node}' is busy longest",
                f"staleness {foreseen.staleness:.1f}",
            )
        )
    summary = f"{choice.tried:,} ways looked at, {choice.simulated} simulated"
    if choice.refused:
        refused = ", ".join(f"{count:,} {why}" for why, count in choice.refused.items())
        summary += f"; {sum(choice.refused.values()):,} refused: {refused}"
    return "\n".join(["", *table((*head, "", "why", ""), rows), summary])


def to_plain(choice: SearchResult) -> dict[str, Any]:
    """For JSON: the best ways, and what was looked at."""
    return {
        "ways": [
            {
                "asked": way.flags,
                "step_s": way.foreseen.step_s,
                "taken": way.foreseen.taken,
                "cost_of_a_step": cost_of(way.foreseen, choice.objective.prices),
            }
            for way in choice.ways
        ],
        "ways_tried": choice.tried,
        "ways_simulated": choice.simulated,
        "ways_refused": dict(choice.refused),
    }
