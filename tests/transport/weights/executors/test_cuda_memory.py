"""CudaMemory asks the driver for the right things, against a driver that answers from a script."""

import gc
import weakref
from ctypes import c_char_p

import pytest
import torch

from transport.weights import SegmentError
from transport.weights.executors import cuda_ipc
from transport.weights.executors.cuda_ipc import (
    OUT_OF_MEMORY,
    PAGE_BYTES,
    CudaMemory,
    Driver,
    DriverError,
    _Block,
    tensor_at,
)

GPUS = [bytes([index]) + bytes(14) + b"\xff" for index in (7, 8)]


INVALID = 400


class Library:
    """libcuda with two GPUs: memory is a count of addresses, contexts are a stack."""

    def __init__(self, uuids=GPUS):
        self.uuids, self.stack, self.live, self.opened, self.calls = uuids, [], {}, [], []
        self.fail: dict[str, list[int]] = {}

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            if codes := self.fail.get(name):
                return codes.pop(0)
            return (
                getattr(self, f"_{name.removesuffix('_v2')}")(
                    *(getattr(a, "_obj", a) for a in arguments)
                )
                or 0
            )

        if name.startswith("cu"):
            return call
        raise AttributeError(name)

    def _cuInit(self, flags):
        assert flags.value == 0

    def _cuGetErrorName(self, code, text):
        text.value = c_char_p(f"CUDA_ERROR_{code.value}".encode()).value

    def _cuDeviceGetCount(self, count):
        count.value = len(self.uuids)

    def _cuDeviceGet(self, device, ordinal):
        device.value = ordinal.value

    def _cuDeviceGetUuid(self, uuid, device):
        uuid.bytes[:] = self.uuids[device.value]

    def _cuDevicePrimaryCtxRetain(self, context, device):
        context.value = 100 + device.value

    def _cuCtxPushCurrent(self, context):
        self.stack.append(context.value)

    def _cuCtxPopCurrent(self, context):
        context.value = self.stack.pop()

    def _cuMemAlloc(self, pointer, nbytes):
        pointer.value = (1 << 40) + len(self.calls)
        self.live[pointer.value] = (self.stack[-1], nbytes.value)

    def _cuMemFree(self, pointer):
        assert self.live.pop(pointer.value)[0] == self.stack[-1]

    def _cuIpcGetMemHandle(self, handle, pointer):
        assert self.live[pointer.value][0] == self.stack[-1]
        handle.bytes[:] = pointer.value.to_bytes(8, "little") + bytes(56)

    def _cuIpcOpenMemHandle(self, pointer, handle, flags):
        assert flags.value == 1
        pointer.value = int.from_bytes(bytes(handle.bytes), "little") + (1 << 41)
        self.opened.append((pointer.value, self.stack[-1]))

    def _cuIpcCloseMemHandle(self, pointer):
        self.opened.remove((pointer.value, self.stack[-1]))


class Placed:
    """A tensor on the GPU, as far as `export` looks at it."""

    def __init__(self, block, ordinal):
        self.block, self.ordinal = block, ordinal

    def data_ptr(self):
        return self.block.pointer

    def __len__(self):
        return self.block.__cuda_array_interface__["shape"][0]

    def zero_(self):
        return self


@pytest.fixture
def library():
    return Library()


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(CudaMemory, "_tensor", staticmethod(Placed))
    return lambda library, ordinal=0: CudaMemory(torch.device("cuda", ordinal), Driver(library))


def elsewhere(handle):
    """The handle as another process would have written it."""
    return handle | {"process": -1}


def test_a_buffer_is_an_allocation_of_whole_pages_and_goes_with_its_last_tensor(library, make):
    buffer = make(library, 1).allocate(PAGE_BYTES + 64)
    assert list(library.live.values()) == [(101, 2 * PAGE_BYTES)]
    assert buffer.block.__cuda_array_interface__["shape"] == (PAGE_BYTES + 64,)
    assert library.stack == []
    del buffer
    gc.collect()
    assert (library.live, library.stack) == ({}, [])


def test_a_handle_opens_the_buffer_as_often_as_there_are_readers(library, make):
    buffer = make(library).allocate(64)
    handle = elsewhere(make(library).export(buffer))
    assert len(handle["handle"]) == 64
    readers = [make(library).open(handle) for _ in range(3)]
    assert {len(reader) for reader in readers} == {64}
    assert len(library.opened) == 3
    readers.clear()
    gc.collect()
    assert library.opened == [] and library.live


def test_a_gpu_is_found_by_its_uuid_whatever_its_number_is_here(library, make):
    memory = make(library, 0)
    handle = elsewhere(memory.export(memory.allocate(64)))
    swapped = Library(GPUS[::-1])
    opened = make(swapped).open(handle)
    assert opened.ordinal == 1
    assert [context for _, context in swapped.opened] == [101]


def test_a_gpu_that_the_reader_does_not_see_is_an_error_that_names_the_variable(library, make):
    memory = make(library, 1)
    handle = elsewhere(memory.export(memory.allocate(64)))
    with pytest.raises(
        SegmentError,
        match=rf"found {GPUS[1].hex()}, visible .*{GPUS[0].hex()}.*CUDA_VISIBLE_DEVICES",
    ):
        make(Library(GPUS[:1])).open(handle)


def test_a_process_is_told_to_use_a_hub_for_its_own_memory(library, make):
    memory = make(library)
    buffer = memory.allocate(64)
    with pytest.raises(SegmentError, match="give both a Hub"):
        memory.open(memory.export(buffer))


def test_a_handle_that_the_driver_refuses_is_an_error_with_the_drivers_name_for_it(library, make):
    memory = make(library)
    handle = elsewhere(memory.export(memory.allocate(64)))
    library.fail["cuIpcOpenMemHandle_v2"] = [INVALID]
    with pytest.raises(
        SegmentError,
        match=r"process -1 cannot be opened; found cuIpcOpenMemHandle_v2: CUDA_ERROR_400",
    ):
        make(library).open(handle)
    assert library.stack == []


def test_a_full_gpu_is_tried_again_once_torch_has_given_back_what_it_keeps(
    library, make, monkeypatch
):
    given = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append(True))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 20, 80 << 30))
    library.fail["cuMemAlloc_v2"] = [OUT_OF_MEMORY]
    buffer = make(library).allocate(64)
    assert given == [True] and buffer.data_ptr() in library.live
    library.fail["cuMemAlloc_v2"] = [OUT_OF_MEMORY, OUT_OF_MEMORY]
    with pytest.raises(
        SegmentError, match=r"cuMemAlloc_v2: CUDA_ERROR_2 \(2\), 3 of 81920 MiB free on GPU 0"
    ):
        make(library).allocate(64)


def test_giving_back_after_a_fault_on_the_gpu_is_quiet(library):
    driver = Driver(library)
    library.fail["cuMemFree_v2"] = [INVALID]
    block = _Block(driver.allocate(0, 64), 64, driver.free, 0)
    del block
    gc.collect()
    assert library.calls.count("cuMemFree_v2") == 1 and library.stack == []


def test_a_driver_that_does_not_start_is_an_error_that_names_another_executor(library):
    library.fail["cuInit"] = [100]
    with pytest.raises(
        SegmentError, match=r"found cuInit: CUDA_ERROR_100 \(100\); use SharedMemory"
    ):
        Driver(library)


def test_every_failed_call_tells_its_name_and_code(library):
    driver = Driver(library)
    library.fail["cuMemAlloc_v2"] = [INVALID]
    with pytest.raises(DriverError, match=r"cuMemAlloc_v2: CUDA_ERROR_400 \(400\)") as caught:
        driver.allocate(0, 64)
    assert caught.value.code == INVALID


def test_a_peers_buffer_is_written_from_the_senders_own_gpu_and_context(make, library, monkeypatch):
    opened = []
    monkeypatch.setattr(
        cuda_ipc, "tensor_at", lambda *place: (opened.append(place), Placed(place[3], 0))[1]
    )
    theirs = make(library, 1)
    handle = {**theirs.export(theirs.allocate(64)), "process": -1}
    mine = Library()
    buffer = make(mine, 0).open(handle, to_write=True)
    assert mine.opened == [(buffer.data_ptr(), 100)], "100 is the context of GPU 0"
    assert opened[0][:3] == (buffer.data_ptr(), 64, torch.device("cuda", 0))
    del buffer
    opened.clear()
    gc.collect()
    assert not mine.opened


def test_memory_at_an_address_stays_while_a_tensor_of_it_does():
    source, block = torch.arange(64, dtype=torch.uint8), type("Block", (), {})()
    gone = weakref.ref(block)
    tensor = tensor_at(source.data_ptr(), 64, torch.device("cpu"), block)
    part = torch.nn.Parameter(torch.zeros(4, dtype=torch.int16), requires_grad=False)
    part.data = tensor[8:16].view(torch.int16)
    del tensor, block
    gc.collect()
    assert gone() is not None
    assert part.data_ptr() == source.data_ptr() + 8
    assert part.tolist() == source[8:16].view(torch.int16).tolist()
    del part
    gc.collect()
    assert gone() is None
