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

from transport.native import Copier, copier, sums, triton_words
from transport.native.sums import pairs, wordsum
from transport.native.triton_words import WordPlan

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = [64, 8, 1, 0, 13, 8 * 4096, 8 * 4096 * 2 + 5, 8 * 4096 - 7]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(triton_words, "CHUNK_WORDS", 4096)


def filled(nbytes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def places(sizes):
    """Offsets at multiples of 64 bytes, and the bytes of all."""
    ends = np.cumsum([-(-size // 64) * 64 for size in sizes])
    return [0, *ends[:-1].tolist()], int(ends[-1])


def test_sums_are_those_of_the_processor_whatever_lies_between_the_ranges():
    offsets, nbytes = places(SIZES)
    buffer = filled(nbytes).to(DEVICE)
    found = WordPlan(SIZES, DEVICE).sums([buffer.data_ptr() + offset for offset in offsets])
    assert np.array_equal(found, pairs(buffer.cpu(), offsets, SIZES))


def test_a_copy_moves_every_word_and_nothing_else_and_sums_it():
    sizes = [size // 8 * 8 for size in SIZES]
    offsets, nbytes = places(sizes)
    sources = [filled(size + 16, seed).to(DEVICE)[8 : 8 + size] for seed, size in enumerate(sizes)]
    buffer = torch.full((nbytes,), 7, dtype=torch.uint8, device=DEVICE)
    expected = buffer.cpu()
    for offset, source in zip(offsets, sources, strict=True):
        expected[offset : offset + len(source)] = source.cpu()
    found = WordPlan(sizes, DEVICE).copy(
        [buffer.data_ptr() + offset for offset in offsets],
        [source.data_ptr() for source in sources],
    )
    assert torch.equal(buffer.cpu(), expected)
    assert np.array_equal(found, pairs(expected, offsets, sizes))


def test_a_plan_serves_other_memory_of_the_same_sizes():
    plan = WordPlan([4096, 64], DEVICE)
    for seed in range(3):
        buffer = filled(8192, seed).to(DEVICE)
        found = plan.sums([buffer.data_ptr() + 64 * seed, buffer.data_ptr() + 8128])
        assert np.array_equal(found, pairs(buffer.cpu(), [64 * seed, 8128], [4096, 64]))


def test_nothing_has_the_sum_of_nothing():
    assert WordPlan([], DEVICE).sums([]).shape == (0, 2)
    assert WordPlan([0, 0], DEVICE).sums([0, 0]).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("base", [True, False])
def test_a_copier_on_a_gpu_copies_words_in_one_launch_and_the_rest_by_torch(monkeypatch, base):
    launches = []
    copy = WordPlan.copy
    monkeypatch.setattr(
        WordPlan, "copy", lambda plan, *to: (launches.append(len(to[0])), copy(plan, *to))[1]
    )
    buffer = torch.zeros(4096, dtype=torch.uint8, device=DEVICE)
    there = [buffer[at : at + 512] for at in range(0, 4096, 512)]
    views = [tensor.view(torch.bfloat16).view(16, 16) for tensor in there]
    sources = [
        torch.full((16, 16), float(n), dtype=torch.bfloat16, device=DEVICE) for n in range(8)
    ]
    sources[3] = sources[3].float()
    sources[5] = torch.arange(256, device=DEVICE).bfloat16().view(16, 16).t()
    made = Copier(views, base=buffer if base else None)
    for _ in range(2):
        with monkeypatch.context() as as_on_a_gpu:
            for module in (sums, copier):
                as_on_a_gpu.setattr(module, "by_triton", lambda device: True)
            as_on_a_gpu.setattr(copier, "box", lambda there, here: None)
            found = made.run(sources)
        assert launches == [3, 1, 2]
        launches.clear()
        for view, source in zip(views, sources, strict=True):
            assert torch.equal(view, source.bfloat16())
        assert found == [wordsum(tensor.cpu()) for tensor in there]
        buffer.zero_()
