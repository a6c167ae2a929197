"""Trackers that do what trackers do: hang, raise, die, print without end, find no room; and one
that takes lines.
"""

import errno
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

from dataflow.trackers import RolloutTable, StepFigures, StepGroups, TrackedRun, Tracker


@dataclass(kw_only=True)
class Lines(Tracker):
    """Writes what it is told into a file of the run folder, a line for each call."""

    name: str = "lines.txt"
    rollouts_every = 2

    def start(self, run: TrackedRun) -> str:
        self._file = (run.folder / self.name).open("a")
        self._put(f"start {'again' if run.goes_on else 'new'} {run.kept.get('count', 0)}")
        self._kept = run.kept
        return f"see {self.name}"

    def log(self, figures: StepFigures) -> None:
        self._kept["count"] = self._kept.get("count", 0) + 1
        value = figures.numbers.get("eval_accuracy" if figures.is_evaluation else "loss")
        self._put(
            f"{figures.node} {figures.step} {value:.3f}{' again' if figures.is_again else ''}"
        )

    def rollouts(self, table: RolloutTable) -> None:
        self._put(f"table {table.step} of {len(table.rows)}")

    def finish(self, outcome: str) -> None:
        self._put(f"finish {outcome}")
        self._file.close()

    def _put(self, text: str) -> None:
        self._file.write(f"{text}\n")
        self._file.flush()


@dataclass(kw_only=True)
class Bad(Tracker):
    """Misbehaves in one of its methods."""

    how: str
    at: str = "log"
    rollouts_every = 1

    def start(self, run: TrackedRun) -> str:
        self._folder = run.folder
        self._do("start")
        return ""

    def log(self, figures: StepFigures) -> None:
        self._do("log")

    def rollouts(self, table: RolloutTable) -> None:
        self._do("rollouts")

    def flush(self) -> None:
        self._do("flush")

    def finish(self, outcome: str) -> None:
        self._do("finish")

    def _do(self, call: str) -> None:
        if call != self.at:
            return
        if self.how == "hang":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Event().wait()
        elif self.how == "raise":
            raise ValueError("it does not like that")
        elif self.how == "die":
            os._exit(3)
        elif self.how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.how == "flood":
            while True:
                os.write(1, b"x" * 65536)
        elif self.how == "no room":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._folder / "big"))


@dataclass(kw_only=True)
class Groups(Tracker):
    """Writes what it is told of groups."""

    takes_groups = True

    def start(self, run: TrackedRun) -> str:
        self._path: Path = run.folder / "groups.txt"
        return ""

    def log(self, figures: StepFigures) -> None:
        pass

    def groups(self, groups: StepGroups) -> None:
        with self._path.open("a") as file:
            file.write(f"{groups.step} {sorted(groups.seen)} {dict(groups.dropped)}\n")


class Unfit(Tracker):
    """Has values of its own, and is no dataclass."""

    def __init__(self) -> None:
        self.path = "x"


class NotInstalled(Tracker):
    """Needs what nobody has."""

    packages = ("a_library_that_nobody_has",)
    extra = "nothing"


@dataclass(kw_only=True)
class Steps(Tracker):
    """Writes which steps it is told into a file of the run folder."""

    rollouts_every = 0

    def start(self, run: TrackedRun) -> str:
        self._file = (run.folder / "steps.txt").open("a")
        self._put(f"start {'again' if run.goes_on else 'new'}")
        return "see steps.txt"

    def log(self, figures: StepFigures) -> None:
        self._put(f"step {figures.step}{' again' if figures.is_again else ''}")

    def finish(self, outcome: str) -> None:
        self._put(f"finish {outcome}")
        self._file.close()

    def _put(self, text: str) -> None:
        self._file.write(f"{text}\n")
        self._file.flush()


@dataclass(kw_only=True)
class Refused(Steps):
    """Takes two lines, then none more, like one whose disk is full."""

    def start(self, run: TrackedRun) -> str:
        self._left = 2
        return super().start(run)

    def log(self, figures: StepFigures) -> None:
        if not self._left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._left -= 1
        super().log(figures)


@dataclass(kw_only=True)
class Tables(Steps):
    """Takes a table only where there is room, as a file of the run folder says."""

    rollouts_every = 2

    def start(self, run: TrackedRun) -> str:
        self._room = run.folder / "room"
        return super().start(run)

    def rollouts(self, table: RolloutTable) -> None:
        if not self._room.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._put(f"table {table.step}")


@dataclass(kw_only=True)
class Held(Steps):
    """Holds back what it takes, as libraries do that write in threads of their own."""

    takes: int = 1 << 30
    """Lines, in one process; then it fails."""
    settles_s = 3600.0

    def start(self, run: TrackedRun) -> str:
        self._held: list[str] = []
        return super().start(run)

    def log(self, figures: StepFigures) -> None:
        if not self.takes:
            raise ValueError("it takes no more")
        self.takes -= 1
        super().log(figures)

    def close(self) -> None:
        for text in self._held:
            super()._put(text)

    def finish(self, outcome: str) -> None:
        self._put(f"finish {outcome}")
        self.close()

    def _put(self, text: str) -> None:
        self._held.append(text)


@dataclass(kw_only=True)
class Bulky(Tracker):
    """Writes 16 KiB for each line into a file of its own; what is in it beyond what was kept is cut
    off.
    """

    path: str = ""
    """Empty: what the environment says."""
    rollouts_every = 0

    def start(self, run: TrackedRun) -> str:
        path = self.path or os.environ["BULKY"]
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._kept = run.kept
        os.ftruncate(self._file, run.kept.setdefault("size", 0))
        os.lseek(self._file, 0, os.SEEK_END)
        return path

    def log(self, figures: StepFigures) -> None:
        self._put(f"step {figures.step}".encode().ljust(1 << 14) + b"\n")

    def finish(self, outcome: str) -> None:
        self._put(f"finish {outcome}\n".encode())

    def _put(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._file, data) :]
        self._kept["size"] = os.lseek(self._file, 0, os.SEEK_CUR)


class Endless(Steps):
    """Never comes to its end."""

    def finish(self, outcome: str) -> None:
        threading.Event().wait()
