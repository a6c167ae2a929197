"""The C kernels of the transport: copies, casts and sums, against numpy and torch; the same without
a compiler.
"""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from rigs.examples import examples
from torch.multiprocessing.reductions import StorageWeakRef

from transport.compile import compiled
from transport.native import (
    Copier,
    Follower,
    Summer,
    build,
    copier,
    dense_bytes,
    sums,
    wordsum,
    wordsums,
)

MODULUS = 1 << 64


ODD_SIZES = st.one_of(st.integers(0, 300), st.sampled_from([4095, 4096, 65537]))


TROUBLE = [
    0.0,
    -0.0,
    1.0,
    65504.0,
    65519.996,
    65520.0,
    1e38,
    3.4e38,
    2**-14,
    2**-24,
    2**-25,
    1.5 * 2**-25,
    1e-40,
    2e-8,
]


needs_compiler = pytest.mark.skipif(build.library() is None, reason="no C compiler")


@pytest.fixture(params=["c", "numpy"])
def kernels(request, monkeypatch):
    """With the compiled kernels, and as if there were no compiler."""
    if request.param == "numpy":
        for module in (sums, copier):
            monkeypatch.setattr(module, "library", lambda: None)
    elif build.library() is None:
        pytest.skip("no C compiler")
    return request.param


def oracle(data: bytes) -> int:
    """The checksum as its definition says it, in integers without a bound."""
    padded = data + bytes(-len(data) % 8)
    words = np.frombuffer(padded, "<u8").astype(object)
    s1, s2 = int(words.sum()) % MODULUS, int((words * np.arange(1, len(words) + 1)).sum()) % MODULUS
    return (s1 + (s2 << 32 | s2 >> 32)) % MODULUS


def noise(size: int, seed: int = 0) -> torch.Tensor:
    """Random bytes, uint8[size]."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, np.uint8))


def contents(tensor: torch.Tensor) -> bytes:
    """The elements' bytes, densely laid out."""
    return dense_bytes(tensor).numpy().tobytes()


@examples(60)
@given(size=ODD_SIZES, skip=st.integers(0, 70), seed=st.integers(0, 99))
def test_every_way_to_sum_gives_what_the_definition_says(size, skip, seed):
    data = noise(size + skip, seed)[skip:]
    found = {wordsum(data), *sums.folded(sums._by_numpy(data.numpy())[None]).tolist()}
    found |= set(sums.folded(sums.by_torch(data).numpy().view(np.uint64)[None]).tolist())
    assert found == {oracle(data.numpy().tobytes())}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_tensors_are_summed_where_they_lie(kernels, dtype):
    full = noise(64 * 96 * 4 * dtype.itemsize).view(dtype).view(64, 96, 4)
    boxes = [
        full,
        full[3:60],
        full[:, 5:90],
        full[:, ::2],
        full[1:5, 7, 1:3],
        full[..., 2],
        full.transpose(0, 2),
    ]
    boxes += [full[0, 0, 0], full.flatten()[1:-3], noise(5 << 20)[3:].view(-1, 1)[:, 0]]
    summer = Summer(boxes)
    for _ in range(2):
        assert summer.run() == [oracle(contents(each)) for each in boxes]
        full.view(torch.uint8).bitwise_xor_(noise(1, 3).item())


def test_ranges_are_summed_each_from_its_own_first_byte(kernels):
    data = noise(5000)
    offsets, sizes = [0, 64, 1000, 5000, 17], [64, 3, 4000, 0, 4001]
    expected = [
        oracle(data[at : at + size].numpy().tobytes())
        for at, size in zip(offsets, sizes, strict=True)
    ]
    assert wordsums(data, offsets, sizes) == expected


def test_sums_of_pieces_join_to_the_sum_of_the_whole(kernels):
    data = noise(1003)
    first, second = (sums.pairs(data, [at], [size])[0] for at, size in ((0, 400), (400, 603)))
    assert sums.folded(sums.joined(first, second, 50)[None]).tolist() == [wordsum(data)]


@examples(60)
@given(size=st.integers(1, 2000), data=st.data())
def test_a_flipped_bit_is_found_wherever_it_is(size, data):
    buffer = noise(size)
    before = wordsum(buffer)
    buffer[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert wordsum(buffer) != before


@examples(60)
@given(words=st.integers(2, 400), data=st.data())
def test_swapped_words_are_found(words, data):
    buffer = noise(8 * words).view(torch.int64)
    before = wordsum(dense_bytes(buffer))
    one, other = data.draw(st.integers(0, words - 1)), data.draw(st.integers(0, words - 1))
    if buffer[one] == buffer[other]:
        return
    buffer[[one, other]] = buffer[[other, one]]
    assert wordsum(dense_bytes(buffer)) != before


@pytest.mark.parametrize("threads", [1, 3])
@examples(40)
@given(
    sizes=st.lists(ODD_SIZES, min_size=1, max_size=5),
    skip=st.integers(0, 65),
    seed=st.integers(0, 99),
)
@example(sizes=[(3 << 20) + 5, 0, 1, 3 << 20], skip=0, seed=0)
@example(sizes=[(3 << 20) + 5], skip=1, seed=0)
@example(sizes=[3 << 20], skip=8, seed=0)
def test_bytes_are_copied_as_they_are_and_nothing_beside_them(threads, sizes, skip, seed):
    sources = [noise(size, seed + index) for index, size in enumerate(sizes)]
    buffers = [torch.full((size + skip + 64,), 170, dtype=torch.uint8) for size in sizes]
    destinations = [buffer[skip : skip + size] for buffer, size in zip(buffers, sizes, strict=True)]
    found = Copier(destinations, sources, threads=threads).run()
    large = sum(sizes) > 1 << 20
    for buffer, source, checksum in zip(buffers, sources, found, strict=True):
        assert torch.equal(buffer[skip : skip + len(source)], source)
        assert (buffer[:skip] == 170).all()
        assert (buffer[skip + len(source) :] == 170).all()
        assert checksum == (wordsum(source) if large else oracle(source.numpy().tobytes()))


@pytest.mark.parametrize("threads", [1, 3])
@examples(60)
@given(
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float64]),
)
def test_strides_do_not_matter_to_a_copy_or_to_its_sum(threads, data, dtype):
    shape = data.draw(st.lists(st.one_of(st.integers(0, 6), st.just(24)), min_size=0, max_size=4))
    whole = [length + data.draw(st.integers(0, 3)) for length in shape]
    order = data.draw(st.permutations(range(len(shape))))

    def strided(fill):
        tensor = fill(whole).permute(order)
        for axis, length in enumerate(shape[index] for index in order):
            tensor = tensor.narrow(axis, tensor.shape[axis] - length, length)
        return tensor

    source = strided(lambda whole: (torch.randn(whole) * 50).to(dtype))
    dense = torch.zeros(source.shape, dtype=dtype)
    for destination in (dense, strided(lambda whole: torch.zeros(whole, dtype=dtype))):
        (found,) = Copier([destination], [source], threads=threads).run()
        assert torch.equal(destination, source)
        assert found == oracle(contents(source))


def test_long_rows_of_odd_lengths_are_copied_by_several_threads():
    source, destination = (
        noise(3000 * 1501).view(3000, 1501),
        torch.zeros(3000, 1600, dtype=torch.uint8),
    )
    view = destination[:, 7:1508]
    (found,) = Copier([view], [source], threads=4).run()
    assert torch.equal(view, source)
    assert (destination.sum(1) == source.sum(1)).all()
    assert found == wordsum(dense_bytes(source))


def bits(values: torch.Tensor) -> torch.Tensor:
    """The elements' bits, all NaNs alike."""
    return torch.where(values.isnan(), torch.full_like(values, torch.nan), values).view(torch.int16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_rounds_to_the_nearest_and_ties_to_even_for_every_kind_of_float(kernels, dtype):
    patterns = np.random.default_rng(0).integers(0, 1 << 32, 300_000, np.uint32)
    ties = np.arange(1 << 16, dtype=np.uint32) << 16
    halves = (
        torch.arange(-(1 << 15), 1 << 15)
        .to(torch.int16)
        .view(torch.float16)
        .float()
        .numpy()
        .view(np.uint32)
    )
    near = [
        ties | 0x8000,
        ties | 0x7FFF,
        ties | 0x8001,
        halves,
        halves + 0x1000,
        halves + 0xFFF,
        halves + 0x1001,
    ]
    trouble = np.array([sign * value for value in TROUBLE for sign in (1, -1)], np.float32).view(
        np.uint32
    )
    source = torch.from_numpy(np.concatenate([patterns, *near, trouble])).view(torch.float32)
    destination = torch.zeros(len(source), dtype=dtype)
    (found,) = Copier([destination], [source]).run()
    assert torch.equal(bits(destination), bits(source.to(dtype)))
    assert found == wordsum(dense_bytes(destination))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@examples(40)
@given(rows=st.integers(1, 5), columns=st.integers(1, 5000), skip=st.integers(0, 3))
def test_strided_casts_are_summed_as_they_are_written(dtype, rows, columns, skip):
    source = torch.randn(rows, columns + skip)[:, skip:]
    destination = torch.zeros(rows, columns + skip, dtype=dtype)[:, :columns]
    (found,) = Copier([destination], [source]).run()
    assert torch.equal(destination, source.to(dtype))
    assert found == oracle(contents(destination))


def test_what_the_kernel_cannot_do_is_done_by_torch_with_the_same_sums(kernels):
    sources = [
        torch.arange(6),
        torch.randn(5, 7).t(),
        torch.randn(4, dtype=torch.float64),
        torch.randn(100),
    ]
    destinations = [
        torch.zeros(6),
        torch.zeros(7, 5),
        torch.zeros(4, dtype=torch.bfloat16),
        torch.zeros(100),
    ]
    found = Copier(destinations, sources).run()
    for destination, source, checksum in zip(destinations, sources, found, strict=True):
        assert torch.equal(destination, source.to(destination.dtype))
        assert checksum == oracle(contents(destination))


def test_sources_that_move_change_shape_or_type_are_compiled_anew(kernels):
    destination = torch.zeros(64, 64)
    copies = Copier([destination])
    square = torch.randn(64, 64)
    for source in (
        square,
        square.clone(),
        square.t(),
        square.bfloat16(),
        square.view(torch.int32),
        square,
    ):
        assert copies.run([source]) == [oracle(contents(source.float()))]
        assert torch.equal(destination, source.float())


def test_sources_named_at_each_run_are_not_held():
    copies, fresh = Copier([torch.zeros(8)]), torch.randn(8)
    memory = StorageWeakRef(fresh.untyped_storage())
    copies.run([fresh])
    del fresh
    assert memory.expired()


@needs_compiler
@pytest.mark.parametrize("threads", [1, 4])
def test_the_watermark_never_passes_a_byte_that_is_not_written(threads):
    sizes = [(5 << 20) + 8, 64, 0, 3 << 20, 8, 2 << 20]
    offsets = np.cumsum([0, *(-(-size // 64) * 64 for size in sizes)]).tolist()
    buffer = torch.zeros(offsets[-1], dtype=torch.uint8)
    progress = torch.tensor([1, 0])
    destinations = [buffer[at : at + size] for at, size in zip(offsets, sizes, strict=False)]
    sources = [torch.full((size,), 7, dtype=torch.uint8) for size in sizes]
    copies = Copier(destinations, sources, threads=threads, base=buffer, progress=progress)
    expected, marks = torch.zeros_like(buffer), [0]
    for destination, at in zip(sources, offsets, strict=False):
        expected[at : at + len(destination)] = 7

    def watch():
        while marks[-1] < len(buffer):
            mark = int(progress[1])
            assert mark >= marks[-1]
            assert torch.equal(buffer[marks[-1] : mark], expected[marks[-1] : mark])
            marks.append(mark)

    watcher = threading.Thread(target=watch)
    watcher.start()
    copies.run()
    watcher.join(20)
    assert int(progress[1]) == len(buffer)
    assert marks[-1] == len(buffer)


def ended(follower: Follower) -> Follower:
    """Wait until it has ended."""
    deadline = time.monotonic() + 20
    while follower.running:
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    return follower


@needs_compiler
def test_who_follows_sums_what_is_below_the_watermark_as_it_rises():
    buffer, progress = noise(4 << 20), torch.tensor([5, 0])
    follower = Follower(buffer, [0, 1 << 20], [1000, 3 << 20], progress, 5)
    for mark in (0, 999, 1 << 20, (4 << 20) - 1):
        progress[1] = mark
        time.sleep(0.002)
        assert follower.running
        assert follower.pairs is None
    progress[1] = 4 << 20
    expected = wordsums(buffer, [0, 1 << 20], [1000, 3 << 20])
    assert sums.folded(ended(follower).pairs).tolist() == expected
    follower.close()


@needs_compiler
@pytest.mark.parametrize("stop", ["another version", "closed"])
def test_who_follows_stops_when_the_writer_goes_on_or_it_is_told_to(stop):
    buffer, progress = noise(1 << 20), torch.tensor([5, 64])
    follower = Follower(buffer, [0], [1 << 20], progress, 5)
    if stop == "closed":
        follower.close()
    else:
        progress[0] = 6
        ended(follower)
    assert not follower.running
    assert follower.pairs is None
    follower.close()


@needs_compiler
def test_a_compiler_that_fails_is_no_compiler(monkeypatch, tmp_path):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("DATAFLOW_MARCH", raising=False)
    assert (
        compiled.__wrapped__((Path(build.__file__).with_name("kernels.c"),), (build.FLAGS,)) is None
    )
    assert list((tmp_path / "dataflow-rl").iterdir()) == []
