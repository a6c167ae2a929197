"""Who runs in a run folder that several hosts see: one scheduler, which raises a counter there, and
locks nothing.

Each holder has a number, one above that of the holder before it, and a file of that number in
`holders/`. Who wants to take the run over waits, by its own clock, until the counter stands still,
and makes the file of the next number: a file system lets one do so. Then it removes the file of the
one before, which finds that out before it writes again.
"""

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dataflow.errors import Replaced
from dataflow.folder.ledger.copying import renew
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.run_lock import UnderWay
from dataflow.system.clocks import AwakeClock
from dataflow.system.files import disk

FOLDER = "holders"
RAISE_S = 1.0
"""Seconds between two raises of the counter."""
STILL_S = 15.0
"""A counter that stands still for so many seconds has no live holder: as long as a worker without a
heartbeat counts as hanging."""
LEAST_STILL_S = 5 * RAISE_S
"""A shorter time could pass between two raises of a live holder."""
LOOK_S = 0.2
"""Seconds between two checks of a holder whether it still holds the run."""
_RELEASED = b"released"


class RunHold:
    """A run in the hands of this process, and of those that are forked from it."""

    def __init__(
        self, path: Path, number: int, who: bytes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """path: of its file. who: what no other holder's file begins with. clock: one that goes on
        while the process is stopped.
        """
        self.number = number
        """Number of this holder, above that of each one before."""
        self._path, self._who, self._clock = path, who, clock
        self._looked = float("-inf")
        self._text, self._raised = b"", float("-inf")

    def check(self) -> None:
        """Look whether it still holds the run, and raise the counter when that is due; to be called
        often, and before anything is written. Errors: Replaced; RunFolderError when the disk does
        not say.
        """
        now = self._clock()
        if now - self._looked < LOOK_S:
            return
        with disk("looking at", self._path):
            text = _read(self._path)
            if not text.startswith(self._who) or _at(self._path.parent, self.number + 1).exists():
                raise self._replaced()
            if text != self._text:
                self._text, self._raised = text, now
            elif now - self._raised >= RAISE_S:
                count = int(text.rpartition(b" ")[2] or 0) + 1
                self._text, self._raised = self._who + b" %d" % count, now
                _write(self._path, self._text)
        self._looked = now

    def release(self) -> None:
        """Let go of the run: the next holder need not wait. Nothing is done where another
        holds it.
        """
        with contextlib.suppress(OSError):
            if _read(self._path).startswith(self._who):
                _write(self._path, _RELEASED)

    def _replaced(self) -> Replaced:
        return Replaced(
            f"this process ({os.getpid()}) held the run '{self._path.parent.parent.name}' as number"
            f" {self.number}, but did not raise its counter for too long, so that another one has"
            " taken it over; it ends without touching the run; `dataflow doctor` tells how that"
            " goes on"
        )


class Taking:
    """The way to hold a run: looks again and again, until it may take it, or somebody is seen to
    hold it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        still_s: float = STILL_S,
        clock: Callable[[], float] | None = None,
        holders_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """folder: of the run. clock: of this process, which stands still while it is stopped: it
        could have seen nothing.
        """
        self._folder, self._still_s = folder / FOLDER, still_s
        self._clock, self._holders_clock = clock or AwakeClock(), holders_clock
        self._seen: tuple[int, bytes] | None = None
        self._since = 0.0
        self.was_released = True
        """Whether the holder before has let go of it, or there was none."""

    def look(self) -> RunHold | None:
        """The run, once its counter has stood still for long enough; None: look again. Errors:
        UnderWay where it was raised, or somebody else was faster; RunFolderError.
        """
        with disk("looking at", self._folder):
            self._folder.mkdir(exist_ok=True)
            number = _newest(self._folder)
            text = _read(_at(self._folder, number)) if number else _RELEASED
        now = self._clock()
        if self._seen is None:
            self._seen, self._since = (number, text), now
        self.was_released = text == _RELEASED
        if self.was_released:
            return self._take(number)
        if self._seen != (number, text):
            raise self._under_way(number, text)
        return self._take(number) if now - self._since >= self._still_s else None

    def _take(self, before: int) -> RunHold:
        """Become the next holder: of all who try, exactly one can make the file of that number."""
        number, holder = (
            before + 1,
            b"%d@%s#%s" % (os.getpid(), _host(), secrets.token_hex(6).encode()),
        )
        path = _at(self._folder, number)
        with disk("taking", path):
            try:
                with path.open("xb") as file:
                    file.write(holder + b" 0")
            except FileExistsError:
                raise self._under_way(number, _read(path)) from None
            # it had been taken, given up, and taken again meanwhile
            if _newest(self._folder) != number:
                path.unlink(missing_ok=True)
                raise self._under_way(_newest(self._folder), b"")
            for older in self._folder.iterdir():
                if older.name.isdecimal() and int(older.name) < number:
                    older.unlink(missing_ok=True)
        return RunHold(path, number, holder, self._holders_clock)

    @property
    def waits(self) -> str:
        """What it waits for, as text."""
        holder = "who has it" if self._seen is None else _holder(*self._seen)
        return (
            f"'{self._folder.parent.name}' was not let go of: waiting {self._still_s:.0f} s to see"
            f" whether {holder} still runs it, which raises a counter there every {RAISE_S:.0f} s"
        )

    def _under_way(self, number: int, text: bytes) -> UnderWay:
        return UnderWay(
            f"'{self._folder.parent.name}' is under way: {_holder(number, text)} runs it; wait"
            " until it has ended, or stop it with Ctrl-C there"
        )


def _holder(number: int, text: bytes) -> str:
    """A holder as text."""
    process = text.partition(b"#")[0].decode(errors="replace").partition("@")
    return f"process {process[0]} on host '{process[2]}'" if process[2] else f"holder {number}"


def is_over_hosts(folder: RunFolder) -> bool:
    """Whether a run was ever held by counter, so that who holds it now may be on another host."""
    return (folder.path / FOLDER).exists()


def seen_in_part(folder: RunFolder) -> str:
    """Why the run's ledger may say less on this host than on the one where it is written; empty: it
    says all.
    """
    host = _led_elsewhere(folder)
    return host and (
        f"host '{host}' leads this run, or did when it was killed: of what its ledger took in last,"
        " this host may see a part only, as SQLite shares that in memory; ask there for all of it,"
        " or once the run has ended"
    )


def _led_elsewhere(folder: RunFolder) -> str:
    holders = folder.path / FOLDER
    with contextlib.suppress(OSError):
        number = _newest(holders)
        text = _read(_at(holders, number)) if number else _RELEASED
        host = text.partition(b"#")[0].partition(b"@")[2]
        return "" if text == _RELEASED or host == _host() else host.decode(errors="replace")
    return ""


@contextlib.contextmanager
def held(
    folder: RunFolder,
    *,
    still_s: float = STILL_S,
    sleep: Callable[[float], object] = time.sleep,
    tell: Callable[[str], object] = lambda text: None,
) -> Iterator[RunHold]:
    """Be the only scheduler in a run folder that several hosts see, for as long as the block lasts.
    tell: hears what is waited for, and how long.

    Where the one before has not let go of it, and may live, cut off from here, the ledger is put in
    a new file: what that one still writes is nobody's. Errors: UnderWay; RunFolderError;
    LedgerError.
    """
    taking = Taking(folder.path, still_s=still_s)
    hold = taking.look()
    if hold is None:
        tell(taking.waits)
    while hold is None:
        sleep(RAISE_S / 2)
        hold = taking.look()
    if not taking.was_released:
        renew(folder.ledger)  # who comes next does so where this fails: it was not let go of
    try:
        yield hold
    finally:
        hold.release()


def _newest(folder: Path) -> int:
    return max((int(file.name) for file in folder.iterdir() if file.name.isdecimal()), default=0)


def _at(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}"


def _read(path: Path) -> bytes:
    """The content of a file; empty where it is gone. Each read opens it anew, so that a shared file
    system looks.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _write(path: Path, text: bytes) -> None:
    """Write a file that still exists."""
    handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(handle, text, 0)
        os.ftruncate(handle, len(text))
    finally:
        os.close(handle)


def _host() -> bytes:
    return socket.gethostname().encode()
