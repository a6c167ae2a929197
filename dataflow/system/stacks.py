"""Where every thread of this process is, as plain values; for a thread that answers while the
others are stuck.
"""

import sys
import sysconfig
import threading
from dataclasses import dataclass
from typing import Any

MOST_FRAMES = 60
"""Of one thread, the innermost ones."""
_NOT_OWN = (
    "site-packages",
    "dist-packages",
    "<frozen",
    *filter(None, [sysconfig.get_path("stdlib")]),
)


@dataclass(frozen=True, kw_only=True)
class StackFrame:
    """A line of a stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, kw_only=True)
class Thread:
    """A thread and where it is, innermost frame last."""

    name: str
    frames: tuple[StackFrame, ...] = ()


def take() -> list[dict[str, Any]]:
    """[{"name", "frames": [[file, line, function], ...]}]; the innermost frame last, the calling
    thread left out.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        frames: list[list[Any]] = []
        at: Any = frame
        while at is not None and len(frames) < MOST_FRAMES:
            frames.append([at.f_code.co_filename, at.f_lineno or 0, at.f_code.co_qualname])
            at = at.f_back
        lines.append({"name": names.get(ident, f"thread {ident}"), "frames": frames[::-1]})
    return sorted(lines, key=lambda thread: (thread["name"] != "MainThread", thread["name"]))


def read(plain: list[dict[str, Any]]) -> tuple[Thread, ...]:
    """Threads from what `take` gave."""
    return tuple(
        Thread(
            name=str(thread["name"]),
            frames=tuple(
                StackFrame(file=file, line=int(line), function=name)
                for file, line, name in thread["frames"]
            ),
        )
        for thread in plain
    )


def own(thread: Thread, most: int = 3) -> tuple[StackFrame, ...]:
    """Its innermost frames outside installed packages; where it has none, its innermost ones."""
    ours = [frame for frame in thread.frames if not any(part in frame.file for part in _NOT_OWN)]
    return tuple((ours or list(thread.frames))[-most:])
