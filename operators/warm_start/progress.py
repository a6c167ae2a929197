"""How a warm start is shown: a bar on a terminal, a line per tenth of the way elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dataflow.system.messages import Codec, Message


class Progress(Message):
    """From the process that trains: so many steps are done."""

    step: int
    loss: float


CODEC = Codec("warm-start", 1, Progress)

Report = Callable[[int, float], None]
"""Called after every step with the number of steps done and that step's loss (nats per answer
token)."""


@contextmanager
def shown(title: str, steps: int) -> Iterator[Report]:
    """Give a report function that shows progress on stderr until the block ends."""
    if sys.stderr.isatty():
        with _bar(title, steps) as report:
            yield report
    else:
        yield _lines(title, steps)


def _lines(title: str, steps: int) -> Report:
    marks = {max(1, round(steps * tenth / 10)) for tenth in range(1, 11)}

    def report(step: int, loss: float) -> None:
        if step in marks:
            print(f"{title}: step {step}/{steps}, loss {loss:.3f}", file=sys.stderr, flush=True)

    return report


@contextmanager
def _bar(title: str, steps: int) -> Iterator[Report]:
    from rich import progress as bars
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("step {task.completed:.0f}/{task.total:.0f}  loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=steps, loss=float("nan"))

        def report(step: int, loss: float) -> None:
            progress.update(task, completed=step, loss=loss)

        yield report
