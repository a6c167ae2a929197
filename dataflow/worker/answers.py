"""Inlets of what a runtime asked for itself: its own as soon as it has come, and acknowledged
there.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from dataflow.errors import boundary
from dataflow.runtime import Batch, Runtime


class AnswerInlet(Protocol):
    """As `loop.Inlet`, as far as it is needed here."""

    def receive(self, timeout_s: float = 0.0) -> Any | None:
        """A delivery, or None."""

    def poll(self) -> None:
        """Take in what arrived, answer the senders."""

    def flush(self) -> None:
        """Answer the senders."""


class AnswerInlets:
    """Those of one node, each with its source and the node that answers.

    consumes: answers, also while what the node sends waits for credit: who answers may wait for
        that of its answers
    produces: batches to the runtime, acknowledgements
    waits for: nothing
    unblocked by: -
    """

    def __init__(self, node: str, inlets: Sequence[tuple[str, str, AnswerInlet]]) -> None:
        self._node, self._inlets = node, inlets
        self.ends = [inlet for _, _, inlet in inlets]

    def hear(self, runtime: Runtime | None) -> bool:
        """Give what has come to the runtime; None: it has ended, and wants no more. True when there
        was something.
        """
        moved = False
        for source, origin, inlet in self._inlets:
            while (delivery := inlet.receive()) is not None:
                moved = True
                if runtime is not None:
                    with boundary(self._node, f"taking answers from '{origin}'"):
                        runtime.push(Batch(source, delivery.batch, origin))
                delivery.ack()
            inlet.flush()
        return moved
