"""Decode steps as CUDA graphs: one graph for each bucket of rows, captured when that bucket comes a
second time.

A graph holds addresses. What it reads (weights, pages, the rows' columns and page tables) must stay
where it is; call `forget` when something has moved. Whatever is no function of fixed tensors must
be part of the key.
"""

from __future__ import annotations

import bisect
import warnings
from collections.abc import Callable, Hashable
from typing import Protocol

import torch

from operators.engine.attention import AttentionLayout, Kernel, KVCache
from operators.engine.pages import PAGE
from operators.engine.sampler import Draw, Sampling

FINE = 64
"""Up to this many rows, buckets are 8 apart; above, an eighth to a quarter of what they hold."""


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


def bucket_of(rows: int, sizes: tuple[int, ...]) -> int:
    """The smallest bucket that holds so many rows."""
    return sizes[bisect.bisect_left(sizes, rows)]


class GraphReplays:
    """Runs `work(size, *key)` on fixed buffers: the first time as it is, from the second on as a
    graph.

    On the CPU it is run as it is every time, so that all around it can be tested there.
    """

    def __init__(self, work: Callable[..., None], device: torch.device) -> None:
        """`work` reads and writes tensors of fixed place, and never waits for the device."""
        self._work = work
        self._cuda = device.type == "cuda"
        self._ready: set[Hashable] = set()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._stream = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle() if self._cuda else None
        self.refused: str | None = None
        """Why steps are no longer captured, once one could not be."""

    @property
    def captured(self) -> int:
        """Graphs held."""
        return len(self._graphs)

    def __call__(self, *key: Hashable) -> None:
        """Do the work for this key."""
        if not self._cuda:
            self._work(*key)
        elif key in self._graphs or (
            key in self._ready and self.refused is None and self._capture(key)
        ):
            self._graphs[key].replay()
        else:
            self._aside(key)
            self._ready.add(key)

    def forget(self) -> None:
        """Drop the captured graphs: addresses have changed."""
        self._graphs.clear()

    def _aside(self, key: tuple[Hashable, ...]) -> None:
        """Run it on the stream that is captured later: what is made at first use is made there."""
        assert self._stream is not None
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._work(*key)
        current.wait_stream(self._stream)

    def _capture(self, key: tuple[Hashable, ...]) -> bool:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                self._work(*key)
        except RuntimeError as error:
            self.refused = str(error).splitlines()[0]
            warnings.warn(
                "decode steps are run without CUDA graphs: this model's cannot be captured"
                f" ({self.refused}); its forward pass waits for the device somewhere",
                RuntimeWarning,
                stacklevel=2,
            )
            return False
        self._graphs[key] = graph
        return True


class FixedRows(Protocol):
    """The rows' state on the device, at addresses that stay."""

    def front(
        self, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the first `count` rows: newest tokens, positions, page table [count, W], seeds, tokens
        drawn.
        """

    def fill(self, count: int, page: int) -> None:
        """Let the rows behind the live ones, up to `count`, stand at position 0 of `page`."""


Forward = Callable[[torch.Tensor, torch.Tensor, AttentionLayout], torch.Tensor]
"""Newest tokens [n], their positions [n], layout -> logits [n, V]."""

Drawing = Callable[[torch.Tensor, Sampling, torch.Tensor, torch.Tensor], Draw]
"""Logits [n, V], sampling, seeds [n], tokens drawn [n] -> tokens and log-probabilities [n]."""


class GraphedDecode:
    """The decode step of rows that are all under way: forward pass and draw, padded to a bucket,
    replayed.
    """

    def __init__(
        self,
        forward: Forward,
        drawing: Drawing,
        rows: FixedRows,
        cache: KVCache,
        kernel: Kernel | None,
        *,
        slots: int,
        device: torch.device,
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
        self._sizes = buckets(slots)
        self._tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(slots, dtype=torch.float32, device=device)
        self.replays = GraphReplays(self._step, device)

    def __call__(self, live: int, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64 [live] and log-probabilities [live] of the first `live` rows, good until the
        next call.
        """
        size = bucket_of(live, self._sizes)
        self._rows.fill(size, self._cache.scratch)
        self.replays(size, sampling)
        return self._tokens[:live], self._logprobs[:live]

    def _step(self, size: int, sampling: Sampling) -> None:
        last, positions, table, seeds, counts = self._rows.front(size)
        layout = AttentionLayout(
            self._cache, positions, table.shape[1] * PAGE, table, kernel=self._kernel
        )
        drawn = self._drawing(self._forward(last, positions, layout), sampling, seeds, counts)
        self._tokens[:size] = drawn.tokens
        self._logprobs[:size] = drawn.logprobs
