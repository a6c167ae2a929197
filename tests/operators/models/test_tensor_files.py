"""Parts of tensors in safetensors files: what is read is what lies there, what is written others
read.
"""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from operators.models import tensor_files
from operators.models.tensor_files import content_of, laid_out, read_part, write_part

PARTS = [
    ((7, 10), (0, 0), (7, 10)),
    ((7, 10), (2, 0), (3, 10)),
    ((7, 10), (1, 3), (5, 4)),
    ((4, 6, 8), (1, 0, 0), (2, 6, 8)),
    ((4, 6, 8), (1, 2, 0), (3, 3, 8)),
    ((4, 6, 8), (0, 1, 5), (4, 4, 3)),
    ((4, 6, 8), (3, 2, 0), (1, 3, 8)),
    ((9,), (4,), (5,)),
    ((), (), ()),
    ((5, 4), (5, 0), (0, 4)),
]


@pytest.fixture(params=[8 << 20, 100], ids=["large buffer", "small buffer"])
def buffer(request, monkeypatch):
    monkeypatch.setattr(tensor_files, "BUFFER_BYTES", request.param)
    monkeypatch.setattr(tensor_files, "LONG_RUN_BYTES", 64 << 10 if request.param > 100 else 16)


def cut(whole, offsets, sizes):
    return whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "offsets", "sizes"), PARTS, ids=str)
def test_a_part_that_is_read_is_that_part(shape, offsets, sizes, dtype, buffer, tmp_path):
    whole = torch.randn(shape).to(dtype)
    save_file({"other": torch.randn(3), "it": whole}, tmp_path / "file")
    stored = content_of(tmp_path / "file").tensors["it"]
    assert (stored.shape, stored.dtype) == (shape, dtype)
    into = {
        "its own bytes": torch.full(sizes, 7.0, dtype=dtype),
        "cast": torch.full(sizes, 7.0, dtype=torch.float64),
        "strided": torch.full((*sizes[:-1], 2 * sizes[-1]), 7.0, dtype=dtype)[..., ::2]
        if sizes
        else None,
    }
    file = os.open(tmp_path / "file", os.O_RDONLY)
    for tensor in filter(lambda each: each is not None, into.values()):
        read_part(file, stored, offsets, tensor)
        assert torch.equal(tensor, cut(whole, offsets, sizes).to(tensor.dtype))
    os.close(file)


@pytest.mark.parametrize(("shape", "offsets", "sizes"), PARTS, ids=str)
def test_a_part_that_is_written_changes_nothing_beside_it(shape, offsets, sizes, buffer, tmp_path):
    shapes = {
        "a": ((3,), torch.bfloat16),
        "it": (shape, torch.float32),
        "z": ((2, 2), torch.float32),
    }
    header, size, stored = laid_out(tmp_path / "file", shapes, {"format": "pt"})
    assert len(header) % 8 == 0 and {
        place.begin % place.dtype.itemsize for place in stored.values()
    } == {0}
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.pwrite(file, header, 0)
    os.ftruncate(file, size)
    part = torch.randn(sizes)
    write_part(file, stored["it"], offsets, part.t().contiguous().t() if part.ndim == 2 else part)
    write_part(file, stored["a"], (0,), torch.ones(3))
    os.close(file)
    found = load_file(tmp_path / "file")
    wanted = torch.zeros(shape)
    cut(wanted, offsets, sizes).copy_(part)
    assert torch.equal(found["it"], wanted)
    assert torch.equal(found["a"], torch.ones(3).bfloat16()) and not found["z"].any()
    assert content_of(tmp_path / "file").metadata == {"format": "pt"}


def test_a_file_that_is_cut_off_or_no_file_of_tensors_is_refused(tmp_path):
    path = tmp_path / "file"
    save_file({"it": torch.randn(50, 4)}, path)
    data = path.read_bytes()
    for size in (len(data) - 1, 20, 5):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match="cut off"):
            content_of(path)
    header = json.dumps({"it": {"dtype": "F4", "shape": [1], "data_offsets": [0, 1]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"0")
    with pytest.raises(ValueError, match="F4"):
        content_of(path)
