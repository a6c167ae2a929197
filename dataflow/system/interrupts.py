"""What Ctrl-C, SIGTERM and SIGHUP mean: an end in order, upon which the process that leads a run
decides.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import NoReturn

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C; `docker stop`, Kubernetes, Slurm, systemd; a terminal that goes away."""
ECHO_S = 1.0
"""A SIGTERM or SIGHUP so soon after the first is no second wish: shells and `timeout` send theirs
to the group, too."""


def status_of(error: KeyboardInterrupt) -> int:
    """The exit status of a process that has ended by it: 130 after Ctrl-C, 143 after SIGTERM, 129
    after SIGHUP.
    """
    number = error.args[0] if error.args else None
    return 128 + (number if isinstance(number, int) else signal.SIGINT)


def interrupt(number: int, frame: FrameType | None = None) -> None:
    """A handler. Raises KeyboardInterrupt, which knows the signal's number."""
    raise KeyboardInterrupt(int(number))


def end_as_others_do() -> None:
    """Where this process is the first of a container, the kernel drops the signals that it does not
    handle: until it has more to say, SIGTERM and SIGHUP end it, as they would end any other.
    """
    if os.getpid() == 1 and _is_here():
        for number in _unhandled():
            signal.signal(number, _end)


@contextlib.contextmanager
def interrupted() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt where they would end this process as it stands."""
    with _handled(_unhandled() if _is_here() else [], interrupt):
        yield


@contextlib.contextmanager
def asked_to_end(ask: Callable[[int], object]) -> Iterator[None]:
    """The first signal of `ENDINGS` calls `ask` with its number, the next one raises
    KeyboardInterrupt. Where this is not the main thread, whoever has that handles them; a SIGHUP
    that is ignored (nohup) stays so.
    """
    asked_at: list[float] = []

    def press(number: int, frame: FrameType | None) -> None:
        if not asked_at:
            asked_at.append(time.monotonic())
            ask(number)
        elif number == signal.SIGINT or time.monotonic() - asked_at[0] > ECHO_S:
            interrupt(number)

    ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    numbers = [
        number
        for number in ENDINGS
        if _is_here() and not (number == signal.SIGHUP and ignores_hangup)
    ]
    with _handled(numbers, press):
        yield


def leave_to_leader() -> None:
    """In a process that another one ends when it is time: Ctrl-C, SIGTERM and SIGHUP, which a
    terminal, a service manager or Slurm sends to all, are not heard. What it starts hears SIGTERM
    and SIGHUP, as ever.
    """
    own = os.getpid()

    def pass_over(number: int, frame: FrameType | None) -> None:
        if os.getpid() != own:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, pass_over)
            signal.siginterrupt(number, False)  # no call of a library ends early


@contextlib.contextmanager
def _handled(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _unhandled() -> list[int]:
    return [number for number in ENDINGS if signal.getsignal(number) in (signal.SIG_DFL, _end)]


def _end(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(128 + number)


def _is_here() -> bool:
    return threading.current_thread() is threading.main_thread()
