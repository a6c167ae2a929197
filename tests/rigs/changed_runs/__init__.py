"""A run of fakes that somebody changes while it goes on: its trainer waits at a step until that has
been asked for.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dataflow import Result, inline, run
from dataflow.folder.run_folder import RunFolder
from dataflow.limits import Limits
from dataflow.runtime import Batch, Runtime
from dataflow.testing import FakePrompts, FakeTrainer
from rigs.graphs import Scorer, fake_graph, reward
from rigs.machine import wait_until
from rigs.operators import Around, wrapped

STEP = 3
"""At which the trainer waits."""

Ask = Callable[[RunFolder, Callable[[], None]], None]
"""What is done at that step: with the run's folder, and with what lets the trainer go on before it
is over."""


class _Waiting(Around):
    """Makes no step after the third until something has come about; hears what is said
    meanwhile.
    """

    def __init__(self, inner: Runtime, until: Callable[[], bool]) -> None:
        super().__init__(inner)
        self._until = until

    def work(self) -> list[Batch] | None:
        return None if self._waits() else super().work()

    def pending(self) -> int:
        return super().pending() + self._waits()

    def _waits(self) -> bool:
        return int(self.status()["step"]) == STEP and not self._until()


def changed_run(
    ask: Ask, trainer: FakeTrainer, folder: Path, steps: int, scorer: Scorer = reward
) -> Result:
    """So many steps, in `folder`/runs; what `ask` raises is raised here."""
    go_on, runs, failed = folder / "go-on", folder / "runs", list[BaseException]()

    def asking() -> None:
        try:
            wait_until(
                lambda: any(runs.glob(f"latest/rollouts/step-*{STEP}.arrow")), 30.0, f"step {STEP}"
            )
            ask(RunFolder.open((runs / "latest").resolve()), go_on.touch)
        except BaseException as error:
            failed.append(error)
        finally:
            go_on.touch()

    def waiting(inner: Any) -> Runtime:
        return _Waiting(inner, go_on.exists)

    thread = threading.Thread(target=asking, daemon=True)
    thread.start()
    graph = fake_graph(
        trainer=wrapped(trainer, waiting), source=FakePrompts(size=None), scorers=(scorer,)
    )
    result = run(graph, runs=runs, quiet=True, steps=steps, limits=Limits(stop_s=2.0))
    thread.join(60)
    if failed:
        raise failed[0]
    return result


def resumed(result: Result, trainer: FakeTrainer, steps: int, scorer: Scorer = reward) -> Result:
    """It goes on, in one process, with the graph as it was declared."""
    graph = fake_graph(trainer=trainer, source=FakePrompts(size=None), scorers=(scorer,))
    return run(graph, on=inline(), resume=result.folder, quiet=True, steps=steps)


def rewards(result: Result, step: int) -> set[float]:
    """Those of the rows of a step."""
    return set(RunFolder.open(result.folder).rollouts_of().read(step).column("reward").to_pylist())
