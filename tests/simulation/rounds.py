"""Rounds of evaluation as an onlooker sees them, and their laws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import pyarrow as pa

from dataflow.folder.ledger import Ledger
from dataflow.history.resume import CUT_OFF
from dataflow.records import GROUP_ID, POSITION, PROMPT_ID, VERSIONS
from dataflow.staleness import oldest_versions

from .laws import check
from .shape import Shape

SOURCE, SINK = "questions", "eval"


class Rounds:
    """What was asked for, and what came of it."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.asked: list[int] = []
        """Steps whose round was asked for since the run was last taken up."""
        self.finished: Counter[int] = Counter()
        """How often a step's round was recorded."""
        self._last = -1
        """Group that was recorded last."""
        self._judged: list[int] = []
        self._by: dict[int, tuple[int, int]] = {}

    def ask(self, step: int) -> bool:
        """A source is told of a round; whether it is a new one."""
        is_new = step not in self.asked
        if is_new:
            check(
                step > max(self.finished, default=-1),
                f"the round of step {step} is asked for, but it was finished",
            )
            self.asked.append(step)
        return is_new

    def cut_off(self) -> None:
        """The whole run died: its round is given up, and asked for again or superseded."""
        self.asked = []

    def judge(self, step: int, rows: pa.Table) -> None:
        """A round is about to be recorded: all of its prompts, each once and whole, under weights
        of its step.
        """
        shape = self.shape
        check(
            step in self.asked, f"a round of step {step} is judged, but {self.asked} were asked for"
        )
        self._judged = rows.column(GROUP_ID).to_pylist()
        found = Counter(
            zip(rows.column(PROMPT_ID).to_pylist(), rows.column(POSITION).to_pylist(), strict=True)
        )
        wanted = Counter(
            (str(prompt), at) for prompt in range(shape.questions) for at in range(shape.answers)
        )
        check(found == wanted, f"the round of step {step} judges {dict(found)}")
        groups = len(set(self._judged))
        check(
            groups == shape.questions,
            f"the round of step {step} has {groups} groups of {shape.questions} prompts",
        )
        oldest = int(oldest_versions(rows.column(VERSIONS)).min())
        check(oldest >= step, f"the round of step {step} judges what version {oldest} said")

    def record(
        self, attempt: tuple[int, int], step: int, groups: Mapping[str, Iterable[int]]
    ) -> None:
        """A round is in the ledger; once more only if the sink died before it could say so.
        attempt: of the sink.
        """
        check(
            list(groups) == [SOURCE] and list(groups[SOURCE]) == sorted(set(self._judged)),
            f"{groups} were judged",
        )
        check(
            self._by.get(step) != attempt, f"the round of step {step} is recorded twice by one sink"
        )
        check(
            step >= max(self.finished, default=0),
            f"the round of step {step} follows that of {max(self.finished, default=0)}",
        )
        self._by[step] = attempt
        self.finished[step] += 1
        self._last = max(self._last, *self._judged)

    def at_end(self, ledger: Ledger, lines: Iterable[Mapping[str, object]]) -> None:
        """What was asked for is finished, and nothing else is left."""
        shape = self.shape
        lacking = {0, shape.steps, *self.asked} - set(self.finished)
        check(
            not lacking, f"rounds {sorted(lacking)} were not finished, but {sorted(self.finished)}"
        )
        told = [
            line["step"]
            for line in lines
            if "eval_accuracy" in line and line["eval_n"] == shape.questions * shape.answers
        ]
        check(
            sorted(told) == sorted(self.finished),
            f"metrics tell of rounds {told}, but {sorted(self.finished)} were made",
        )
        left = [group.group_id for group in ledger.in_flight(SOURCE)]
        later = range(self._last + 1, ledger.next_group_id(SOURCE))
        check(
            set(left) <= set(later),
            f"groups {left} of an evaluation have no outcome, and {self._last} has one",
        )
        counts = ledger.counts(SINK)
        check(counts.missing == 0, f"the ledger lost count of an evaluation: {counts}")
        check(
            counts.evaluated == self.finished.total() * shape.questions,
            f"not all was judged: {counts}",
        )
        check(set(counts.dropped) <= {CUT_OFF}, f"prompts of an evaluation were lost: {counts}")
