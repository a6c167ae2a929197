"""The GPU's sums and copies agree with the processor's; interpreted by Triton where there is no
GPU.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available() and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
    pytest.skip(
        "Triton's interpreter needs numpy below 2.4, and there is no GPU", allow_module_level=True
    )

from transport.native import Copier, Summer, copier, sums, triton_words
from transport.native.sums import RangeSums, folded, folded_there, on_host, pairs, wordsum
from transport.native.triton_words import WordMoves

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = [64, 8, 1, 0, 13, 8 * 4096, 8 * 4096 * 2 + 5, 8 * 4096 - 7]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Small chunks, and kernels in Triton wherever there is a choice."""
    monkeypatch.setattr(triton_words, "CHUNK_WORDS", 4096)
    for module in (sums, copier):
        monkeypatch.setattr(module, "by_triton", lambda device: True)


@pytest.fixture
def launches(monkeypatch):
    """Boxes of each launch."""
    counts, ask = [], WordMoves.ask
    monkeypatch.setattr(
        WordMoves, "ask", lambda moves, sums: (counts.append(len(moves._boxes)), ask(moves, sums))
    )
    return counts


def filled(nbytes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def places(sizes):
    """Offsets at multiples of 64 bytes, and the bytes of all."""
    ends = np.cumsum([-(-size // 64) * 64 for size in sizes])
    return [0, *ends[:-1].tolist()], int(ends[-1])


def test_sums_are_those_of_the_processor_whatever_lies_between_the_ranges(launches):
    offsets, nbytes = places(SIZES)
    buffer = filled(nbytes).to(DEVICE)
    parts = [buffer[offset : offset + size] for offset, size in zip(offsets, SIZES, strict=True)]
    expected = pairs(buffer.cpu(), offsets, SIZES)
    ranges = RangeSums(parts)
    for times in (1, 2):
        there = torch.zeros((len(SIZES), 2), dtype=torch.int64, device=DEVICE)
        for _ in range(times):
            ranges.ask(there)
        assert np.array_equal(on_host(there), times * expected), "sums are added"
    assert (
        folded_there(there).cpu().numpy().view(np.uint64).tolist()
        == folded(on_host(there)).tolist()
    )
    assert set(launches) == {len(SIZES)}


def test_ranges_that_do_not_begin_at_a_word_are_summed_too(launches):
    buffer = filled(1000).to(DEVICE)
    there = torch.zeros((2, 2), dtype=torch.int64, device=DEVICE)
    RangeSums([buffer[3:900], buffer[8:16]]).ask(there)
    assert np.array_equal(on_host(there), pairs(buffer.cpu(), [3, 8], [897, 8]))
    assert launches == [1]


def test_nothing_has_the_sum_of_nothing():
    there = torch.zeros((2, 2), dtype=torch.int64, device=DEVICE)
    RangeSums([]).ask(there[:0])
    RangeSums([torch.zeros(0, dtype=torch.uint8, device=DEVICE)] * 2).ask(there)
    assert not there.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8])
def test_boxes_are_copied_cast_and_summed_in_one_launch_and_nothing_beside_them(launches, dtype):
    """Rows of a wider tensor into rows of another, whole tensors, and one that ends within a
    block.
    """
    wide = torch.randn(300, 160, generator=torch.Generator().manual_seed(1)) * 50
    sources = [
        wide[7:250, 16:144],
        wide[:40],
        torch.randn(64, 24),
        torch.randn(8),
        wide[:, :8][:3],
    ]
    sources = [source.to(DEVICE) for source in sources]
    if dtype is torch.uint8:
        sources = [(source.abs() % 200).to(dtype) for source in sources]
    room = [torch.full((400, 200), 7.0).to(dtype).to(DEVICE) for _ in sources]
    there = [
        whole[5 : 5 + len(source), 8 : 8 + source.shape[1]] if source.ndim > 1 else whole[0, :8]
        for whole, source in zip(room, sources, strict=True)
    ]
    expected = [whole.clone() for whole in room]
    for whole, source in zip(expected, sources, strict=True):
        place = (
            whole[5 : 5 + len(source), 8 : 8 + source.shape[1]] if source.ndim > 1 else whole[0, :8]
        )
        place.copy_(source)
    copies = Copier(there, sources)
    for _ in range(2):
        found = copies.run()
        for whole, wanted in zip(room, expected, strict=True):
            assert torch.equal(whole, wanted)
        assert found == [
            wordsum(source.to(dtype).cpu().reshape(-1).view(torch.uint8)) for source in sources
        ]
    assert launches == [len(sources)] * 2


def test_a_cast_rounds_to_the_nearest_and_ties_to_even():
    ties = torch.arange(1 << 16, dtype=torch.int32) << 16
    patterns = torch.cat([ties | low for low in (0, 0x7FFF, 0x8000, 0x8001, 0x1000, 0x1001)])
    source = patterns.view(torch.float32)
    source = source[source.isfinite()]
    source = source[: len(source) // 4 * 4].to(DEVICE)
    for dtype in (torch.bfloat16, torch.float16):
        there = torch.zeros(len(source), dtype=dtype, device=DEVICE)
        (found,) = Copier([there], [source]).run()
        assert torch.equal(there, source.to(dtype))
        assert found == wordsum(there.cpu().view(torch.uint8))


def test_what_is_no_box_of_words_goes_through_torch_with_the_same_sums(launches):
    there = [torch.zeros(shape, device=DEVICE) for shape in ((16, 16), (5,), (16, 16), (3, 7))]
    sources = [
        torch.randn(16, 16).t(),
        torch.randn(5),
        torch.randn(16, 16),
        torch.randn(3, 7).double(),
    ]
    sources = [source.to(DEVICE) for source in sources]
    copies = Copier(there)
    for _ in range(2):
        found = copies.run(sources)
        for one, source in zip(there, sources, strict=True):
            assert torch.equal(one, source.float())
        assert found == [wordsum(one.cpu().reshape(-1).view(torch.uint8)) for one in there]
        for one in there:
            one.zero_()
    assert launches == [1, 1]


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_a_summer_reads_dense_tensors_in_one_launch(launches):
    tensors = [torch.randn(64, 64, device=DEVICE), torch.randn(8, 8, device=DEVICE).t()]
    assert Summer(tensors).run() == [
        wordsum(tensor.contiguous().cpu().reshape(-1).view(torch.uint8)) for tensor in tensors
    ]
    assert launches == [1]
