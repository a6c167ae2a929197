"""Rank 0's learner: it deals out each step, and the learners of the other ranks do with it what it
does.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dataflow.errors import RunError
from dataflow.records import AnyArray
from dataflow.system.messages import Message, Plain, Secret
from dataflow.tokens.ragged import gather
from dataflow.weight_ends import OpensWriter, SentVersion, WeightSite, WeightsOut
from operators.ranks import group
from operators.ranks.team import Exchange, codec_of
from operators.training.learner import memory
from operators.training.learner.learner import Learner, MicroBatch, Prepared, StepOutcome
from operators.training.learner.rows import StepRows, by_temperature, cost
from operators.training.learner.together import NotFinite
from operators.training.parallel.mesh import MeshTogether, TrainerMesh, data_rank, placed

# From rank 0


class Join(Message):
    """Meet the other ranks in this folder."""

    folder: str


class BeginStep(Message):
    """A step on the weights that have this version."""

    version: int


class Share(Message):
    """What a data rank computes of a part of the step; a micro-batch is as many of the rows as
    `counts` says, one after the other.
    """

    rows: StepRows
    counts: tuple[int, ...]

    def kept(self, learner: Learner) -> list[MicroBatch]:
        """Its micro-batches, for the learner of one of its ranks."""
        part = learner.keep(self.rows)
        return [MicroBatch(part, rollouts) for rollouts in in_order(self.counts)]


class ShareAlike(Message):
    """Compute what the first of your ranks along "tp" does, which hands its share on."""


class Micro(Message):
    """Compute the next micro-batch."""


class EndStep(Message):
    """Update the weights."""

    learning_rate: float
    divisor: int
    """As `Learner.divisor`."""


class Open(Secret):
    """Open your end of a weight plane at these sites."""

    line: int
    """Which, by `Learner.offered`."""
    sites: tuple[WeightSite, ...]
    """As `OpensWriter.sites`; keys of the run may stand there."""


class Publish(Message):
    """Offer your shards of this version on a weight plane."""

    line: int
    version: int


class CallFunction(Message):
    """Call a function; all ranks are forks of one process, and have it."""

    function: str
    """By `name_of`."""
    paths: Mapping[str, str]
    values: Mapping[str, Plain]

    @classmethod
    def of(cls, function: Callable[..., Any], arguments: Mapping[str, Any]) -> CallFunction:
        """The call of a module's function with plain values and paths."""
        paths = {name: str(value) for name, value in arguments.items() if isinstance(value, Path)}
        return cls(
            name_of(function),
            paths,
            {name: value for name, value in arguments.items() if name not in paths},
        )

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments again."""
        return {**self.values, **{name: Path(value) for name, value in self.paths.items()}}


# From the others


class CallResult(Message):
    """What the function returned."""

    value: Plain


CODEC = codec_of(
    "trainer-ranks",
    Join,
    BeginStep,
    Share,
    ShareAlike,
    Micro,
    EndStep,
    Open,
    Publish,
    CallFunction,
    NotFinite,
    CallResult,
)


def chosen(rows: StepRows, rollouts: AnyArray) -> StepRows:
    """Some of the rollouts, in that order."""
    positions, offsets = gather(rows.offsets, rollouts)
    return StepRows(
        tokens=rows.tokens.take(positions),
        offsets=offsets,
        cuts_S=rows.cuts_S[positions],
        groups_R=rows.groups_R[rollouts],
        rollout_ids_R=rows.rollout_ids_R[rollouts],
        oldest_R=rows.oldest_R[rollouts],
        columns_R={name: values[rollouts] for name, values in rows.columns_R.items()},
        columns_S={name: values[positions] for name, values in rows.columns_S.items()},
    )


def name_of(function: Callable[..., Any]) -> str:
    """Where other ranks, which are forks of this process, find a module's function."""
    return f"{function.__module__}:{function.__qualname__}"


def function_of(name: str) -> Callable[..., Any]:
    """That function again."""
    module, _, path = name.partition(":")
    target: Any = importlib.import_module(module)
    for attribute in path.split("."):
        target = getattr(target, attribute)
    return target  # type: ignore[no-any-return]


# Deals the rollouts of a step out to ranks, in as many micro-batches on each, of like size: pure
# functions.

FINENESS = (1, 2, 4)
"""Into what part of an even share groups are cut: the coarsest of those that let a step be over
soonest. A finer cut computes common prefixes more often."""


@dataclass(frozen=True)
class DealtRollouts:
    """Rollouts that stay together."""

    first: int
    last: int
    """Rollouts [first, last)."""
    cost: int
    """Tokens, a common prefix counted once."""


def deal(
    tokens_S: AnyArray,
    offsets: AnyArray,
    groups_R: AnyArray,
    ranks: int,
    limit: int,
    *,
    whole: bool = False,
) -> list[list[AnyArray]]:
    """The micro-batches of each rank: index arrays into R, as many for every rank, some of them
    empty.

    tokens_S: [S]. offsets: [R + 1] into S. groups_R: [R], equal within a group, rows of a group
    side by side. limit: tokens of a micro-batch; a unit above it is one of its own. whole: groups
    are never cut; else those that are larger than an even share of the step are, or than a part of
    it (`FINENESS`).
    """
    groups = units(tokens_S, offsets, groups_R)
    total = sum(unit.cost for unit in groups)
    count = -(-total // (limit * ranks))
    while groups:
        shares = [min(limit, max(1, total // (count * ranks * fine))) for fine in FINENESS]
        cuts = (
            [groups]
            if whole
            else [
                [part for unit in groups for part in pieces(tokens_S, offsets, unit, share, limit)]
                for share in shares
            ]
        )
        dealt = [(cut, spread([unit.cost for unit in cut], ranks, count)) for cut in cuts]
        cut, placed = min(
            dealt, key=lambda candidate: waited([unit.cost for unit in candidate[0]], candidate[1])
        )
        costs = [unit.cost for unit in cut]
        if max(
            sum(costs[number] for number in numbers) for bins in placed for numbers in bins
        ) <= max(limit, *costs):
            return [
                [_rollouts([cut[number] for number in numbers]) for numbers in bins]
                for bins in placed
            ]
        count += 1
    return [[] for _ in range(ranks)]


def units(tokens_S: AnyArray, offsets: AnyArray, groups_R: AnyArray) -> list[DealtRollouts]:
    """The groups, and what each costs."""
    rollouts = len(groups_R)
    starts = np.flatnonzero(np.r_[True, groups_R[1:] != groups_R[:-1]]).tolist() if rollouts else []
    return [
        DealtRollouts(first, last, cost(tokens_S, offsets, first, last))
        for first, last in itertools.pairwise([*starts, rollouts])
    ]


def pieces(
    tokens_S: AnyArray, offsets: AnyArray, unit: DealtRollouts, share: int, limit: int
) -> list[DealtRollouts]:
    """A unit above `share` tokens in as many pieces of neighbouring rollouts, of like size; those
    that are above `limit` in more, where they are not one rollout.
    """
    rollouts = unit.last - unit.first
    count = min(rollouts, -(-unit.cost // share))
    if count <= 1:
        return [unit]
    ends = offsets[unit.first : unit.last + 1] - offsets[unit.first]
    marks = np.searchsorted(ends, np.arange(1, count) * ends[-1] / count).clip(1, rollouts - 1)
    parts = []
    for first, last in itertools.pairwise(
        np.unique([unit.first, *(unit.first + marks), unit.last]).tolist()
    ):
        part = DealtRollouts(first, last, cost(tokens_S, offsets, first, last))
        parts += [part] if part.cost <= limit else pieces(tokens_S, offsets, part, limit, limit)
    return parts


def spread(costs: Sequence[int], ranks: int, count: int) -> list[list[list[int]]]:
    """Numbers of the costs in each of `count` bins of each rank; bins of like load stand at the
    same place.
    """
    bins = sorted(
        fill(costs, ranks * count), key=lambda numbers: -sum(costs[number] for number in numbers)
    )
    return [bins[rank::ranks] for rank in range(ranks)]


def waited(costs: Sequence[int], bins: Sequence[Sequence[Sequence[int]]]) -> int:
    """Tokens that a rank waits for in a whole step: the most at each place, over the places."""
    return sum(
        max(sum(costs[number] for number in numbers) for numbers in at)
        for at in zip(*bins, strict=True)
    )


def fill(costs: Sequence[int], bins: int) -> list[list[int]]:
    """Numbers of the costs in each bin: the largest first, each to the bin that holds least."""
    numbers: list[list[int]] = [[] for _ in range(bins)]
    heap = [(0, number) for number in range(bins)]
    for number in sorted(range(len(costs)), key=lambda at: (-costs[at], at)):
        load, least = heapq.heappop(heap)
        numbers[least].append(number)
        heapq.heappush(heap, (load + costs[number], least))
    return numbers


def _rollouts(together: Sequence[DealtRollouts]) -> AnyArray:
    """Those of some units, in order."""
    parts = [
        np.arange(unit.first, unit.last) for unit in sorted(together, key=lambda unit: unit.first)
    ]
    return np.concatenate([np.zeros(0, np.int64), *parts])


class LedLearner(Learner):
    """A `Learner` of several ranks, for the trainer's runtime on rank 0.

    consumes: the calls of the runtime
    produces: messages to the other ranks; what rank 0's learner returns, of all ranks together
    waits for: the other ranks, in each exchange, up to the group's time-out
    unblocked by: their part of the exchange, their end, or the time-out; after an error every call
        raises
    """

    def __init__(self, own: Learner, exchange: Exchange, mesh: TrainerMesh) -> None:
        """own: rank 0's, its model shared out over `mesh`; it is not used apart from this one any
        more.
        """
        vars(self).update(vars(own))
        self.ranks = mesh.size
        self._exchange, self._mesh = exchange, mesh
        self._tensor_parallel = mesh["tp"].size()
        self._steps = 0

    @property
    def data_ranks(self) -> int:
        """Ranks that compute rollouts of their own."""
        return self.ranks // self._tensor_parallel

    def open(self, version: int) -> None:
        """Start a step on every rank."""
        self._steps += 1
        with self._exchange.together(f"the beginning of step {self._steps}"):
            self._exchange.check()
            self._exchange.tell(BeginStep(version))
            super().open(version)

    def add(self, rows: StepRows) -> list[MicroBatch]:
        """Deal rows of the step out; rank 0's micro-batches, of which every rank has as many, some
        of them empty.
        """
        shares = dealt(
            self.prepare(rows), self.data_ranks, self.micro_batch_tokens, self.needs_groups
        )
        with self._exchange.together(f"rows of step {self._steps}"):
            self._exchange.team.deal(addressed(shares, self._tensor_parallel))
            handed_on(shares[0], self._mesh)
        return shares[0].kept(self)

    def micro(self, batch: MicroBatch) -> None:
        """Forward and backward of one micro-batch on every rank."""
        with self._exchange.together(f"micro-batch {self._micros + 1} of step {self._steps}"):
            self._exchange.tell(Micro())
            super().micro(batch)

    def end(self, learning_rate: float) -> StepOutcome:
        """Update the weights on all ranks, or on none; what was not finite is named wherever it was
        found.
        """
        self.unread()
        with self._exchange.together(f"the end of step {self._steps}"):
            self._exchange.tell(EndStep(learning_rate, self.divisor))
            outcome = super().end(learning_rate)
            if outcome.culprit is None:
                return outcome
            not_finite = functools.reduce(
                NotFinite.__or__, self._exchange.answers(NotFinite), self.findings()
            )
            return dataclasses.replace(outcome, culprit=str(not_finite))

    def opener(
        self, opens: Callable[[Mapping[str, Any]], WeightsOut], line: int = 0
    ) -> Callable[[Mapping[str, Any]], WeightsOut]:
        """Opens a weight plane on every rank, each for its own shards; `opens` is rank 0's. For the
        runtime.

        line: which, by `offered`. Raises RunError where the plane takes whole tensors from one rank
        alone.
        """
        if not isinstance(opens, OpensWriter) or not opens.sites:
            raise RunError(
                f"the weights of '{self.node}' lie on {self.ranks} ranks, but its weight plane"
                " takes them from one; plan the graph with these ranks, so that each of them can"
                " offer its own"
            )

        def opened(tensors: Mapping[str, Any]) -> WeightsOut:
            with self._exchange.together("opening the weight plane"):
                self._exchange.tell(Open(line, opens.sites))
                assert isinstance(self.together, MeshTogether), "its model is shared out"
                own = self.writers[line] = opens(placed(tensors, self._mesh), self.together.largest)
                return _LedWriter(own, self, line)

        return opened

    def everywhere(
        self, function: Callable[..., Any], *, is_brief: bool = False, **arguments: Any
    ) -> list[Any]:
        """As `Learner.everywhere`, on every rank at once; what each answers, rank by rank."""
        with self._exchange.together(f"{function.__name__}"):
            self._exchange.tell(CallFunction.of(function, arguments))
            own = function(learner=self, rank=0, ranks=self.ranks, **arguments)
            limits = self._exchange.team.limits
            answers = self._exchange.answers(
                CallResult, limits.exchange_s if is_brief else limits.checkpoint_s
            )
            return [own, *(answer.value for answer in answers)]

    def close(self) -> None:
        """End the other ranks; may be called again."""
        self._exchange.close()
        group.leave()


def dealt(step: Prepared, ranks: int, limit: int, whole: bool) -> list[Share]:
    """The share of each data rank; see `deal`."""
    rows = chosen(step.rows, step.computed)
    shares = []
    of_ranks: list[list[AnyArray]] = [[] for _ in range(ranks)]
    for alike in by_temperature(rows, np.arange(rows.rollouts)):
        some = rows if len(alike) == rows.rollouts else chosen(rows, alike)
        placed = deal(some.tokens.ids, some.offsets, some.groups_R, ranks, limit, whole=whole)
        for of_rank, parts in zip(of_ranks, placed, strict=True):
            of_rank += [alike[part] for part in parts]
    for parts in of_ranks:
        rollouts = np.concatenate([np.zeros(0, np.int64), *parts])
        shares.append(Share(chosen(rows, rollouts), tuple(map(len, parts))))
    return shares


def addressed(shares: Sequence[Share], tensor_parallel: int) -> dict[int, Message]:
    """What each rank but the first is told: of those that compute the same, one has the rows."""
    return {
        rank: ShareAlike() if rank % tensor_parallel else shares[data_rank(rank, tensor_parallel)]
        for rank in range(1, len(shares) * tensor_parallel)
    }


def handed_on(share: Share | None, mesh: TrainerMesh) -> Share:
    """The share of the first rank along "tp", on all of them; None: this is another one."""
    if mesh["tp"].size() == 1:
        assert share is not None, "it has no other to take it from"
        return share
    alike = mesh["tp"].get_group()
    data = None
    if share is not None:
        data = torch.frombuffer(bytearray(CODEC.encode(share)), dtype=torch.uint8)
    size = torch.tensor(0 if data is None else len(data))
    dist.broadcast(size, group=alike, group_src=0)
    data = torch.empty(int(size), dtype=torch.uint8) if data is None else data
    dist.broadcast(data, group=alike, group_src=0)
    received = share or CODEC.decode(data.numpy())
    assert isinstance(received, Share), "the first hands on nothing else"
    return received


def in_order(counts: Sequence[int]) -> list[AnyArray]:
    """Micro-batches of so many rows, one after the other."""
    ends = np.cumsum(np.asarray(counts, np.int64))
    return [np.arange(end - count, end) for count, end in zip(counts, ends.tolist(), strict=True)]


class _LedWriter:
    """Rank 0's end of the weight plane: when it publishes, all ranks do."""

    def __init__(self, own: WeightsOut, learner: LedLearner, line: int) -> None:
        self._own, self._learner, self._exchange, self._line = own, learner, learner._exchange, line
        self._waits = False
        """Whether some rank may still have to copy the version published last."""

    @property
    def socket(self) -> Any:
        """What may become readable."""
        return getattr(self._own, "socket", None)

    @property
    def pending(self) -> int | None:
        """The version that some rank has yet to copy; all are asked until none has."""
        if self._waits:
            versions = self._learner.everywhere(memory.unpublished)
            version = max((version for version in versions if version is not None), default=None)
            self._waits = version is not None
            return version
        return None

    @property
    def traffic(self) -> tuple[int, int] | None:
        """Of all ranks."""
        return getattr(self._own, "traffic", None)

    @property
    def full_share(self) -> float:
        """As that of any rank."""
        return float(getattr(self._own, "full_share", 1.0))

    def publish(self, version: int, tensors: Mapping[str, Any]) -> bool:
        """Offer each rank's shards of a version."""
        self._waits = True
        with self._exchange.together(f"publishing version {version}"):
            self._exchange.tell(Publish(self._line, version))
            return self._own.publish(version, tensors)

    def settle(self, timeout_s: float) -> bool:
        """Rank 0's part; each of the others settles its own, before the same update."""
        return self._own.settle(timeout_s)

    @property
    def sent(self) -> Mapping[str, SentVersion]:
        """By all ranks, as rank 0's end learns of it."""
        return self._own.sent

    def tell(self, note: dict[str, int | float | str]) -> None:
        """The note of rank 0 is that of all."""
        self._own.tell(note)

    def poll(self) -> None:
        """Rank 0's part; the others look after theirs while they wait."""
        self._own.poll()
