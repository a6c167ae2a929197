"""The views of a run: live on a terminal, plain lines elsewhere."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.style import Style

from dataflow.display.closing import plain_line, summary_lines
from dataflow.display.formatting import ASCII, UNICODE, Glyphs, clean, known
from dataflow.display.screen import Screen, StyledLine, lines, text_of
from dataflow.display.snapshot import Snapshot, Summary

REFRESH_S = 0.5
REWARDS_KEPT = 2_000
WARNINGS_KEPT = 100

_STYLES = {
    "": Style.null(),
    "title": Style(bold=True),
    "strong": Style(bold=True),
    "dim": Style(dim=True),
    "good": Style(color="green"),
    "hot": Style(color="yellow"),
    "warning": Style(color="yellow"),
    "bad": Style(color="red", bold=True),
    "accent": Style(color="cyan"),
}


class View(Protocol):
    """What the control loop sees of the display."""

    def update(self, snapshot: Snapshot) -> None:
        """Show the run as it is now; cheap, may be called as often as one likes."""

    def message(self, text: str) -> None:
        """Say something that stays on the screen."""

    def summary(self, summary: Summary) -> None:
        """Say how the run ended."""

    def close(self) -> None:
        """Give the terminal back."""


class PlainView:
    """A line at a fixed interval, for logs and pipes."""

    def __init__(
        self, stream: TextIO, interval_s: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream, self._interval_s, self._clock = stream, interval_s, clock
        self._glyphs = glyphs_for(stream)
        self._next_s: float | None = None
        self._said: deque[str] = deque(maxlen=WARNINGS_KEPT)

    def update(self, snapshot: Snapshot) -> None:
        """Write a line when it is due, and each warning once."""
        for warning in snapshot.warnings:
            if warning not in self._said:
                self._said.append(warning)
                self._write([f"warning: {clean(warning)}"])
        now = self._clock()
        if self._next_s is None or now >= self._next_s:
            self._next_s = now + self._interval_s
            self._write([plain_line(snapshot)])

    def message(self, text: str) -> None:
        """Write it."""
        self._write([clean(text)])

    def summary(self, summary: Summary) -> None:
        """Write the closing table."""
        self._write(
            ["", *(text_of(line).rstrip() for line in summary_lines(summary, self._glyphs))]
        )

    def close(self) -> None:
        """Nothing to give back."""

    def _write(self, texts: Iterable[str]) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        whole = "".join(f"{text}\n" for text in texts)
        self._stream.write(whole.encode(encoding, "replace").decode(encoding))
        self._stream.flush()


class PassedOn(PlainView):
    """What is told and what others print, as it is; neither progress nor a summary."""

    def update(self, snapshot: Snapshot) -> None:
        """Nothing."""

    def summary(self, summary: Summary) -> None:
        """Nothing."""

    def message(self, text: str) -> None:
        """Write it."""
        self._write([text])


class LiveView:
    """A screen at the foot of the terminal that shows the run as it is; messages scroll past above
    it."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._glyphs = UNICODE if "utf" in console.encoding.lower() else ASCII
        self._snapshot = Snapshot()
        self._rewards: deque[float] = deque(maxlen=REWARDS_KEPT)
        self._rewarded_step: int | None = None
        self._next_s = float("-inf")
        self._live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            get_renderable=lambda: self._drawn(self._lines()),
        )
        self._live.start()

    def update(self, snapshot: Snapshot) -> None:
        """Take the snapshot; drawn at most every REFRESH_S seconds."""
        self._snapshot = snapshot
        reward = known(snapshot.reward)
        if reward is not None and snapshot.step != self._rewarded_step:
            self._rewarded_step = snapshot.step
            self._rewards.append(reward)
        now = self._clock()
        if now >= self._next_s:
            self._next_s = now + REFRESH_S
            self._live.refresh()

    def message(self, text: str) -> None:
        """Print it above the screen, with the time."""
        said: StyledLine = [(time.strftime("%H:%M:%S  "), "dim"), (clean(text), "")]
        self._console.print(self._drawn([said]), soft_wrap=True)

    def summary(self, summary: Summary) -> None:
        """Take the screen away and print the closing table."""
        self._live.stop()
        found = summary_lines(summary, self._glyphs, self._console.size.width)
        self._console.print(self._drawn([[], *found]), soft_wrap=True)

    def close(self) -> None:
        """Take the screen away and give the cursor back."""
        self._live.stop()

    def _drawn(self, found: list[StyledLine]) -> "_Lines":
        return _Lines(found, self._console.encoding)

    def _lines(self) -> list[StyledLine]:
        width, height = self._console.size
        screen = Screen(width=width - 1, height=max(height - 3, 1), glyphs=self._glyphs)
        return lines(self._snapshot, self._rewards, screen)


class _Lines:
    """Lines as rich draws them, without its costly wrapping; signs it cannot show become question
    marks."""

    def __init__(self, found: list[StyledLine], encoding: str) -> None:
        self._found, self._encoding = found, encoding

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        end = Segment.line()
        for line in self._found:
            for text, style in line:
                shown = text.encode(self._encoding, "replace").decode(self._encoding)
                yield Segment(shown, _STYLES[style])
            yield end


def glyphs_for(stream: TextIO) -> Glyphs:
    """The signs that a stream can carry."""
    return UNICODE if "utf" in (getattr(stream, "encoding", None) or "").lower() else ASCII
