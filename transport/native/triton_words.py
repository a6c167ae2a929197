"""Copies, casts and sums of words on a GPU: one launch for all tensors, each byte read once, and
nothing waited for.

The checksum is that of `transport.native.sums`. Triton is imported here, and this only where there
is a GPU.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# mypy: disable-error-code="import-not-found, unused-ignore"
from __future__ import annotations

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


class WordMoves:
    """Boxes of memory on one GPU, cut into chunks. Made once for their places; asked for as often
    as there are versions.
    """

    def __init__(
        self,
        boxes: Sequence[Sequence[int]] | NDArray[np.int64],
        rows: Sequence[int],
        device: torch.device,
        *,
        copies: bool,
    ) -> None:
        """`boxes`: `copier.Box`es; those that are copied are of whole words at multiples of 8
        bytes, those that are summed alone are dense. `rows`: of the sums, one for each box.
        """
        table = np.asarray(boxes, np.int64).reshape(len(boxes), 7)
        nbytes = table[:, 2] * table[:, 3]
        words = -(-nbytes // 8)
        assert (words < 1 << 31).all(), "the kernel counts words in 32 bits"
        chunks = -(-words // CHUNK_WORDS)
        owner = np.repeat(np.arange(len(words)), chunks)
        first = CHUNK_WORDS * (
            np.arange(len(owner)) - np.repeat(np.cumsum(chunks) - chunks, chunks)
        )
        count = np.minimum(words[owner] - first, CHUNK_WORDS)
        spare = np.where(first + count == words[owner], 8 * words[owner] - nbytes[owner], 0)
        keep = np.where(spare == 0, -1, (1 << (64 - 8 * np.maximum(spare, 1))) - 1)
        row_words = np.where(table[:, 2] == 1, words, table[:, 3] // 8)
        table[:, 3], table[:, 2] = np.maximum(row_words, 1), np.asarray(rows, np.int64)
        self._boxes = torch.from_numpy(table).to(device)
        self._chunks = torch.from_numpy(np.stack([owner, first, count, keep], axis=1)).to(device)
        self._copies = copies

    def ask(self, sums: torch.Tensor) -> None:
        """Copy all boxes; s1 and s2 of each are added to its row of `sums`, int64[n, 2] on the
        GPU. Goes on the current stream and is not waited for.
        """
        if programs := len(self._chunks):
            with torch.cuda.device_of(sums):
                _move[(programs,)](
                    self._boxes,
                    self._chunks,
                    sums,
                    copies=self._copies,
                    block=BLOCK_WORDS,
                    num_warps=8,
                )


@triton.jit
def _move(
    boxes,
    chunks,
    sums,
    copies: tl.constexpr,
    block: tl.constexpr,
):
    """One chunk of a box: its words, cast from float32 where the box says so, and their sums, for
    which of the last word some bits count.
    """
    chunk = chunks + 4 * tl.program_id(0)
    box = boxes + 7 * tl.load(chunk)
    first, count = tl.load(chunk + 1).to(tl.int32), tl.load(chunk + 2).to(tl.int32)
    keep = tl.load(chunk + 3)
    to = tl.load(box).to(tl.pointer_type(tl.int64))
    source = tl.load(box + 1)
    words = source.to(tl.pointer_type(tl.int64))
    floats = tl.multiple_of(source.to(tl.pointer_type(tl.float32)), 16)
    out, row_words = tl.load(box + 2), tl.load(box + 3).to(tl.int32)
    to_stride, from_stride, cast = tl.load(box + 4), tl.load(box + 5), tl.load(box + 6)
    lanes = tl.arange(0, block)
    quarters = tl.arange(0, 4)
    lane_words = tl.zeros([block], tl.int64)
    totals = tl.zeros([block], tl.int64)
    last = tl.zeros([block], tl.int64)
    for step in range(0, count, block):
        index = step + lanes
        inside = index < count
        row = (first + index) // row_words
        column = ((first + index) - row * row_words).to(tl.int64)
        row = row.to(tl.int64)
        if cast == 0:
            word = tl.load(words + row * (from_stride // 8) + column, mask=inside, other=0)
        else:
            # fours of numbers lie at multiples of 16 bytes
            four = 4 * (row * (from_stride // 16) + column)
            numbers = tl.load(
                floats + (four[:, None] + quarters[None, :]), mask=inside[:, None], other=0.0
            )
            if cast == 1:
                whole = numbers.to(tl.int32, bitcast=True)
                rounded = (whole + 0x7FFF + ((whole >> 16) & 1)) >> 16
                no_number = (whole & 0x7FFFFFFF) > 0x7F800000
                bits = tl.where(no_number, (whole >> 16) | 0x40, rounded)
            else:
                bits = numbers.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
            wide = (bits.to(tl.int64) & 0xFFFF) << (16 * quarters).to(tl.int64)[None, :]
            word = tl.sum(wide, 1)
        if copies:
            tl.store(to + row * (to_stride // 8) + column, word, mask=inside)
        lane_words += word
        totals += lane_words
        last += tl.where(index == count - 1, word, 0)
    # Of T trips, `totals` holds the word of trip t (T - t) times: no product for each word.
    places = first + 1 + lanes + block * tl.cdiv(count, block).to(tl.int64)
    end = tl.sum(last)
    spare = (end & keep) - end
    tl.atomic_add(sums + 2 * out, tl.sum(lane_words) + spare, sem="relaxed")
    tl.atomic_add(
        sums + 2 * out + 1,
        tl.sum(lane_words * places - totals * block) + spare * (first + count),
        sem="relaxed",
    )
