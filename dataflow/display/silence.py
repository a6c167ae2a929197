"""Names what is silent in a run that learns nothing: from the lines of metrics.jsonl, for the view
and the summary.
"""

from collections.abc import Iterable, Mapping
from typing import Any

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
            f" group the same value in all {self._groups} groups of {self.steps} steps, such as"
            f" {self._example}"
        )


def silence(lines: Iterable[Mapping[str, Any]]) -> str:
    """The message for a run with these steps, of which none had a signal; empty where one had, or
    there are none.
    """
    summary, steps = Silence(), list(lines)
    for line in steps:
        summary.take(line)
    return str(summary) if steps and summary.steps == len(steps) else ""
