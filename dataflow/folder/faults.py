"""faults.jsonl of a run folder: a line for every end of a worker that the run did not ask for."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow.system.files import Extras, Tell, read_lines, to_json, warn

FILE = "faults.jsonl"
STOPPED = "was stopped by a signal"
"""The cause where a worker was stopped, and was let go on."""
_ONE_S = 5.0
"""Lines of one cause within so many seconds are reported together."""


@dataclass
class _Open:
    """A fault whose worker is not back."""

    line: dict[str, Any]
    noticed: float


class Faults:
    """The book of faults.

    A line is written once, when it is known how the fault ended: the worker is at work again, has
    died again, or the run has ended. {"at": seconds since 1970 when it was noticed, "worker",
    "cause", "attempt": the one that ended, 0 for the first, "noticed_s": since its last sign of
    life, "rollouts_again": that it had begun and not sent on, which are drawn again, from their
    last segment on where that was written down, "recovered_s": from `at` until it was at work
    again, null where it never was}.
    """

    def __init__(
        self,
        folder: str,
        clock: Callable[[], float],
        notices: list[str],
        wall: Callable[[], float] = time.time,
    ) -> None:
        """folder: of the run; empty: nothing is written. clock: the scheduler's. notices: what the
        user is told.
        """
        self._path = Path(folder) / FILE if folder else None
        self._clock, self._wall, self._notices = clock, wall, notices
        self._extras = Extras(notices.append)
        self._open: dict[str, _Open] = {}

    def noticed(
        self, worker: str, cause: str, attempt: int, heard_at: float, rollouts: int = 0
    ) -> None:
        """A worker has ended, or was stopped. heard_at: when it last gave a sign of life. rollouts:
        that it had begun.
        """
        self._write(worker, None)
        now = self._clock()
        line = {
            "at": self._wall(),
            "worker": worker,
            "cause": cause,
            "attempt": attempt,
            "noticed_s": round(now - heard_at, 3),
            "rollouts_again": rollouts,
        }
        self._open[worker] = _Open(line, now)

    def recovered(self, worker: str, text: str = "") -> None:
        """A worker is at work; a worker without a fault is not reported. text: what to say where it
        was not simply restarted.
        """
        fault = self._open.get(worker)
        if fault is not None:
            took = self._clock() - fault.noticed
            again = fault.line["rollouts_again"]
            more = f"; {again} rollout{'s' if again > 1 else ''} drawn again" if again else ""
            self._notices.append(
                text or f"worker {worker} {fault.line['cause']}, restarted after {took:.1f} s{more}"
            )
            self._write(worker, round(took, 3))

    def close(self) -> None:
        """The run has ended: write down what was not recovered."""
        for worker in list(self._open):
            self._write(worker, None)

    def _write(self, worker: str, recovered_s: float | None) -> None:
        fault = self._open.pop(worker, None)
        if fault is not None and self._path is not None:
            self._extras.append(self._path, to_json({**fault.line, "recovered_s": recovered_s}))


def read_faults(folder: Path, tell: Tell = warn) -> list[dict[str, Any]]:
    """The lines of a run's faults.jsonl, without those that a crash tore."""
    return read_lines(folder / FILE, tell)[0]


def describe_faults(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """A sentence for each fault, for people; workers that fell at once for one reason, as with a
    host, share one.
    """
    together: list[list[Mapping[str, Any]]] = []
    for line in lines:
        if (
            together
            and line.get("cause") == together[-1][0].get("cause")
            and _at(line) - _at(together[-1][0]) < _ONE_S
        ):
            together[-1].append(line)
        else:
            together.append([line])
    return [_sentence(group) for group in together]


def _at(line: Mapping[str, Any]) -> float:
    return float(line.get("at", 0.0))


def _sentence(lines: Sequence[Mapping[str, Any]]) -> str:
    names = ", ".join(str(line.get("worker")) for line in lines)
    back = [line.get("recovered_s") for line in lines]
    sentence = (
        f"{names} {lines[0].get('cause')}: noticed after {max(_known(lines, 'noticed_s')):.1f} s, "
    )
    sentence += (
        "not back" if None in back else f"back after {max(_known(lines, 'recovered_s')):.1f} s"
    )
    again = int(sum(_known(lines, "rollouts_again")))
    return (
        f"{sentence}, {again} rollout{'s' if again > 1 else ''} drawn again" if again else sentence
    )


def _known(lines: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [float(line.get(key) or 0.0) for line in lines]


def restarts(folder: Path) -> int:
    """How often a worker of the run in `folder` was started again and came back."""
    ended = [line for line in read_faults(folder) if line.get("cause") != STOPPED]
    return sum(line.get("recovered_s") is not None for line in ended)
