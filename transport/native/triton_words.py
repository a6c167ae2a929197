"""Sums of words, and copies that sum what they move, on a GPU: one launch for all tensors, each
byte read once.

The checksum is that of `transport.native.sums`. Triton is imported here, and this only where there
is a GPU.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# mypy: disable-error-code="import-not-found, unused-ignore"
from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

CHUNK_WORDS = 1 << 15
"""Words that one program moves: of an H200's 132 multiprocessors each gets hundreds of programs for
a large model."""
BLOCK_WORDS = 2048
"""Of them at once: 8 for each of 256 threads."""


class WordPlan:
    """Ranges of memory on one GPU, cut into chunks. Made once for a layout; the ranges may lie
    elsewhere each time.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        """`sizes`: bytes of each range."""
        nbytes = np.asarray(sizes, np.int64)
        words = -(-nbytes // 8)
        chunks = -(-words // CHUNK_WORDS)
        owner = np.repeat(np.arange(len(words)), chunks)
        first = CHUNK_WORDS * (
            np.arange(len(owner)) - np.repeat(np.cumsum(chunks) - chunks, chunks)
        )
        count = np.minimum(words[owner] - first, CHUNK_WORDS)
        spare = np.where(first + count == words[owner], 8 * words[owner] - nbytes[owner], 0)
        keep = np.where(spare == 0, -1, (1 << (64 - 8 * np.maximum(spare, 1))) - 1)
        table = np.stack([owner, first, count, keep]).astype(np.int64)
        self._table = torch.from_numpy(table).to(device)
        self._ranges = len(words)

    def sums(self, addresses: Sequence[int]) -> NDArray[np.uint64]:
        """s1 and s2 of the ranges at these addresses (multiples of 8, readable up to the next one):
        uint64[ranges, 2].

        Waits for the device.
        """
        return self._run(addresses, addresses, copies=False)

    def copy(self, destinations: Sequence[int], sources: Sequence[int]) -> NDArray[np.uint64]:
        """Copy each range, of whole words, from one address to another; its s1 and s2:
        uint64[ranges, 2].

        Waits for the device.
        """
        return self._run(destinations, sources, copies=True)

    def _run(
        self, destinations: Sequence[int], sources: Sequence[int], copies: bool
    ) -> NDArray[np.uint64]:
        owner, first, count, keep = self._table
        programs, device = owner.numel(), self._table.device
        totals = torch.zeros((self._ranges, 2), dtype=torch.int64, device=device)
        if programs:
            places = torch.tensor([list(destinations), list(sources)], dtype=torch.int64).to(device)
            parts = torch.empty((programs, 2), dtype=torch.int64, device=device)
            arguments = (places[0], places[1], owner, first, count, keep, parts)
            with torch.cuda.device_of(parts):
                _move[(programs,)](*arguments, copies=copies, block=BLOCK_WORDS, num_warps=8)
            totals.index_add_(0, owner, parts)
        pairs: NDArray[np.uint64] = totals.cpu().numpy().view(np.uint64)
        return pairs


@functools.lru_cache(maxsize=8)
def word_plan(sizes: tuple[int, ...], device: torch.device) -> WordPlan:
    """The plan of ranges of these sizes in bytes, made once."""
    return WordPlan(sizes, device)


@triton.jit
def _move(
    destinations,
    sources,
    owners,
    firsts,
    counts,
    keeps,
    parts,
    copies: tl.constexpr,
    block: tl.constexpr,
):
    """One chunk: its words, and their sums, for which of the last word some bits count; a copy is
    of whole words.
    """
    program = tl.program_id(0)
    owner, first = tl.load(owners + program), tl.load(firsts + program)
    count, keep = tl.load(counts + program).to(tl.int32), tl.load(keeps + program)
    source = tl.load(sources + owner).to(tl.pointer_type(tl.int64)) + first
    destination = tl.load(destinations + owner).to(tl.pointer_type(tl.int64)) + first
    lanes = tl.arange(0, block)
    lane_words = tl.zeros([block], tl.int64)
    sums = tl.zeros([block], tl.int64)
    for step in range(0, count, block):
        index = step + lanes
        word = tl.load(source + index, mask=index < count, other=0)
        if copies:
            tl.store(destination + index, word, mask=index < count)
        lane_words += word
        sums += lane_words
    # Of T trips, `sums` holds the word of trip t (T - t) times: no product for each word.
    places = first + 1 + lanes + block * tl.cdiv(count, block).to(tl.int64)
    last = tl.load(source + count - 1)
    spare = (last & keep) - last
    tl.store(parts + 2 * program, tl.sum(lane_words) + spare)
    tl.store(
        parts + 2 * program + 1,
        tl.sum(lane_words * places - sums * block) + spare * (first + count),
    )
