"""The views of a run: live on a terminal, plain lines elsewhere."""

import contextlib
import io
import os
import queue
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Self, TextIO, TypeAlias

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.style import Style

from dataflow.display.formatting import (
    ASCII,
    UNICODE,
    Glyphs,
    age,
    clean,
    count,
    duration,
    known,
    rate,
    score,
    several,
    size_of,
)
from dataflow.display.screen import Screen, Snapshot, StyledLine, Summary, lines, text_of

# Text to a terminal, a pipe or a file, through nothing that somebody else could wait for.

END_S = 5.0
"""Seconds for a reader to take the last of what is shown."""


class Direct(io.TextIOBase):
    """Writes to a stream's descriptor. A write may take for ever, but it holds no lock meanwhile: a
    stream's own is taken by the interpreter at its end.
    """

    def __init__(self, stream: TextIO) -> None:
        """Errors: as the stream's `fileno`."""
        self._descriptor, self._encoding = stream.fileno(), stream.encoding
        if select.select([], [self._descriptor], [], 0)[1]:
            stream.flush()  # what was printed before

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The stream's."""
        return self._encoding

    def fileno(self) -> int:
        """The stream's."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self._descriptor)

    def write(self, text: str) -> int:
        """Write all of it."""
        remaining = memoryview(text.encode(self._encoding, "replace"))
        while remaining:
            try:
                remaining = remaining[os.write(self._descriptor, remaining) :]
            except BlockingIOError:  # a descriptor that somebody has set so
                select.select([], [self._descriptor], [], 1.0)
        return len(text)


def direct(stream: TextIO) -> TextIO:
    """The way around a stream of the interpreter's own; any other stream as it is."""
    if type(stream) is not io.TextIOWrapper:
        return stream
    try:
        return Direct(stream)  # type: ignore[return-value]
    except (OSError, ValueError):  # no descriptor behind it, or a closed one
        return stream


def for_a_while(act: Callable[[], object], end_s: float = END_S) -> None:
    """Do what may take for ever, and wait `end_s` for it at most; its errors are dropped."""

    def run() -> None:
        try:
            act()
        except Exception:
            return

    thread = threading.Thread(target=run, name="aside", daemon=True)
    thread.start()
    thread.join(end_s)


# The summary of a run as lines of styled text, and the one line that a plain display writes now
# and then.

_FAULTS, _CHANGES = 5, 12
"""The last so many are shown."""


def plain_line(snapshot: Snapshot) -> str:
    """The run on one line of ASCII: `step 40/300  reward 0.42  ...`; what is not known is left
    out.
    """
    steps = f"/{count(snapshot.steps)}" if known(snapshot.steps) is not None else ""
    facts = [f"step {count(snapshot.step, '0')}{steps}"]
    if snapshot.doing:
        facts.append(clean(snapshot.doing))
    if known(snapshot.reward) is not None:
        facts.append(f"reward {score(snapshot.reward)}")
    if known(snapshot.accuracy) is not None:
        facts.append(f"eval {score(snapshot.accuracy)}")
    if known(snapshot.staleness_mean) is not None:
        bound = (
            f"/{age(snapshot.staleness_bound)}"
            if known(snapshot.staleness_bound) is not None
            else ""
        )
        facts.append(f"staleness {age(snapshot.staleness_mean)}{bound}")
    if known(snapshot.rollouts_per_s) is not None and not snapshot.only_begun:
        facts.append(f"{rate(snapshot.rollouts_per_s)} rollouts/s")
    if known(snapshot.rollouts_active):
        facts.append(f"{count(snapshot.rollouts_active)} rollouts under way")
    if known(snapshot.tokens_per_s) is not None:
        facts.append(f"{rate(snapshot.tokens_per_s)} tokens/s")
    facts += [
        several(node.name, node.replicas, ASCII)
        for node in snapshot.nodes
        if (known(node.replicas) or 1) > 1
    ]
    times = f"{duration(snapshot.elapsed_s, '0:00')} elapsed"
    if known(snapshot.left_s) is not None:
        times += f", {duration(snapshot.left_s)} left"
    return "  ".join([*facts, times])


def summary_lines(summary: Summary, glyphs: Glyphs, width: int | None = None) -> list[StyledLine]:
    """The closing table, the run folder and the commands that look further, for a screen of `width`
    cells.
    """
    style = (
        "good"
        if summary.outcome == "finished"
        else "bad"
        if summary.outcome == "failed"
        else "warning"
    )
    head: StyledLine = [
        (clean(summary.graph) or "run", "title"),
        (" ", ""),
        (clean(summary.outcome), style),
    ]
    if known(summary.steps) is not None:
        steps = f"{count(summary.steps)} step{'s' if summary.steps != 1 else ''}"
        head.append((f"  {steps} in {duration(summary.wall_s, glyphs.dash)}", ""))
    rows: list[tuple[str, str, str]] = []

    def change(name: str, before: float | None, after: float | None, over: str = "") -> None:
        start, end = known(before), known(after)
        if start is not None and end is not None:
            rows.append(
                (name, f"{score(start)} {glyphs.arrow} {score(end)}", f"{end - start:+.2f}{over}")
            )
        elif start is not None or end is not None:
            rows.append((name, score(end if end is not None else start), ""))

    change("accuracy", summary.accuracy_before, summary.accuracy_after)
    window = (
        f", means of {count(summary.reward_steps)} steps"
        if (known(summary.reward_steps) or 0) > 1
        else ""
    )
    change("reward", summary.reward_before, summary.reward_after, window)
    if known(summary.rollouts) is not None:
        wall = known(summary.wall_s)
        per_s = f"{rate((known(summary.rollouts) or 0) / wall)} per second" if wall else ""
        rows.append(("rollouts", f"{summary.rollouts:,.0f}", per_s))
    if known(summary.dropped):
        rows.append(("dropped", f"{count(summary.dropped)} groups", ""))
    for name, counts in (("failed", summary.failed), ("no value", summary.does_not_apply)):
        if counts:
            rows.append((name, clean(counts), ""))
    if known(summary.efficiency) is not None:
        bound = f"bounded by {clean(summary.bounded_by)}" if summary.bounded_by else ""
        rows.append(("efficiency", score(summary.efficiency), bound))
    if known(summary.staleness_mean) is not None or known(summary.staleness_max) is not None:
        mean, most = (
            age(summary.staleness_mean, glyphs.dash),
            age(summary.staleness_max, glyphs.dash),
        )
        rows.append(("staleness", f"{mean} mean, {most} max", ""))
    if known(summary.restarts):
        rows.append(("restarts", count(summary.restarts), "see faults.jsonl"))
    faults, changes = summary.faults[-_FAULTS:], summary.changes[-_CHANGES:]
    more = len(summary.faults) - len(faults), len(summary.changes) - len(changes)
    verdict = "" if summary.is_clean is None else "good" if summary.is_clean else "bad"
    size = f"  {size_of(summary.folder_bytes)}" if known(summary.folder_bytes) is not None else ""
    not_kept = f", {clean(summary.not_kept)}" if summary.not_kept else ""
    facts = [
        *((name, value, "strong", f"  {note}" if note else "") for name, value, note in rows),
        *(("foreseen", text, "", "") for text in summary.foreseen),
        *(("faults", text, "", "") for text in faults),
        ("faults", f"and {more[0]} before these" if more[0] else "", "dim", ""),
        *((verb, text, "", "") for verb, text in changes),
        (
            changes[-1][0] if changes else "",
            f"after {more[1]} other changes" if more[1] else "",
            "dim",
            "",
        ),
        ("hosts", summary.hosts, "", ""),
        ("signal", summary.signal, "bad", ""),
        ("ledger", summary.verdict, verdict, ""),
        *(
            ("model", text, "strong", "  trained, as Hugging Face has them")
            for text in summary.models
        ),
        ("run folder", summary.folder, "", f"{size}{not_kept}"),
    ]
    lines, before = [head], ""
    for name, text, style, note in facts:
        if text:
            label = "" if name == before else name
            noted = [(note, "dim")] if note else []
            lines.append([(f"  {label:<12}", "dim"), (clean(text), style), *noted])
            before = name
    if summary.commands:
        commands = [(clean(command), clean(shows)) for command, shows in summary.commands]
        longest = max(len(command) for command, _ in commands)
        fits = width is None or longest + 4 + max(len(shows) for _, shows in commands) < width
        lines += [[], [("to look further", "dim")]]
        for command, shows in commands:
            # Where both do not fit side by side the command stands alone, to be copied whole.
            note_pieces = [(f"  {shows}", "dim")] if fits else []
            lines.append([(f"  {command:<{longest if fits else 0}}", "accent"), *note_pieces])
    return lines


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
    """Passes on messages and others' output unchanged; neither progress nor a summary."""

    def update(self, snapshot: Snapshot) -> None:
        """Nothing."""

    def summary(self, summary: Summary) -> None:
        """Nothing."""

    def message(self, text: str) -> None:
        """Write it."""
        self._write([text])


class LiveView:
    """A screen at the foot of the terminal that shows the run as it is; messages scroll past above
    it.
    """

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
        """Take the snapshot, as often as one likes; drawn at most every REFRESH_S seconds."""
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
        line: StyledLine = [(time.strftime("%H:%M:%S  "), "dim"), (clean(text), "")]
        self._console.print(self._drawn([line]), soft_wrap=True)

    def summary(self, summary: Summary) -> None:
        """Take the screen away and print the closing table."""
        self._live.stop()
        lines = summary_lines(summary, self._glyphs, self._console.size.width)
        self._console.print(self._drawn([[], *lines]), soft_wrap=True)

    def close(self) -> None:
        """Take the screen away and give the cursor back."""
        self._live.stop()

    def _drawn(self, lines: list[StyledLine]) -> "_Lines":
        return _Lines(lines, self._console.encoding)

    def _lines(self) -> list[StyledLine]:
        width, height = self._console.size
        screen = Screen(width=width - 1, height=max(height - 3, 1), glyphs=self._glyphs)
        return lines(self._snapshot, self._rewards, screen)


class _Lines:
    """Lines as rich draws them, without its costly wrapping; signs it cannot show become question
    marks.
    """

    def __init__(self, lines: list[StyledLine], encoding: str) -> None:
        self._found, self._encoding = lines, encoding

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        end = Segment.line()
        for line in self._found:
            for text, style in line:
                shown = text.encode(self._encoding, "replace").decode(self._encoding)
                yield Segment(shown, _STYLES[style])
            yield end


View: TypeAlias = PlainView | LiveView


def glyphs_for(stream: TextIO) -> Glyphs:
    """The signs that a stream can carry."""
    return UNICODE if "utf" in (getattr(stream, "encoding", None) or "").lower() else ASCII


# A view in a thread of its own: a terminal that stops reading delays nobody.

MESSAGES_KEPT = 10_000
"""Unread messages that are held; the oldest are dropped."""


_LOOK_S = 10.0
"""Seconds after which it looks by itself for something to show."""


class SafeView:
    """A view that never raises into a run and never holds it up.

    consumes: snapshots, of which the newest counts; messages and the summary, in their order
    produces: what its view draws; where one view fails the next takes its place, at last none
    waits for: the terminal, in its thread; whoever closes it waits so long as was said, for the
        last to be drawn
    unblocked by: whoever reads the terminal
    """

    def __init__(self, makers: Iterable[Callable[[], View]], end_s: float = END_S) -> None:
        """makers: of the views, the best one first. end_s: for the last to be drawn."""
        self._makers, self._end_s = list(makers), end_s
        self._view: View | None = None
        self._snapshot: Snapshot | None = None
        self._acts: deque[Callable[[View], None]] = deque(maxlen=MESSAGES_KEPT)
        # a signal handler may put into it at any time
        self._wakes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """Whether there is more to come."""
        self._thread: threading.Thread | None = None
        if self._makers:
            self._thread = threading.Thread(target=self._show, name="view", daemon=True)
            self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def update(self, snapshot: Snapshot) -> None:
        """Show the run as it is now."""
        self._snapshot = snapshot
        self._wake()

    def message(self, text: str) -> None:
        """Say something that stays on the screen."""
        self._later(lambda view: view.message(text))

    def summary(self, summary: Summary) -> None:
        """Say how the run ended."""
        self._later(lambda view: view.summary(summary))

    def close(self) -> None:
        """Give the terminal back, if it takes it in time; may be called twice."""
        if self._thread is not None:
            self._wakes.put(False)
            self._thread.join(self._end_s)

    def _later(self, act: Callable[[View], None]) -> None:
        if self._thread is not None:
            self._acts.append(act)
            self._wake()

    def _wake(self) -> None:
        if self._wakes.empty():
            self._wakes.put(True)

    def _show(self) -> None:
        """The thread."""
        # stty tostop: jobs in the background may not write
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        self._next()
        goes_on = True
        while goes_on:
            with contextlib.suppress(queue.Empty):
                goes_on = self._wakes.get(timeout=_LOOK_S)
            snapshot, self._snapshot = self._snapshot, None
            if snapshot is not None:
                self._act(lambda view: view.update(snapshot))  # noqa: B023
            while self._acts:
                self._act(self._acts.popleft())
        self._act(lambda view: view.close())

    def _act(self, act: Callable[[View], None]) -> None:
        while self._view is not None:
            try:
                act(self._view)
                return
            except Exception:
                # A display is no reason to end a run: fall back to a simpler one and try again.
                with contextlib.suppress(Exception):
                    self._view.close()
                self._next()

    def _next(self) -> None:
        self._view = None
        while self._makers and self._view is None:
            with contextlib.suppress(Exception):
                self._view = self._makers.pop(0)()


class _LinesToView:
    """Stands for a stream: each line is a message of a view, and nothing is waited for."""

    def __init__(self, view: SafeView, stream: TextIO) -> None:
        self._view, self._stream, self._begun = view, stream, ""

    def write(self, text: str) -> int:
        """Keep text until its line is whole."""
        *lines, self._begun = (self._begun + text).split("\n")
        for line in filter(str.strip, lines):
            self._view.message(line)
        return len(text)

    def flush(self) -> None:
        """Pass on what is not yet a whole line."""
        if self._begun:
            self.write("\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def told_by(view: SafeView, *names: str) -> Iterator[None]:
    """What this process prints meanwhile to `sys.stdout` or `sys.stderr`, as named, are messages of
    the view.
    """
    before = {name: getattr(sys, name) for name in names}
    for name, stream in before.items():
        setattr(sys, name, _LinesToView(view, stream))
    try:
        yield
    finally:
        for name, stream in before.items():
            getattr(sys, name).flush()
            setattr(sys, name, stream)
