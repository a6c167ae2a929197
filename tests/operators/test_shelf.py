"""Tensors that are put aside have their values again, and their memory is at others' disposal
meanwhile.
"""

import os
from pathlib import Path

import pytest
import torch

from dataflow.system.files import RunFolderError
from operators.models.read_weights import Shelf, return_freed_memory

MIB = 1 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_shelf_takes_other_tensors_each_time_and_those_that_share_memory_once(
    tmp_path: Path,
) -> None:
    shelf = Shelf(tmp_path)
    first = torch.arange(6.0)
    shelf.park([first])
    shelf.back()
    other = torch.arange(10.0, 20.0)
    part = other[2:5]
    shelf.park([other, part, torch.empty(0)])
    assert other.untyped_storage().nbytes() == 0
    shelf.park([first])
    shelf.back()
    assert torch.equal(other, torch.arange(10.0, 20.0)) and torch.equal(
        part, torch.arange(12.0, 15.0)
    )
    assert torch.equal(first, torch.arange(6.0))
    shelf.close()


def test_values_come_back_bit_for_bit_and_forgotten_ones_only_their_memory(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    kept = [torch.randn(300_001), torch.randn(7, 3).bfloat16(), torch.tensor([float("nan"), -0.0])]
    before = [tensor.clone() for tensor in kept]
    lost = torch.ones(1000)
    for _ in range(3):
        shelf.park([*kept, lost], forget=[lost])
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in [*kept, lost])
        assert not list(tmp_path.iterdir()), "the file has no name, so that nothing is left of it"
        shelf.back()
        for tensor, was in zip(kept, before, strict=True):
            assert torch.equal(tensor.view(torch.uint8), was.view(torch.uint8))
    assert lost.fill_(2.0).sum() == 2000
    shelf.close()


def test_the_memory_of_what_is_put_aside_is_given_back_to_the_system(tmp_path: Path) -> None:
    shelf, tensors = Shelf(tmp_path), [torch.ones(MIB) for _ in range(16)]
    awake = resident()
    shelf.park(tensors)
    return_freed_memory()
    assert awake - resident() > 60 * MIB
    shelf.back()
    assert resident() > awake - 16 * MIB and all(tensor.sum() == MIB for tensor in tensors)
    shelf.close()


def test_a_disk_that_refuses_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"putting memory aside in '.*gone' failed"):
        Shelf(tmp_path / "gone").park([torch.ones(3)])
