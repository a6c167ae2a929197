"""CUDA IPC: gates and leases keep device memory whole. On a processor over files, on a GPU between
real processes.
"""

import fcntl
import os
import signal
import time
from contextlib import closing

import pytest
import torch

from transport.weights import (
    AddressTaken,
    ChecksumMismatch,
    FlatLayout,
    MessageError,
    SegmentError,
    WeightReader,
    WeightWriter,
)
from transport.weights.executors import cuda_ipc, peer_memory, shared_memory
from transport.weights.executors.cuda_ipc import CudaIpc, CudaMemory
from transport.weights.executors.peer_memory import HostMemory

from .. import programs
from ..conftest import leftovers, parameters, values
from ..programs import LAYOUT, PACE, model

pytestmark = pytest.mark.usefixtures("clean_shm")


SMALL = FlatLayout.of(parameters())


class Watched(HostMemory):
    """Notes whether the gate could be passed when the device was waited for."""

    def __init__(self, folder):
        super().__init__(folder)
        self.site, self.seen = None, []

    def passable(self, how):
        for path in self.site.place.folder.glob(f"{self.site.place.prefix}*"):
            if path.stat().st_size == shared_memory.HEADER_BYTES + cuda_ipc.HANDLE_BYTES:
                with path.open() as file:
                    try:
                        fcntl.flock(file, how | fcntl.LOCK_NB)
                    except BlockingIOError:
                        return False
        return True

    def written(self, buffer):
        self.seen.append(("written", self.passable(fcntl.LOCK_SH)))

    def read(self, buffer):
        self.seen.append(("read", self.passable(fcntl.LOCK_EX)))


@pytest.fixture
def memory(tmp_path):
    return HostMemory(tmp_path)


@pytest.fixture
def site(tmp_path, memory):
    return CudaIpc(f"ipc://{tmp_path}/w.sock", "cpu", memory=memory)


@pytest.fixture(autouse=True)
def nothing_departs_for_good():
    yield
    peer_memory.departing.release()
    assert peer_memory.departing._held == []


def buffers(memory):
    return len(list(memory.folder.glob("memory-*")))


def adopted(writer, reader, version):
    deadline = time.monotonic() + programs.DEADLINE_S
    while not any(status.version == version for status in writer.readers):
        assert time.monotonic() < deadline
        writer.poll()
        if reader.poll():
            reader.adopt()


def test_a_gpu_without_a_number_is_the_one_that_is_current(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    found = [str(peer_memory.numbered(each)) for each in ("cuda", "cuda:1", torch.device("cpu"))]
    assert found == ["cuda:3", "cuda:1", "cpu"]


def test_a_closed_writers_buffer_stays_whole_until_its_reader_has_closed_it(site, memory):
    mine = parameters()
    writer, reader = WeightWriter(SMALL, site), WeightReader(site, "generator-0")
    reader.attach(mine)
    writer.publish(1, parameters(1))
    adopted(writer, reader, 1)
    pointer = mine["up"].data_ptr()
    writer.close()
    assert values(mine) == {1} and mine["up"].data_ptr() == pointer
    assert buffers(memory) == 1
    reader.close()
    assert values(mine) == {1} and mine["up"].data_ptr() != pointer
    peer_memory.departing.release()
    assert buffers(memory) == 0


def test_device_memory_is_overwritten_once_its_exporter_lets_go(memory):
    buffer = memory.allocate(100)
    opened = memory.open(memory.export(buffer))
    buffer.fill_(7)
    assert opened.tolist() == [7] * 100
    del buffer
    assert opened.tolist() == [255] * 100
    assert buffers(memory) == 0


def test_the_gate_moves_only_after_the_device_was_waited_for(tmp_path):
    memory = Watched(tmp_path)
    site = CudaIpc(f"ipc://{tmp_path}/w.sock", "cpu", memory=memory)
    memory.site = site
    with (
        closing(WeightWriter(SMALL, site)) as writer,
        closing(WeightReader(site, "generator-0", adopt="copy")) as reader,
    ):
        reader.attach(parameters())
        writer.publish(1, parameters(1))
        adopted(writer, reader, 1)
    assert memory.seen == [("written", False), ("read", False)]


def test_a_flipped_byte_on_the_device_is_found(site):
    mine = parameters()
    with (
        closing(WeightWriter(SMALL, site)) as writer,
        closing(WeightReader(site, "generator-0")) as reader,
    ):
        reader.attach(mine)
        writer.publish(1, parameters(1))
        adopted(writer, reader, 1)
        writer.publish(2, parameters(2))
        while not (offer := reader.poll()):
            writer.poll()
        writer._segments[offer.segment].buffer[SMALL.tensors[1].offset + 5] ^= 1
        with pytest.raises(ChecksumMismatch, match="keeps version 1"):
            reader.adopt()
        assert values(mine) == {1}


def test_memory_that_cannot_be_opened_is_an_error_while_its_writer_lives_and_nothing_afterwards(
    site, memory
):
    reader = site.reader()
    writer = site.writer(lambda: None)
    segment = writer.segment(4096)
    segment.unseal(1)
    for path in memory.folder.glob("memory-*"):
        path.rename(memory.folder / "gone")
    with pytest.raises(SegmentError, match=r"cannot be opened; found .*No such file"):
        reader.segment(segment.key, 4096)
    writer.close()
    assert reader.segment(segment.key, 4096) is None
    segment.retire()
    segment.close()
    assert reader.segment(segment.key, 4096) is None
    reader.close()


def test_a_segment_of_another_size_or_without_its_lease_is_not_opened(site):
    reader, writer = site.reader(), site.writer(lambda: None)
    segment = writer.segment(4096)
    assert reader.segment(segment.key, 8192) is None
    segment._lease.retire()
    assert reader.segment(segment.key, 4096) is None
    segment.retire()
    segment.close()
    writer.close()
    reader.close()


def test_a_handle_that_cannot_be_read_is_an_error(site):
    reader, writer = site.reader(), site.writer(lambda: None)
    segment = writer.segment(4096)
    segment._gate.buffer.fill_(0xC1)
    with pytest.raises(MessageError, match="handle cannot be read; .* same release"):
        reader.segment(segment.key, 4096)
    segment.retire()
    segment.close()
    writer.close()
    reader.close()


def test_the_site_travels_to_other_processes(site):
    from multiprocessing.reduction import ForkingPickler

    other = ForkingPickler.loads(ForkingPickler.dumps(site))
    assert (other.address, other.device, other.place.folder) == (
        site.address,
        site.device,
        site.place.folder,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_driver_the_error_names_the_executor_to_use(tmp_path):
    with pytest.raises(
        SegmentError, match=r"needs a GPU and NVIDIA's driver; found .*; use SharedMemory"
    ):
        WeightWriter(SMALL, CudaIpc(f"ipc://{tmp_path}/w.sock"))


def until(writer, condition):
    deadline = time.monotonic() + programs.DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, writer.readers
        writer.poll()
        time.sleep(0.001)


def status(writer, name):
    return next((found for found in writer.readers if found.name == name), None)


def holds(writer, name, version):
    return status(writer, name) is not None and status(writer, name).version == version


def publish(writer, version, device="cpu"):
    writer.publish(version, {name: tensor.to(device) for name, tensor in model(version).items()})
    until(writer, lambda: writer.pending is None)


class Stuck(HostMemory):
    """A device that does not finish what it writes the second time."""

    writes = 0

    def written(self, buffer):
        self.writes += 1
        if self.writes == 2:
            (self.folder / "stuck").touch()
            time.sleep(programs.DEADLINE_S)


def linger(address, folder):
    """A generator whose device never finishes its first transfer; on a GPU without a folder."""
    if folder is None:
        torch.set_default_device("cuda")
        memory = CudaMemory(torch.device("cuda"))
    else:
        memory = HostMemory(folder)
    memory.read = lambda buffer: time.sleep(programs.DEADLINE_S)
    mine = model()
    reader = WeightReader(CudaIpc(address, memory=memory), "victim", adopt="copy", pace=PACE)
    reader.attach(mine)
    reader.wait(1, timeout_s=programs.DEADLINE_S)


def stop_in_a_publish(address, folder):
    """A trainer that publishes version 1, is heard, and stops in version 2 before the device has
    written it.
    """
    writer = WeightWriter(LAYOUT, CudaIpc(address, memory=Stuck(folder)), pace=PACE)
    writer.publish(1, model(1))
    while not any(status.version == 1 for status in writer.readers):
        writer.poll()
    writer.publish(2, model(2))


def on_gpu(program, *arguments):
    """A program of the tests with its parameters on the GPU."""
    torch.set_default_device("cuda")
    program(*arguments)


def keep(address, adopted, killed):
    """A generator that goes on computing with version 1 when its trainer has been killed."""
    torch.set_default_device("cuda")
    mine = model()
    reader = WeightReader(CudaIpc(address), "generator", pace=PACE)
    reader.attach(mine)
    reader.wait(1, timeout_s=programs.DEADLINE_S)
    adopted.set()
    killed.wait(programs.DEADLINE_S)
    programs.check(mine, 1)
    reader.close()
    programs.check(mine, 1)


def train(address):
    """A trainer that publishes version 1 and answers until it is killed."""
    torch.set_default_device("cuda")
    writer = WeightWriter(LAYOUT, CudaIpc(address), pace=PACE)
    writer.publish(1, model(1))
    deadline = time.monotonic() + programs.DEADLINE_S
    while time.monotonic() < deadline:
        writer.poll()
        time.sleep(0.001)


@pytest.mark.slow
def test_no_reader_in_another_process_serves_a_mixture(start, site):
    last = 20
    with closing(WeightWriter(LAYOUT, site, pace=PACE)) as writer:
        children = [start(programs.serve, site, adopt, adopt, last) for adopt in ("view", "copy")]
        until(writer, lambda: len(writer.readers) == 2)
        for version in range(1, last + 1):
            writer.publish(version, model(version))
        for child in children:
            until(writer, lambda child=child: child.exitcode is not None)
        assert [child.exitcode for child in children] == [0, 0]


def test_a_reader_killed_in_a_transfer_holds_nobody_up_and_no_lease(start, site, memory):
    with closing(WeightWriter(LAYOUT, site, pace=PACE)) as writer:
        victim, other = (
            start(linger, site.address, memory.folder),
            start(programs.serve, site, "other", "view", 9),
        )
        until(writer, lambda: len(writer.readers) == 2)
        publish(writer, 1)
        until(
            writer, lambda: holds(writer, "other", 1) and status(writer, "victim").state == "taking"
        )
        os.kill(victim.pid, signal.SIGKILL)
        for version in range(2, 10):
            publish(writer, version)
        until(writer, lambda: other.exitcode is not None)
        assert (other.exitcode, writer.segments) == (0, (2, 0))
    victim.join(10)
    peer_memory.departing.release()
    assert buffers(memory) == 0


def test_a_frozen_readers_memory_is_kept_for_it_and_goes_when_it_has_left(start, site, memory):
    with closing(WeightWriter(LAYOUT, site, pace=PACE)) as writer:
        frozen, other = (
            start(programs.serve, site, name, "view", 9) for name in ("frozen", "other")
        )
        publish(writer, 1)
        until(writer, lambda: holds(writer, "frozen", 1) and holds(writer, "other", 1))
        os.kill(frozen.pid, signal.SIGSTOP)
        for version in range(2, 9):
            publish(writer, version)
            until(writer, lambda version=version: holds(writer, "other", version))
        assert (writer.segments, buffers(memory)) == ((2, 1), 3)
        os.kill(frozen.pid, signal.SIGCONT)
        until(writer, lambda: holds(writer, "frozen", 8))
        publish(writer, 9)
        until(writer, lambda: frozen.exitcode is not None and other.exitcode is not None)
        assert (frozen.exitcode, other.exitcode) == (0, 0)
        until(writer, lambda: (writer.segments, buffers(memory)) == ((2, 0), 2))


def test_a_trainer_killed_in_a_publish_leaves_its_last_version_and_the_next_one_sweeps(
    start, site, memory
):
    trainer = start(stop_in_a_publish, site.address, memory.folder)
    mine = model()
    with closing(WeightReader(site, "generator", pace=PACE)) as reader:
        reader.attach(mine)
        reader.wait(1, timeout_s=programs.DEADLINE_S)
        deadline = time.monotonic() + programs.DEADLINE_S
        while not (memory.folder / "stuck").exists() and time.monotonic() < deadline:
            reader.poll()
        assert reader.version == 1 and values(mine) == {1}
        with pytest.raises(AddressTaken, match=f"process {trainer.pid} alive"):
            site.writer(lambda: None)
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.join(10)
        assert (reader.version, values(mine)) == (1, {1})
        assert len(leftovers(site.address)) == 4
        with closing(WeightWriter(LAYOUT, site, pace=PACE)) as writer:
            assert not leftovers(site.address)
            writer.publish(1, model(7))
            while values({"t0": mine["t0"]}) != {7} and time.monotonic() < deadline:
                writer.poll()
                if reader.poll():
                    reader.adopt()
            assert values(mine) == {7}


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/w.sock"


@pytest.mark.parametrize(
    ("adopt", "allocator"), [("view", ""), ("copy", "expandable_segments:True")]
)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_two_processes_share_a_gpus_memory_without_a_mixture(
    start, address, adopt, allocator, monkeypatch
):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", allocator)
    site = CudaIpc(address)
    with closing(WeightWriter(LAYOUT, site, pace=PACE, wait_s=5.0)) as writer:
        child = start(on_gpu, programs.serve, site, "generator", adopt, 20)
        until(writer, lambda: len(writer.readers) == 1)
        for version in range(1, 21):
            publish(writer, version, "cuda")
        until(writer, lambda: child.exitcode is not None)
        assert child.exitcode == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_reader_killed_on_a_gpu_holds_nobody_up(start, address):
    site = CudaIpc(address)
    with closing(WeightWriter(LAYOUT, site, pace=PACE)) as writer:
        victim = start(linger, address, None)
        other = start(on_gpu, programs.serve, site, "other", "view", 9)
        until(writer, lambda: len(writer.readers) == 2)
        publish(writer, 1, "cuda")
        # and silent soon, for it says no more
        until(writer, lambda: status(writer, "victim").state == "taking")
        until(writer, lambda: holds(writer, "other", 1))
        os.kill(victim.pid, signal.SIGKILL)
        for version in range(2, 10):
            publish(writer, version, "cuda")
        until(writer, lambda: other.exitcode is not None)
        assert (other.exitcode, writer.segments) == (0, (2, 0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_reader_computes_on_when_its_trainer_on_the_same_gpu_was_killed(
    start, processes, address
):
    adopted, killed = processes.Event(), processes.Event()
    trainer, generator = start(train, address), start(keep, address, adopted, killed)
    assert adopted.wait(programs.DEADLINE_S)
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.join(10)
    killed.set()
    generator.join(programs.DEADLINE_S)
    assert generator.exitcode == 0
    CudaIpc(address).writer(lambda: None).close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_process_does_not_open_its_own_gpu_memory(address):
    site = CudaIpc(address)
    with (
        closing(WeightWriter(LAYOUT, site)) as writer,
        closing(WeightReader(site, "generator")) as reader,
    ):
        reader.attach(model())
        writer.publish(1, model(1))
        with pytest.raises(SegmentError, match="give both a Hub"):
            adopted(writer, reader, 1)
