"""Turns on devices that several nodes share: at most one of them is awake, which has the devices'
memory.

The turn stands in locks that the kernel keeps, on a file of the run: no message can be lost, a
worker that dies lets go of it once its memory is gone, and one that is stopped keeps it, as it
keeps its memory. All ranks of a worker have the lock of their turn open, so that it goes with the
last of them.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dataflow.errors import DeadlineError
from dataflow.rules import decide
from dataflow.runtime import Runtime
from dataflow.system.byte_locks import ByteLocks

_LOOK_S = 0.01


class Turns:
    """One process's hand in the turns of a group of nodes; replicas of a node are awake together.

    consumes: the other nodes' locks
    produces: `sleep` and `wake` of its runtime; a lock while it is awake, another while it waits
    waits for: nothing, but in `building`; `turn` looks again at its next call
    unblocked by: the end of another node's turn, or of its process
    """

    def __init__(self, path: Path, nodes: Sequence[str], node: str) -> None:
        """path: the file that all processes of these nodes have in common."""
        self.awake = False
        self.waiting = False
        """Whether it waits for its turn."""
        self._nodes, self._node, self._own = nodes, node, nodes.index(node)
        self._others = [number for number in range(len(nodes)) if number != self._own]
        self._locks, self._turn = ByteLocks(path), ByteLocks(path)
        self._asks, self._entry = len(nodes), 2 * len(nodes)

    @property
    def files(self) -> tuple[int, ...]:
        """Files for processes that have memory in its turn to inherit: the turn ends when they have
        ended, or by `turn`.
        """
        return (self._turn.fileno(),)

    @property
    def state(self) -> str:
        """awake, asleep, or `waits` where it waits for its turn."""
        return "awake" if self.awake else "waits" if self.waiting else "asleep"

    @property
    def watches(self) -> bool:
        """Whether the others' locks concern it now, of which no message tells."""
        return self.waiting or self.awake

    def turn(self, runtime: Runtime, *, held_up: bool = False) -> bool:
        """Take the turn or give it up, as is due; whether it did. held_up: it cannot go on,
        whatever work it has.
        """
        wants = runtime.wants_devices() and not held_up
        match decide(awake=self.awake, wants=wants, wanted=self._wanted()):
            case "give":
                self._give(runtime)
                return True
            case "take" if self._take():
                runtime.wake()
                return True
        if not wants and self.waiting:
            self._wait(False)
        return False

    @contextlib.contextmanager
    def building(
        self, wait_s: float, clock: Callable[[], float] = time.monotonic
    ) -> Iterator[None]:
        """Hold the turn while the runtime is made. DeadlineError where another node has it for so
        long.
        """
        deadline = clock() + wait_s
        while not self._take():
            if clock() > deadline:
                raise DeadlineError(
                    f"'{self._node}' waited {wait_s:.0f} s for its turn on devices that it shares"
                    f" with {[self._nodes[number] for number in self._others]}, to be built; one of"
                    " them had it all the time: look at its log, or raise Limits.start_s above"
                    " what one of its turns takes"
                )
            time.sleep(_LOOK_S)
        yield

    def built(self, runtime: Runtime) -> None:
        """The end of `building`: it sleeps until it has work."""
        self._give(runtime)

    def close(self) -> None:
        """Take part no more; the turn is over when nobody has its file open."""
        self._locks.close()
        self._turn.close()
        self.awake = self.waiting = False

    def _give(self, runtime: Runtime) -> None:
        runtime.sleep()
        self.awake = False
        self._turn.drop(self._own)

    def _wanted(self) -> bool:
        return self.awake and any(
            self._locks.is_taken(self._asks + number) for number in self._others
        )

    def _take(self) -> bool:
        """Under a lock that one process at a time holds: look that nobody else is awake, and be
        it.
        """
        if not self.waiting:
            self._wait(True)
        if not self._locks.take(self._entry, alone=True):
            return False
        try:
            if any(self._locks.is_taken(number) for number in self._others):
                return False
            self.awake = self._turn.take(self._own, alone=False)
        finally:
            self._locks.drop(self._entry)
        if self.awake:
            self._wait(False)
        return self.awake

    def _wait(self, waits: bool) -> None:
        self.waiting = waits
        if waits:
            self._locks.take(self._asks + self._own, alone=False)
        else:
            self._locks.drop(self._asks + self._own)
