"""How a delta marks the changed units of a buffer: a bit for each block, or the places of 16-bit
words by page.
"""

from __future__ import annotations

import torch

from transport.native.differences import PAGE_WORDS

WORD, BLOCK, RUN = 2, 64, 512
"""The units, in bytes."""


def rows(buffer: torch.Tensor, unit: int) -> torch.Tensor:
    """The whole units of a buffer as rows: int16[n], or int64[n, unit / 8]."""
    whole = buffer[: len(buffer) // unit * unit]
    return whole.view(torch.int16) if unit == WORD else whole.view(torch.int64).view(-1, unit // 8)


def fixed_bytes(nbytes: int, unit: int) -> int:
    """Bytes of a delta's `where`, without those that each changed word adds."""
    units = nbytes // unit
    return 4 * -(-units // PAGE_WORDS) if unit == WORD else -(-units // 8)


def places_of(where: torch.Tensor, nbytes: int, unit: int) -> torch.Tensor | None:
    """int64: the units that `where` names; None where they are none of this buffer, or not in
    order.
    """
    fixed = fixed_bytes(nbytes, unit)
    if unit == WORD:
        counts = aligned(where[:fixed]).view(torch.int32).long()
        lows = aligned(where[fixed:]).view(torch.int16).long() & (PAGE_WORDS - 1)
        if (len(counts) and int(counts.min()) < 0) or int(counts.sum()) != len(lows):
            return None
        places = (
            torch.repeat_interleave(
                torch.arange(len(counts), device=where.device) * PAGE_WORDS, counts
            )
            + lows
        )
    else:
        places = unpacked(where).view(-1).nonzero().view(-1)
    rising = bool((places[1:] > places[:-1]).all())
    return places if rising and (not len(places) or int(places[-1]) < nbytes // unit) else None


def packed(flags: torch.Tensor) -> torch.Tensor:
    """uint8[ceil(n / 8)]: a bit for each flag, the lowest first."""
    padded = torch.zeros(-(-len(flags) // 8), 8, dtype=torch.uint8, device=flags.device)
    padded.view(-1)[: len(flags)] = flags
    return (padded << _eight(flags.device)).sum(1, dtype=torch.uint8)


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """uint8[n, 8] of 0 and 1: what `packed` made."""
    return (packed[:, None] >> _eight(packed.device)) & 1


def _eight(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def aligned(data: torch.Tensor) -> torch.Tensor:
    """The same bytes where wider numbers may be read from them."""
    return data if data.storage_offset() % 8 == 0 else data.clone()
