"""Buffers without a name: one process opens another's by number, and no other file; a GPU's stays
while it is open.
"""

import errno
import os
from pathlib import Path

import pytest
import torch

from transport.weights import SegmentError
from transport.weights.executors import peer_memory
from transport.weights.executors.peer_memory import HostMemory, PeerMemory


@pytest.fixture(params=["main", "device"])
def memory(request, tmp_path):
    return PeerMemory(HostMemory(tmp_path) if request.param == "device" else None)


def write(memory, handle, value, told):
    """Another process writes into it."""
    opened = memory.open(handle)
    opened.buffer.fill_(value)
    opened.close()
    told.set()


def test_another_process_writes_into_a_buffer(memory, start, processes):
    own, told = memory.allocate(5000), processes.Event()
    child = start(write, memory, own.handle, 7, told)
    assert told.wait(30)
    child.join(10)
    assert own.buffer.tolist() == [7] * 5000
    own.release()


def test_a_buffer_has_no_name_and_is_closed_to_other_users(tmp_path):
    own = PeerMemory(folder=tmp_path).allocate(100)
    found = os.fstat(own._file)
    assert (found.st_nlink, found.st_mode & 0o777, found.st_blocks > 0) == (0, 0o600, True)
    assert not os.get_inheritable(own._file) and list(tmp_path.iterdir()) == []
    own.release()


def test_a_released_buffer_cannot_be_opened_nor_another_file_in_its_place(memory):
    own = memory.allocate(100)
    handle, file = own.handle, own._file
    own.release()
    with pytest.raises(
        SegmentError, match=f"process {os.getpid()} cannot be opened; found No such file"
    ):
        memory.open(handle)
    other = os.open("/dev/null", os.O_RDWR)
    os.dup2(other, file)
    with pytest.raises(SegmentError, match="found No such file"):
        memory.open(handle)
    os.close(file)
    if other != file:
        os.close(other)


def test_what_a_sender_that_is_late_has_open_is_its_own_and_goes_with_it(memory, tmp_path):
    own = memory.allocate(4096)
    opened = memory.open(own.handle)
    own.buffer.fill_(1)
    own.release()
    assert opened.buffer.tolist() == [1] * 4096
    again = memory.allocate(4096)
    again.buffer.fill_(2)
    opened.buffer.fill_(77)
    assert again.buffer.tolist() == [2] * 4096 and opened.buffer.tolist() == [77] * 4096
    opened.close()
    again.release()
    peer_memory.departing.release()
    assert peer_memory.departing._held == [] and list(tmp_path.iterdir()) == []


def test_full_shared_memory_is_an_error_that_says_how_much_is_free(memory, monkeypatch):
    taken = []

    def full(file, *_):
        taken.append(os.fstat(file))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def is_taken(file):
        # Others of this process may open and close files meanwhile: a number says nothing.
        try:
            return any(os.path.samestat(os.fstat(file), each) for each in taken)
        except OSError:
            return False

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        SegmentError, match=r"of 3 MiB; found No space left on device, \d+ MiB free in /dev/shm"
    ):
        memory.allocate(3 << 20)
    assert len(taken) == 1 and not any(
        is_taken(int(each.name)) for each in Path("/proc/self/fd").iterdir()
    )


def test_a_tensor_of_a_released_buffer_keeps_its_bytes(memory):
    own = memory.allocate(64)
    view = own.buffer.view(torch.int64)
    view.fill_(5)
    own.release()
    assert view.tolist() == [5] * 8
