"""Tensors in a flat buffer: views of it, filling it, and the checksums that prove its content."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from struct import pack

import torch
import xxhash

from transport.weights.flat import FlatLayout


def views(layout: FlatLayout, buffer: torch.Tensor) -> list[torch.Tensor]:
    """The layout's tensors, in its order, as views of `buffer` (uint8[layout.nbytes])."""
    return [
        buffer[spec.offset : spec.offset + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)
        for spec in layout.tensors
    ]


def copy(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its destination, casting where dtypes differ; strides and devices may be any."""
    with torch.no_grad():
        torch._foreach_copy_([t.detach() for t in destinations], [t.detach() for t in sources])


def prove(layout: FlatLayout, buffer: torch.Tensor, per_tensor: bool) -> tuple[int, list[int]]:
    """(checksum, sums): xxh3_64 of the whole buffer and no sums, or of the sums and the sum per tensor."""
    data = memoryview(buffer.numpy().data)
    if not per_tensor:
        return xxhash.xxh3_64_intdigest(data), []
    sums = [xxhash.xxh3_64_intdigest(data[t.offset : t.offset + t.nbytes]) for t in layout.tensors]
    return xxhash.xxh3_64_intdigest(pack(f"<{len(sums)}Q", *sums)), sums


def damage(
    layout: FlatLayout, buffer: torch.Tensor, checksum: int, sums: Sequence[int], slice_bytes: int | None = None
) -> Generator[None, None, str | None]:
    """Returns where the buffer is not what `prove` saw, a tensor's name where sums tell; None if it is whole.

    Yields after about `slice_bytes` of reading, and once more for every such slice; never if it is None."""
    data = memoryview(buffer.numpy().data)
    step = slice_bytes or len(data)
    parts = [(t.name, t.offset, t.offset + t.nbytes) for t in layout.tensors] if sums else [("", 0, len(data))]
    read = 0
    for (name, start, end), published in zip(parts, sums or (checksum,), strict=True):
        digest = xxhash.xxh3_64()
        for at in range(start, end, step):
            if read >= step:
                yield
                read = 0
            digest.update(data[at : min(at + step, end)])
            read += min(step, end - at)
        if digest.intdigest() != published:
            return f"tensor '{name}'" if name else "the buffer"
    return None


@contextmanager
def copying(threads: int) -> Iterator[None]:
    """Run torch's copies on that many threads, so that they take no core from the other workers."""
    before = torch.get_num_threads()
    if before == threads:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
