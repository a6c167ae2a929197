"""A version goes beside what both ends compute: nothing of it in the program's stream, no wait
between its chunks. Shown by a recording device through the real ends; no GPU is at work here.

The model is a 7B's layers at 1/64 of their width, so 1/4096 of its bytes, in as many chunks; rates
are scaled alike, so that seconds are those of the large one, on the clock of `recording_device`.
"""

import pytest
import torch

from transport.weights import Deadlines, Layout, ShardedReader, ShardedWriter, reshard
from transport.weights.costs.decoder import Decoder
from transport.weights.executors.peer_memory import HostMemory
from transport.weights.sharded import transfer
from transport.weights.sharded.chunks import chunks_between
from transport.weights.sharded.steps import ChunkMessage

from ..recording_device import PROGRAM, Gpu, RecordingDevice, VirtualLink
from ..sharded_rig import parameters, shards, until

SMALLER = 64
SCALE = SMALLER**2
MODEL = {"layers": 28, "heads": 28, "kv_heads": 4, "family": "qwen2"}
SEVEN = Decoder(width=3584, inner=18944, vocabulary=152064, head_width=128, **MODEL)
SMALL = Decoder(
    width=3584 // SMALLER,
    inner=18944 // SMALLER,
    vocabulary=152064 // SMALLER,
    head_width=128 // SMALLER,
    **MODEL,
)
TRAINERS = 4
BUCKET_BYTES = 16 << 20
CHUNKS = 1148
SEVEN_BYTES = 2 * 7.6e9
HBM_BYTES_PER_S, NVLINK_BYTES_PER_S = 3e12, 450e9
DECODE_STEP_S, TRAINER_STEP_S = 0.011, 6.0
SOURCE = Layout.fsdp(SMALL.tensors("bfloat16"), TRAINERS)
MASTERS = Layout.fsdp(SMALL.tensors("float32"), TRAINERS)
TARGET = Layout.fsdp(SMALL.tensors("bfloat16"), 1)
PATIENT = Deadlines(heartbeat_s=0.2, gone_s=60.0, form_s=60.0, ready_s=30.0, transfer_s=60.0)


def test_the_small_model_has_the_chunks_of_the_large_one():
    counts = []
    for model, bucket in ((SEVEN, BUCKET_BYTES), (SMALL, BUCKET_BYTES // SCALE)):
        tensors = model.tensors("bfloat16")
        plan = reshard(Layout.fsdp(tensors, TRAINERS), Layout.fsdp(tensors, 1))
        counts.append(sum(len(chunks_between(plan, rank, 0, bucket)) for rank in range(TRAINERS)))
    assert counts == pytest.approx([CHUNKS, CHUNKS], rel=0.05)


class Edge:
    """Four trainer ranks in float32 and one generator, each with a recording device, in this
    thread.
    """

    def __init__(self, backend, folder, monkeypatch, hold):
        self.link = VirtualLink(NVLINK_BYTES_PER_S / SCALE)
        monkeypatch.setattr(transfer, "ProcessGroup", self.link)
        one_sided = backend == "cuda_ipc"
        # of what a kernel moves to another GPU half is written, by the link that senders share
        rate = 2 * NVLINK_BYTES_PER_S / TRAINERS if one_sided else HBM_BYTES_PER_S
        self.gpus = [Gpu(f"trainer {rank}", rate / SCALE) for rank in range(TRAINERS)]
        self.generator = Gpu("generator", HBM_BYTES_PER_S / SCALE, backlog_s=DECODE_STEP_S)
        memory = HostMemory(folder) if one_sided else None
        address = f"ipc://{folder}/w"
        self.devices = [RecordingDevice(gpu) for gpu in (*self.gpus, self.generator)]
        self.writers = [
            ShardedWriter(
                SOURCE,
                rank,
                address,
                backend=backend,
                device=self.devices[rank],
                hold=hold,
                bucket_bytes=BUCKET_BYTES // SCALE,
                deadlines=PATIENT,
                memory=memory,
            )
            for rank in range(TRAINERS)
        ]
        self.reader = ShardedReader(
            TARGET,
            0,
            address,
            "generator-0",
            adopt="copy",
            device=self.devices[-1],
            deadlines=PATIENT,
            memory=memory,
        )
        zeros = {name: torch.zeros(shape) for name, (shape, _) in TARGET.local(0).items()}
        self.tensors = parameters({name: zero.bfloat16() for name, zero in zeros.items()})
        with self.devices[-1].program():
            self.reader.attach(self.tensors)

    @property
    def events(self):
        return [event for gpu in (*self.gpus, self.generator) for event in gpu.events]

    @property
    def seconds(self):
        return max(gpu.seconds for gpu in (*self.gpus, self.generator))

    def publish(self, version):
        """The trainers publish, and begin a step of `TRAINER_STEP_S`; until the generator could
        adopt it.
        """
        made = {
            name: torch.randn(held.shape, generator=torch.Generator().manual_seed(version))
            for name, held in SOURCE.tensors.items()
        }
        self.generator.begin()
        self.link.free.clear()
        for rank, writer in enumerate(self.writers):
            own = shards(MASTERS, rank, made)
            self.gpus[rank].begin()
            with self.devices[rank].program():
                writer.publish(version, own)
                self.gpus[rank].busy_until_s = TRAINER_STEP_S
        until(lambda: self.reader.poll() is not None or self.writers[0].faults)
        assert not self.writers[0].faults
        return made

    def adopt(self):
        with self.devices[-1].program():
            self.reader.adopt()

    def settle(self):
        for device, writer in zip(self.devices, self.writers, strict=False):
            with device.program():
                assert writer.settle(20.0)

    def close(self):
        self.reader.close()
        for writer in reversed(self.writers):
            writer.close()


@pytest.fixture(params=["nccl", "cuda_ipc"])
def backend(request):
    return request.param


@pytest.fixture(params=["snapshot", "until_settle"])
def hold(request):
    return request.param


@pytest.fixture
def edge(backend, hold, tmp_path, monkeypatch):
    edge = Edge(backend, tmp_path, monkeypatch, hold)
    yield edge
    edge.close()


def test_a_version_of_7b_takes_a_fifth_of_a_second_beside_both_programs(edge, hold):
    for version in (1, 2, 3):
        made = edge.publish(version)
        events, seconds = edge.events, edge.seconds
        in_program = [event for event in events if event.stream == PROGRAM]
        assert not [event for event in in_program if event.what != "after"], in_program[:5]
        chunks = [event for event in events if event.what in ("copy", "sum")]
        assert 0.95 * CHUNKS < len(chunks) < 2.2 * CHUNKS, "one kernel at either end"
        waits = [event for event in events if event.stream == "host"]
        assert len(waits) < 5 * (TRAINERS + 1), waits
        floor = SEVEN_BYTES / NVLINK_BYTES_PER_S
        assert floor < seconds < 0.2, (seconds, floor)
        edge.generator.begin()
        edge.adopt()
        adopting = edge.generator.events
        assert {(event.stream, event.what) for event in adopting} == {
            (PROGRAM, "_foreach_copy_")
        }, "the copy into the parameters alone stands between two steps"
        for gpu in edge.gpus:
            gpu.begin()
        edge.settle()
        settling = [event for gpu in edge.gpus for event in gpu.events]
        assert {(event.stream, event.what) for event in settling} == (
            {(PROGRAM, "after")} if hold == "snapshot" else set()
        ), "the update stands behind the copy, and its thread goes on"
        assert all(
            torch.equal(edge.tensors[name].detach(), tensor.bfloat16())
            for name, tensor in made.items()
        )


def test_a_chunk_that_waits_in_the_programs_stream_is_charged_a_decode_step(tmp_path, monkeypatch):
    """What the clock says of transfers that share the program's stream and wait for each chunk."""
    unpack = ChunkMessage.unpack

    def waiting(step, sums):
        usable = unpack(step, sums)
        step._device.reached(step._device.mark())
        return usable

    monkeypatch.setattr(ChunkMessage, "unpack", waiting)
    monkeypatch.setattr(RecordingDevice, "beside", RecordingDevice.program)
    edge = Edge("nccl", tmp_path, monkeypatch, "until_settle")
    edge.publish(1)
    assert edge.seconds > 0.95 * CHUNKS * DECODE_STEP_S > 10
    edge.close()
