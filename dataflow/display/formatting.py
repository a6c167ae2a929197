"""Numbers and names as short text for the terminal; anything unknown becomes a dash, nothing
raises.
"""

import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.cells import cell_len, set_cell_size


@dataclass(frozen=True, kw_only=True)
class Glyphs:
    """The signs a terminal can show."""

    busy: str = "█"
    blocked: str = "▒"
    starved: str = "▁"
    waiting: str = "·"
    done: str = "━"
    todo: str = "─"
    full: str = "■"
    free: str = "·"
    spark: str = "▁▂▃▄▅▆▇█"
    arrow: str = "→"
    dash: str = "–"
    more: str = "…"
    times: str = "×"


UNICODE = Glyphs()
ASCII = Glyphs(
    busy="#",
    blocked="x",
    starved="_",
    waiting=".",
    done="=",
    todo="-",
    full="#",
    free=".",
    spark="_.-=+*#@",
    arrow="->",
    dash="-",
    more="~",
    times="x",
)


def known(value: Any) -> float | None:
    """The value as a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 else None  # false for NaN as well


def count(value: Any, dash: str = "–") -> str:
    """A whole number: 38, 1,240, 23 k, 4.1 M."""
    number = known(value)
    if number is None:
        return dash
    if abs(number) >= 99_950_000_000_000:
        return f"{number:.1e}"
    for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(number) >= max(size, 9_999.5):
            short = number / size
            return f"{short:.1f}{unit}" if abs(short) < 9.95 else f"{short:,.0f}{unit}"
    return f"{number:,.0f}"


def size_of(value: Any, dash: str = "–") -> str:
    """Bytes in the unit that suits them: 830 MB."""
    number = known(value)
    if number is None:
        return dash
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} bytes"


def rate(value: Any, dash: str = "–") -> str:
    """Something per second: 0.4, 38, 1,240, 23 k."""
    number = known(value)
    return count(value, dash) if number is None or not 0 < abs(number) < 9.95 else f"{number:.1f}"


def score(value: Any, dash: str = "–") -> str:
    """A reward, an accuracy or a staleness: two decimals, fewer when large."""
    number = known(value)
    if number is None:
        return dash
    if abs(number) >= 999.5:
        return count(number)
    return f"{number:.2f}" if abs(number) < 99.95 else f"{number:.0f}"


def age(value: Any, dash: str = "–") -> str:
    """Versions: 2, 1.9."""
    number = known(value)
    if number is None:
        return dash
    return f"{number:.1f}" if number != int(number) and abs(number) < 1000 else count(number)


def duration(seconds: Any, dash: str = "–") -> str:
    """Seconds as 0:41, 12:05 or 1:02:03."""
    number = known(seconds)
    if number is None:
        return dash
    whole = round(max(min(number, 3.6e8), 0.0))
    hours, remainder = divmod(whole, 3600)
    return (
        f"{hours}:{remainder // 60:02d}:{remainder % 60:02d}"
        if hours
        else f"{remainder // 60}:{remainder % 60:02d}"
    )


def share(value: Any) -> float:
    """A share between 0 and 1; 0 where it is not known."""
    number = known(value)
    return 0.0 if number is None else min(max(number, 0.0), 1.0)


def clean(text: Any) -> str:
    """Text on one line without control characters or escape sequences."""
    words = " ".join(str(text).split())
    return "".join(char for char in words if unicodedata.category(char) not in ("Cc", "Cf", "Cs"))


def several(name: Any, replicas: Any, glyphs: Glyphs) -> str:
    """A node's name, and its number of replicas above one: `generator ×3`."""
    many = known(replicas) or 1.0
    return clean(name) + (f" {glyphs.times}{count(many)}" if many > 1 else "")


def fit(text: str, width: int, more: str = "…") -> str:
    """Text in exactly `width` cells, the end left out where it is too long."""
    if width <= 0:
        return ""
    if cell_len(text) > width:
        text = set_cell_size(text, max(width - cell_len(more), 0)) + more
    return set_cell_size(text, width)


def fit_right(text: str, width: int) -> str:
    """Text at the right end of `width` cells."""
    return " " * max(width - cell_len(text), 0) + fit(text, min(cell_len(text), width))


def sparkline(
    values: Sequence[float], width: int, signs: str, scale: tuple[float, float] | None = None
) -> str:
    """At most `width` signs that show how the values went, each the mean of its stretch. scale:
    what the lowest sign stands for, and the highest; None: the least mean and the largest.
    """
    finite = [value for value in values if known(value) is not None]
    if not finite or width <= 0:
        return ""
    width = min(width, len(finite))
    edges = [at * len(finite) // width for at in range(width + 1)]
    means = [math.fsum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = scale or (min(means), max(means))
    span = high - low
    if not 0 < span < math.inf:
        return signs[0] * width
    return "".join(
        signs[min(max(int((mean - low) / span * len(signs)), 0), len(signs) - 1)] for mean in means
    )


def split_bar(
    busy: Any, blocked: Any, starved: Any, width: int, glyphs: Glyphs
) -> tuple[str, str, str, str]:
    """A bar of `width` cells in four pieces; the last one, waiting, is as long as the bar has cells
    left.
    """
    at_work = min(round(share(busy) * width), width)
    held_up = min(round(share(blocked) * width), width - at_work)
    hungry = min(round(share(starved) * width), width - at_work - held_up)
    idle = width - at_work - held_up - hungry
    return (
        glyphs.busy * at_work,
        glyphs.blocked * held_up,
        glyphs.starved * hungry,
        glyphs.waiting * idle,
    )


# Names what is silent in a run that learns nothing: from the lines of metrics.jsonl, for the view
# and the summary.

TOLD_AT = (3, 30, 300, 3000)
"""Steps in a row without a signal before the message."""


class Silence:
    """The steps in a row of whose groups none had a signal.

    consumes: the lines of steps, in order
    produces: a sentence, now and then
    waits for: nothing
    unblocked by: -
    """

    def __init__(self) -> None:
        self.steps = 0
        self._groups = 0
        self._scorers: set[str] = set()
        """Scorers that were silent in all of these steps."""
        self._example = ""

    def take(self, line: Mapping[str, Any]) -> str:
        """The sentence that is due after this step; empty where none is."""
        signal = line.get("no_signal")
        if not signal:
            self.steps = self._groups = 0
            return ""
        silent = set(signal["scorers"])
        self._scorers = silent if not self.steps else (self._scorers & silent) or silent
        self._example = signal["example"]
        self.steps += 1
        self._groups += int(line.get("groups") or 0)
        return str(self) if self.steps in TOLD_AT else ""

    def __str__(self) -> str:
        """What is silent, in how many groups, with an example."""
        return (
            f"nothing to learn from: {', '.join(sorted(self._scorers))} gave all rollouts of a"
            f" group the same value in all {self._groups} groups of {self.steps}"
            f" step{'s' if self.steps > 1 else ''}, such as {self._example}"
        )


def silence(lines: Iterable[Mapping[str, Any]]) -> str:
    """The message for a run with these steps, of which none had a signal; empty where one had, or
    there are none.
    """
    summary, steps = Silence(), list(lines)
    for line in steps:
        summary.take(line)
    return str(summary) if steps and summary.steps == len(steps) else ""
