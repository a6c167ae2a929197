"""What happened to a run at which step: faults, swaps and sets, requests, returns to a checkpoint,
rounds.
"""

import bisect
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dataflow.folder.faults import FILE, describe_faults
from dataflow.folder.ledger import Ledger, LedgerError
from dataflow.folder.live_changes import read_live_changes
from dataflow.folder.request_log import read_requests
from dataflow.folder.run_folder import RunFolder
from dataflow.history.describe import described
from dataflow.live.looks import LEISURE
from dataflow.system.optional_files import stream_lines

MOST = 500
"""Of each kind that are told, the last ones."""
MOST_BYTES = 4 << 20
"""Of faults.jsonl, its end."""
MOST_STEPS = 200_000
"""Whose times are kept."""
LOOK_S = 2.0
"""Between two looks, at least."""


@dataclass
class Marks:
    """Of one run; looked for every two seconds at most."""

    folder: RunFolder
    _times: list[tuple[float, int]] = field(default_factory=list)
    _next: float = float("-inf")
    _lines: dict[str, Any] = field(default_factory=dict)

    def look(self, restarts: Sequence[int], rounds: Sequence[int]) -> dict[str, Any]:
        """All marks, each with its step."""
        if time.monotonic() >= self._next:
            began = time.thread_time()
            self._look_at_times()
            path = self.folder.path / FILE
            start = max(0, path.stat().st_size - MOST_BYTES) if path.is_file() else 0
            lines = [line for _, line in stream_lines(path, start)][-MOST:]
            self._lines = {
                "faults": [
                    {"step": self._step_at(line.get("at")), **_fault(line)} for line in lines
                ],
                "swaps": [
                    {"step": change.step, "text": str(change)}
                    for change in read_live_changes(self.folder)[-MOST:]
                ],
                "requests": [_request(line) for line in read_requests(self.folder.path)[-MOST:]],
            }
            self._next = time.monotonic() + max(LOOK_S, LEISURE * (time.thread_time() - began))
        return {**self._lines, "restarts": list(restarts)[-MOST:], "rounds": list(rounds)[-MOST:]}

    def within(self, begin: float, end: float) -> list[tuple[float, str]]:
        """What was marked between two times, in seconds since 1970, and the steps made then; as of
        the last look.
        """
        first, last = (bisect.bisect_left(self._times, (at, 0)) for at in (begin, end))
        steps = [(at, f"step {step}") for at, step in self._times[first:last]]
        marks = [(mark["at"], mark["text"]) for mark in self._lines.get("faults", ())]
        marks += [(mark["at"], mark["request"]) for mark in self._lines.get("requests", ())]
        return sorted(
            steps + [(at, text) for at, text in marks if at is not None and begin <= at < end]
        )

    def _look_at_times(self) -> None:
        """When steps were made: those that are new, of the trainer that leads."""
        _, config = described(self.folder)
        leading = config.get("leading") or []
        if not leading:
            return
        with (
            contextlib.suppress(LedgerError),
            Ledger.open(self.folder.ledger, readonly=True) as ledger,
        ):
            if ledger.last_step(leading[0]) < (self._times[-1][1] if self._times else 0):
                self._times.clear()  # it went back to a checkpoint
            newest_step = self._times[-1][1] if self._times else 0
            self._times += [
                (at, step) for step, at in ledger.step_times(str(leading[0]), newest_step)
            ]
            del self._times[:-MOST_STEPS]

    def _step_at(self, at: Any) -> int | None:
        """The last step before a time; None where nothing is known of it."""
        if not self._times or not isinstance(at, int | float):
            return None
        place = bisect.bisect_right(self._times, (float(at), 1 << 62))
        return self._times[place - 1][1] if place else 0


def _request(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of requests.jsonl."""
    at, step = line.get("at"), line.get("step")
    return {
        "at": at if isinstance(at, int | float) else None,
        "step": step if isinstance(step, int) else None,
        **{key: str(line.get(key, "")) for key in ("by", "request", "answer")},
        "refused": line.get("refused") is True,
    }


def _fault(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of faults.jsonl: when, and in a sentence."""
    try:
        (text,) = describe_faults([line])
    except (TypeError, ValueError):
        text = "a line of faults.jsonl that is none"
    at, back = line.get("at"), line.get("recovered_s")
    return {
        "at": at if isinstance(at, int | float) else None,
        "worker": str(line.get("worker", "")),
        "text": text,
        "recovered": back is not None,
    }
