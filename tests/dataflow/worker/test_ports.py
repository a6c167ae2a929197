"""The ports of one process open what the plan chose, and edges hold what may be in flight however
many send.
"""

import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dataflow import Graph, Model
from dataflow.limits import Limits
from dataflow.planning.hosts import Devices
from dataflow.planning.plan import Plan, plan
from dataflow.planning.wiring import edges
from dataflow.records import schema
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from dataflow.worker.host import NodeLoops, Settings
from dataflow.worker.ports import Ports
from dataflow.worker.weight_ports import MEETING, Opening
from transport.life import Life


def build() -> Graph:
    graph, model = Graph("test"), Model("policy")
    generator, trainer = FakeGenerator(model=model), FakeTrainer(model=model, prompts_per_step=256)
    trainer(generator(graph.source(FakePrompts(size=None))))
    graph.feedback(trainer.weights, generator, max_staleness=4)
    return graph


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="dataflow-") as made:  # of mode 0700, its path short
        yield made


def ports(graph: Graph, made: Plan, node: str, folder: str, **more: Any) -> tuple[Ports, NodeLoops]:
    settings = Settings(folder="", worker=node, sockets=folder, **more)
    opened = Ports(graph, made, [node], settings)
    return opened, NodeLoops(
        graph, made, [node], settings, writer_of=opened.writer_of, reader_of=opened.reader_of
    )


def test_readers_on_the_gpus_of_one_machine_meet_the_trainer_in_device_memory(folder: str) -> None:
    from transport.weights.executors.cuda_ipc import CudaIpc

    graph = build()
    made = plan(graph, Devices(cpus=2, gpus=2), gpus={"generator": 1, "trainer": 1})
    opened, _ = ports(graph, made, "trainer", folder, device=made.placements["trainer"].device(0))
    (place,) = opened._lines.sites_of("trainer", None)
    opening = Opening(site=place, rank=0, ranks=1, device="cuda:1", limits=Limits(), attempt=0)
    site = MEETING[place.executor](opening)
    assert isinstance(site, CudaIpc)
    assert (str(site.device), site.address) == (
        "cuda:1",
        f"ipc://{folder}/weights.trainer.cuda_ipc",
    )


def test_a_trainer_whose_readers_sit_apart_writes_for_each_of_them(folder: str) -> None:
    graph = build()
    paths = plan(graph, Devices(cpus=2), replicas={"generator": 2}).weight_paths
    other = [
        type(p)(**{n: getattr(p, n) for n in p.__slots__} | {"executor": "gloo"}) for p in paths[1:]
    ]
    made = plan(graph, Devices(cpus=2), replicas={"generator": 2})
    object.__setattr__(made, "weight_paths", (paths[0], *other))
    opened, _ = ports(graph, made, "trainer", folder)
    assert list(opened.lines["trainer"].at) == ["shared_memory", "gloo"]


def test_one_of_three_replicas_may_have_all_that_is_in_flight_on_its_way_to_the_trainer(
    folder: str,
) -> None:
    """The others have the group that the trainer waits for; shares of an edge must not keep it from
    them.
    """
    graph = build()
    made = plan(graph, Devices(cpus=2), replicas={"generator": 3})
    receiving, host = ports(graph, made, "trainer", folder)
    (addresses,) = receiving.open_inlets(host).items()
    sending = [ports(graph, made, "generator", folder, replica=replica) for replica in range(3)]
    (edge,) = [edge for edge in edges(graph) if edge.consumer == "trainer"]
    outlets = [
        each.open_outlets(owner, {addresses[0]: [addresses[1]]})[edge.name]
        for each, owner in sending
    ]
    rows = 256 * 4
    batch = _rows(edge.columns, rows)
    sent = 0
    try:
        for _ in range(2_000):
            receiving.inlets[edge.name].receive(0.001)
            for outlet in outlets:
                outlet.poll()
            sent += outlets[0].send(batch)
            if sent == 5:
                break
        assert sent == 5, (
            "five steps of rows are in flight at a staleness of 4, and none is acknowledged"
        )
    finally:
        for each, _ in [*sending, (receiving, host)]:
            each.close()


def test_two_replicas_together_get_no_more_prompts_than_one_has_room_for(folder: str) -> None:
    """What one of them had that leaves or dies, and has to be trained first, then finds room with
    the other.
    """
    graph = build()
    made = plan(graph, Devices(cpus=2), replicas={"generator": 2})
    receiving = [ports(graph, made, "generator", folder, replica=replica) for replica in range(2)]
    addresses = [next(iter(each.open_inlets(owner).values())) for each, owner in receiving]
    sending, host = ports(graph, made, "prompts", folder)
    edge = edges(graph)[0]
    outlet = sending.open_outlets(host, {edge.name: addresses})[edge.name]
    batch, sent, each_got = _rows(edge.columns, edge.batch_rows), 0, [0, 0]
    try:
        for _ in range(400):
            for index, (each, _) in enumerate(receiving):
                each_got[index] += each.inlets[edge.name].receive(0.001) is not None
            outlet.poll()
            sent += outlet.send(batch)
        assert (
            edge.most_rows is not None
            and sent == edge.most_rows // edge.batch_rows
            and min(each_got) > 0
        )
    finally:
        for each, _ in [*receiving, (sending, host)]:
            each.close()


def _rows(columns: dict[str, pa.DataType], count: int) -> pa.RecordBatch:
    made = schema(columns)
    zeros = pa.array(np.zeros(count, np.int64))
    arrays = [
        zeros.cast(f.type) if pa.types.is_integer(f.type) else pa.nulls(count, f.type) for f in made
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=made)


@pytest.mark.parametrize("executor", ["shared_memory", "gloo"])
def test_the_ends_of_the_weight_plane_are_known_by_the_scheduler_s_attempt(
    executor: str, folder: str
) -> None:
    import torch

    graph, tensors = build(), {"w": torch.nn.Parameter(torch.zeros(4))}
    made = plan(graph, Devices(cpus=2), weights=executor)
    opened, _ = ports(graph, made, "generator", folder, life=Life(attempt=5))
    end: Any = opened.reader_of("trainer", "generator")(tensors)
    try:
        assert end._member.join.incarnation == 5
    finally:
        opened.close()


def test_a_receiver_that_was_added_at_its_new_place_before_it_was_said_to_have_moved_stays_once(
    folder: str,
) -> None:
    """Simulation, seed 15592: a scheduler that took over told of both, and the worker died of the
    second.
    """
    graph = build()
    made = plan(graph, Devices(cpus=2))
    opened, host = ports(graph, made, "prompts", folder)
    (edge,) = [edge.name for edge in edges(graph) if edge.producer == "prompts"]
    opened.open_outlets(host, {edge: [f"ipc://{folder}/old"]})
    sender = opened._senders[edge]
    opened.add({edge: f"ipc://{folder}/new"})
    for _ in range(2):  # twice does no harm
        opened.move({edge: f"ipc://{folder}/new"}, {edge: [f"ipc://{folder}/old"]})
        assert list(sender.receivers) == [f"ipc://{folder}/new"]
    sender.close()
