"""Decode steps as CUDA graphs: one graph for each bucket of rows and of their length, captured at
the start or when it comes a second time.

A graph holds addresses. What it reads (weights, pages, the rows' columns and page tables) must stay
where it is; call `forget` when something has moved. Whatever is no function of fixed tensors must
be part of the key.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Protocol

import torch

from dataflow.records import AnyArray
from operators.engine.attention import AttentionLayout, Kernel, KVCache
from operators.engine.pages import AHEAD, PAGE, pages_for
from operators.engine.rows import Rows, put
from operators.engine.sampler import Draw, DrawKind, RowSampling

FINE = 64
"""Up to this many rows, buckets are 8 apart; above, an eighth to a quarter of what they hold."""

LEAST_TOKENS = 1024
"""Rows up to this length share a bucket; above it a bucket holds twice the length of the one
before."""


def buckets(slots: int) -> tuple[int, ...]:
    """How many rows a graph is captured for: 1, 2, 4, then multiples of 8, coarser above FINE,
    `slots` last.
    """
    sizes = [1, 2, 4, *range(8, FINE + 1, 8)]
    step = FINE // 4
    while sizes[-1] < slots:
        sizes += [sizes[-1] + step * (i + 1) for i in range(4)]
        step *= 2
    return (*(size for size in sizes if size < slots), slots)


def lengths(context_tokens: int) -> tuple[int, ...]:
    """How long rows are that a graph is captured for: LEAST_TOKENS, twice that and so on, the
    context in whole pages last.
    """
    doubled = itertools.takewhile(
        lambda tokens: tokens < context_tokens,
        (LEAST_TOKENS << power for power in itertools.count()),
    )
    return (*doubled, pages_for(context_tokens + 1) * PAGE)


def bucket_of(count: int, sizes: Sequence[int]) -> int:
    """The smallest bucket that holds so many."""
    return sizes[bisect.bisect_left(sizes, count)]


class Recorder(Protocol):
    """Records work on fixed buffers, so that it can be done again without asking for each part."""

    def aside(self, work: Callable[[], None]) -> None:
        """Do it as it is, where it is recorded later: what is made at first use is made there."""

    def record(self, work: Callable[[], None]) -> Callable[[], object]:
        """What does it again; it need not be done now. Raises RuntimeError where it cannot be
        recorded.
        """


class CudaGraphs:
    """The recorder of a GPU."""

    def __init__(self, device: torch.device) -> None:
        """Record on a stream of its own, into one pool of memory."""
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def aside(self, work: Callable[[], None]) -> None:
        """On the stream that records."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)

    def record(self, work: Callable[[], None]) -> Callable[[], object]:
        """Capture it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            work()
        return graph.replay


class Repeats:
    """The recorder of a CPU: work is done as it is every time, so that all around it can be tested
    there.
    """

    def aside(self, work: Callable[[], None]) -> None:
        """At once."""
        work()

    def record(self, work: Callable[[], None]) -> Callable[[], object]:
        """The work itself."""
        return work


class GraphReplays:
    """Runs `work(*key)` on fixed buffers: as it is where its key is new, from the second time on as
    a graph.
    """

    def __init__(self, work: Callable[..., None], recorder: Recorder) -> None:
        """`work` reads and writes tensors of fixed place, and never waits for the device."""
        self._work, self._recorder = work, recorder
        self._ready: set[Hashable] = set()
        self._replays: dict[Hashable, Callable[[], object]] = {}
        self.calls = self.replayed = 0
        """Work done, and how often by nothing but a replay."""
        self.refused: str | None = None
        """Why work is no longer captured, once some could not be."""

    @property
    def captured(self) -> int:
        """Graphs held."""
        return len(self._replays)

    def __call__(self, *key: Hashable) -> None:
        """Do the work for this key."""
        self.calls += 1
        self.replayed += key in self._replays
        if key not in self._replays and key in self._ready:
            self._record(key)
        if key in self._replays:
            self._replays[key]()
        else:
            self._aside(key)

    def capture(self, *key: Hashable) -> None:
        """Have a graph for this key."""
        if key not in self._replays:
            self._aside(key)
            self._record(key)

    def forget(self) -> None:
        """Drop the captured graphs: addresses have changed."""
        self._replays.clear()

    def _aside(self, key: tuple[Hashable, ...]) -> None:
        self._recorder.aside(functools.partial(self._work, *key))
        self._ready.add(key)

    def _record(self, key: tuple[Hashable, ...]) -> None:
        if self.refused is not None:
            return
        try:
            self._replays[key] = self._recorder.record(functools.partial(self._work, *key))
        except RuntimeError as error:
            self.refused = str(error).splitlines()[0]
            warnings.warn(
                "decode steps are run without CUDA graphs: this model's cannot be captured"
                f" ({self.refused}); its forward pass waits for the device somewhere",
                RuntimeWarning,
                stacklevel=4,
            )


Forward = Callable[
    [torch.Tensor, torch.Tensor, "torch.Tensor | int", AttentionLayout], torch.Tensor
]
"""Newest tokens [n], their positions [n], those whose logits are kept (0: all), layout -> logits
[kept, V]."""

Drawing = Callable[[torch.Tensor, RowSampling, torch.Tensor, torch.Tensor], Draw]
"""Logits [n, V], sampling, seeds [n], tokens drawn [n] -> tokens and log-probabilities [n]."""


class GraphedDecode:
    """The forward pass of rows, and their draw where it is a function of fixed tensors: padded to a
    bucket, replayed.
    """

    def __init__(
        self,
        forward: Forward,
        drawing: Drawing,
        rows: Rows,
        cache: KVCache,
        kernel: Kernel | None,
        *,
        context_tokens: int,
        vocabulary: int,
        recorder: Recorder,
    ) -> None:
        """The arguments are what the engine's own step uses; `rows` and `cache` keep their tensors'
        places.
        """
        self._forward, self._drawing, self._rows, self._cache, self._kernel = (
            forward,
            drawing,
            rows,
            cache,
            kernel,
        )
        slots, self._device, self._vocabulary = rows.slots, rows.device, vocabulary
        self._sizes = buckets(slots)
        self._wide_sizes = buckets(slots + AHEAD)
        self._lengths = lengths(context_tokens)
        self._tokens = torch.zeros(slots, dtype=torch.int64, device=self._device)
        self._logprobs = torch.zeros(slots, dtype=torch.float32, device=self._device)
        self._kept = torch.zeros(slots, dtype=torch.int64, device=self._device)
        self._logits: torch.Tensor | None = None
        self.replays = GraphReplays(self._step, recorder)

    def drawn(self, kind: DrawKind) -> tuple[torch.Tensor, torch.Tensor]:
        """A token int64 [n] of every live row and its log-probability [n], good until the next
        call.
        """
        live = self._rows.n
        size = bucket_of(live, self._sizes)
        self._rows.fill(live, size, self._cache.scratch)
        self.replays(size, bucket_of(self._rows.longest, self._lengths), kind.common)
        return self._tokens[:live], self._logprobs[:live]

    def logits(self, count: int, kept: AnyArray, longest: int) -> torch.Tensor:
        """Logits of `kept` int64 [k], at most one for each slot, of the first `count` rows: the
        live ones, and tokens that stand ahead. Good until the next call.

        longest: of them.
        """
        size = bucket_of(count, self._wide_sizes)
        self._rows.fill(count, size, self._cache.scratch)
        self._kept[: len(kept)] = put(kept, self._device)
        self._kept[len(kept) :] = 0
        self.replays(size, bucket_of(longest, self._lengths), None)
        assert self._logits is not None
        return self._logits[: len(kept)]

    def capture(self, kind: DrawKind | None, goes_on: Callable[[], bool]) -> None:
        """Capture steps before any row is live, those of short rows first, as long as `goes_on`
        says; the others are captured when they come. kind: of most draws; None: logits alone.
        """
        assert not self._rows.n
        for key in self._keys(kind):
            if not goes_on() or self.replays.refused is not None:
                return
            self._rows.fill(0, key[0], self._cache.scratch)
            self.replays.capture(*key)

    def _keys(self, kind: DrawKind | None) -> Iterator[tuple[int, int, DrawKind | None]]:
        """Large ones first, so that the others find memory."""
        for longest in self._lengths:
            if kind is not None:
                yield from ((size, longest, kind.common) for size in reversed(self._sizes))
            yield from ((size, longest, None) for size in reversed(self._wide_sizes))

    def _step(self, size: int, longest: int, kind: DrawKind | None) -> None:
        """Draw by columns of this kind, or keep logits."""
        rows = self._rows.front(size)
        layout = AttentionLayout(
            self._cache,
            rows.positions,
            longest,
            rows.table[:, : longest // PAGE],
            kernel=self._kernel,
            together=kind is None,
        )
        if kind is None:
            kept = self._kept[: min(size, len(self._kept))]
            logits = self._forward(rows.last, rows.positions, kept, layout)
            if self._logits is None:
                shape = len(self._kept), self._vocabulary
                self._logits = torch.empty(shape, dtype=logits.dtype, device=self._device)
            self._logits[: len(kept)] = logits
            return
        logits = self._forward(rows.last, rows.positions, 0, layout)
        drawn = self._drawing(logits, RowSampling.by(rows.knobs, kind), rows.seeds, rows.drawn)
        self._tokens[:size] = drawn.tokens
        self._logprobs[:size] = drawn.logprobs
