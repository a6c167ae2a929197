"""A terminal or a pipe that nobody reads: whoever shows something there goes on, and comes to an
end.
"""

import contextlib
import os
import pty
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import pytest

from dataflow.display import PlainView, SafeView, Snapshot, Summary, make_view, showing
from dataflow.display.views import Direct, direct

pytestmark = pytest.mark.timeout(60)


ROOT = Path(__file__).parents[3]


@dataclass
class Unread:
    """Both ends; the one to write to takes nothing more."""

    stream: TextIO
    reads: int

    def read_until(self, found: bytes) -> bytes:
        """All that is there until something has come."""
        text = b""
        while found not in text:
            assert select.select([self.reads], [], [], 30.0)[0], text
            text += os.read(self.reads, 1 << 16)
        return text


def filled(descriptor: int) -> None:
    os.set_blocking(descriptor, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(descriptor, b"x" * 512)
    os.set_blocking(descriptor, True)


@pytest.fixture(params=["terminal", "pipe"])
def unread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Unread]:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    reads, writes = pty.openpty() if request.param == "terminal" else os.pipe()
    filled(writes)
    stream = os.fdopen(writes, "w")
    yield Unread(stream, reads)
    with contextlib.suppress(OSError):  # what is still to be written comes to nobody
        os.close(reads)
    stream.close()


def test_who_shows_something_to_nobody_goes_on_and_the_newest_state_is_what_is_seen_later(
    unread: Unread,
) -> None:
    with make_view(unread.stream, interval_s=0.0) as view:
        for step in range(20_000):
            view.update(Snapshot(step=step))
        view.message("the first of all words")
        seen = unread.read_until(b"the first of all words")
    assert seen.count(b"step") < 20, "states that are past are not shown"


def test_a_view_is_closed_though_nobody_reads(unread: Unread) -> None:
    way = direct(unread.stream)
    assert isinstance(way, Direct)
    with SafeView([lambda: PlainView(way)], end_s=0.05) as view:
        view.message("the last word")
    unread.read_until(b"the last word")


def test_what_is_printed_meanwhile_waits_for_nobody_either(
    unread: Unread, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, unread.stream)
    with showing(unread.stream, quiet=not unread.stream.isatty()):
        for count in range(100):
            print(f"warning {count}", file=sys.stderr)
        unread.read_until(b"warning 99")
    assert sys.stderr is unread.stream


def test_a_quiet_run_tells_what_goes_wrong_on_standard_error_and_nothing_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with showing(sys.stdout, quiet=True) as view:
        view.update(Snapshot(step=3))
        view.message("tracker 'wandb' died")
        print("a warning", file=sys.stderr)
        view.summary(Summary(graph="aipo"))
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.splitlines() == ["tracker 'wandb' died", "a warning"]


def test_messages_that_nobody_reads_are_bounded_and_the_newest_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dataflow.display.views.MESSAGES_KEPT", 3)
    goes_on, said = threading.Event(), list[str]()

    class Slow(PlainView):
        def message(self, text: str) -> None:
            goes_on.wait(30.0)
            said.append(text)

    with SafeView([lambda: Slow(sys.stderr)]) as view:
        for count in range(100):
            view.message(str(count))
        goes_on.set()
    assert said[-3:] == ["97", "98", "99"] and len(said) <= 4


PROGRAM = """
import sys
from dataflow.display import make_view, say, Snapshot, Summary
import dataflow.display.views
with make_view(sys.stdout) as view:
    view._end_s = 0.1
    view.update(Snapshot(step=1))
    view.summary(Summary(graph="mine"))
dataflow.display.views.for_a_while.__defaults__ = (0.1,)
say("an error", sys.stderr)
sys.exit(7)
"""


@pytest.mark.parametrize("made", [pty.openpty, os.pipe])
def test_a_process_ends_with_its_own_status_though_nobody_reads_what_it_says(
    made: Callable[[], tuple[int, int]],
) -> None:
    reads, writes = made()
    filled(writes)
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | {
        "TERM": "xterm"
    }
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, stdout=writes, stderr=writes, env=environment
    ) as process:
        assert process.wait(50) == 7
    os.close(reads)
    os.close(writes)
