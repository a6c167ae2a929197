"""The trainer's ends of its weight planes: what goes out after a step, and to whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dataflow.runtime import Context
from dataflow.weight_ends import WeightsOut
from operators.training.learner.learner import Learner, StepOutcome

_FIGURES = {
    "committed_seconds": "weights_trainer_seconds",
    "taken_seconds": "weights_reader_seconds",
    "nbytes": "weights_moved_bytes",
    "full_bytes": "weights_full_bytes",
}
MOST_PAIRS = 1024
"""Pairs of ranks of which a line of metrics tells one by one."""


class Offers:
    """Offers the weights of every step, and to readers that are refreshed the versions that they
    get.

    consumes: the learner's weights, and what it keeps in `Learner.refreshed`, in the order of
        `Context.weights.refreshers`
    produces: versions on each weight plane, and the same note on all of them
    waits for: what an end's `publish` waits for
    unblocked by: readers
    """

    def __init__(self, context: Context, learner: Learner) -> None:
        """Open every end; of a learner of one rank, that rank's."""
        self._context, self._learner = context, learner
        self._traffic = (0, 0)
        self._newest: WeightsOut | None = None
        if context.weights.writer is not None:
            self._newest = context.weights.writer(_detached(learner.offered(0)))
        self._refreshing = [
            (line, refresh, opens(_detached(learner.offered(line))))
            for line, (refresh, opens) in enumerate(context.weights.refreshers.items(), 1)
        ]
        opened = {} if self._newest is None else {0: self._newest}
        learner.writers = (
            opened | {line: end for line, _, end in self._refreshing} | learner.writers
        )

    @property
    def ends(self) -> list[WeightsOut]:
        """All of them."""
        return [
            end
            for end in (self._newest, *(end for _, _, end in self._refreshing))
            if end is not None
        ]

    @property
    def is_pending(self) -> bool:
        """Whether some version is still to be copied out of the learner's tensors."""
        return any(getattr(end, "pending", None) is not None for end in self.ends)

    def look_at(self, outcome: StepOutcome, step: int) -> None:
        """Tell of readers that a step has waited for and given up."""
        if not outcome.settled:
            self._context.log.warning(
                "readers had not taken the last version when the weights were to change; they take"
                " a later one",
                node=self._context.node,
                step=step,
                waited_s=round(outcome.settle_s, 1),
            )

    def sent(self) -> dict[str, int]:
        """Bytes of weights sent over links since the last call, by all ranks and to all readers,
        and what deltas saved; nothing where no link carries any.
        """
        traffics = [
            traffic for end in self.ends if (traffic := getattr(end, "traffic", None)) is not None
        ]
        if not traffics:
            return {}
        traffic = sum(sent for sent, _ in traffics), sum(whole for _, whole in traffics)
        sent, whole = (now - before for now, before in zip(traffic, self._traffic, strict=True))
        self._traffic = traffic
        return {"weights_sent_bytes": sent, "weights_saved_bytes": whole - sent}

    def by_reader(self) -> dict[str, dict[str, Any]]:
        """By reader: the newest version that it has taken, its bytes, and what they would have been
        without deltas and quantization; how long the transfer took and at most held one of the
        reader's ranks (s); how long all of it took as the trainer sees it, and from the version's
        arrival as the reader sees it (s); and the bytes from each rank of the trainer to each of
        the reader's, [from][to], up to `MOST_PAIRS`.
        """
        exchanges: dict[str, dict[str, Any]] = {}
        sent_by_reader = (
            (getattr(end, "full_share", 1.0), *item)
            for end in self.ends
            for item in end.sent.items()
        )
        for full_share, reader, sent in sent_by_reader:
            rows = [list(row) for row in sent.pair_bytes]
            exchanges[reader] = {
                "version": sent.version,
                "nbytes": sum(map(sum, rows)),
                "full_bytes": round(sent.whole_bytes * full_share),
                "seconds": sent.seconds,
                "held_seconds": sent.held_s,
                "committed_seconds": sent.committed_s,
                "taken_seconds": sent.taken_s,
            }
            if sum(map(len, rows)) <= MOST_PAIRS:
                exchanges[reader]["pair_bytes"] = rows
        return exchanges

    def exchanged(self) -> dict[str, Any]:
        """`by_reader`, and of its figures those of the reader that had most: seconds as the trainer
        and as the reader sees them, bytes, and what these would have been without deltas and
        quantization; 0 before the first.
        """
        exchanges = self.by_reader()
        if not self.ends:
            return {"weights_sent": exchanges}
        most = {
            name: max((exchange[name] for exchange in exchanges.values()), default=0)
            for name in _FIGURES
        }
        return {"weights_sent": exchanges} | {
            figure: most[name] for name, figure in _FIGURES.items()
        }

    def open(self, step: int) -> None:
        """Offer each reader the version that it has to have after so many steps."""
        for line, refresh, end in self._refreshing:
            if version := refresh.newest(step):
                end.publish(version, _detached(self._learner.offered(line)))
        self._publish(step)

    def made(self, step: int) -> None:
        """Offer the weights of a step, and the versions that are made with it."""
        with self._context.span("offer weights"):
            for line, refresh, end in self._refreshing:
                if refresh.newest(step) == step:
                    end.publish(step, _detached(self._learner.offered(line)))
            self._publish(step)

    def tell(self, note: dict[str, int | float | str]) -> None:
        """A small note that every reader gets; the newest wins."""
        for end in self.ends:
            end.tell(note)

    def poll(self) -> None:
        """Answer the readers; never waits."""
        for end in self.ends:
            end.poll()

    def waits(self) -> Sequence[Any]:
        """The sockets of the weight planes, where they have some."""
        sockets = [getattr(end, "socket", None) for end in self.ends]
        return [socket for socket in sockets if socket is not None]

    def close(self) -> None:
        """Leave the weight planes."""
        for end in self.ends:
            close = getattr(end, "close", None)
            if close is not None:
                close()

    def _publish(self, step: int) -> None:
        if self._newest is not None:
            self._newest.publish(step, _detached(self._learner.offered(0)))


def _detached(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tensor.detach() for name, tensor in tensors.items()}
