"""A worker hears every message of the scheduler, also those that come while it waits for
another.
"""

import dataclasses
import os
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import msgpack
import msgspec
import pytest

from dataflow import Graph, Model
from dataflow.errors import DeadlineError
from dataflow.limits import Limits, Patience
from dataflow.planning.hosts import Devices
from dataflow.planning.plan import plan
from dataflow.runtime import RunSettings
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from dataflow.worker.host import Settings
from dataflow.worker.messages import (
    Moved,
    NodeCommand,
    NodeReport,
    RetireReceivers,
    Start,
    Stop,
    ToWorker,
    WeightLine,
    Wire,
)
from dataflow.worker.state_clock import STATES
from dataflow.worker.worker import Worker


class FakeLink:
    """Gives its messages in the portions in which they would come."""

    def __init__(self, *portions: list[ToWorker], passes_s: float = 0.0) -> None:
        """passes_s: the time from one portion to the next."""
        self.portions, self.passes_s, self.now = list(portions), passes_s, 0.0
        self.socket = self

    def poll(self, milliseconds: int) -> int:
        self.now += self.passes_s
        return 0

    def messages(self) -> list[ToWorker]:
        return self.portions.pop(0) if self.portions else []


def worker(link: FakeLink, start_s: float = 1.0) -> Worker:
    graph, model = Graph("test"), Model("policy")
    generator, trainer = FakeGenerator(model=model), FakeTrainer(model=model)
    trainer(generator(graph.source(FakePrompts())))
    graph.feedback(trainer.weights, generator, max_staleness=1)
    made = plan(graph, Devices(cpus=2))
    settings = Settings(
        folder="", worker="prompts", run=RunSettings(limits=Limits(start_s=start_s))
    )
    return Worker(graph, made, settings, link, clock=lambda: link.now)  # type: ignore[arg-type]


def test_messages_that_come_before_or_with_the_awaited_one_are_heard_later() -> None:
    pause, evaluate = (
        NodeCommand("prompts", {"pause": True}),
        NodeCommand("prompts", {"evaluate": 0}),
    )
    made = worker(FakeLink([pause], [Start(), evaluate]))
    assert made._wait_for(Start) == Start()
    told: list[Any] = []
    made._host.tell = lambda node, message: told.append(message)  # type: ignore[method-assign,assignment]
    made._hear()
    assert told == [{"pause": True}, {"evaluate": 0}]


def test_a_stop_ends_the_wait() -> None:
    with pytest.raises(SystemExit):
        worker(FakeLink([Stop()]))._wait_for(Start)


def test_a_wait_has_a_deadline_and_says_who_waited_for_what() -> None:
    with pytest.raises(
        DeadlineError,
        match=r"'prompts' waited 900 s .* scheduler's 'Start' .*or raise Limits.start_s",
    ):
        worker(FakeLink(passes_s=100.0), start_s=900.0)._wait_for(Start)


@pytest.mark.parametrize("message", [Wire(addresses={}), Start()])
def test_a_worker_waits_for_a_model_that_loads_elsewhere_as_long_as_the_start_may_take(
    message: Wire | Start,
) -> None:
    silence: list[list[ToWorker]] = [[]] * 6
    made = worker(FakeLink(*silence, [message], passes_s=100.0), start_s=900.0)
    assert made._wait_for(type(message)) == message


def test_a_worker_builds_its_operators_once_it_knows_where_the_others_listen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = WeightLine(host="c", at={"gloo": "tcp://10.0.0.7:7000"})
    link = FakeLink([], [Wire(addresses={}, lines={"trainer": line})])
    made, done = worker(link), []
    link.send = lambda message: done.append(type(message).__name__)  # type: ignore[attr-defined]
    monkeypatch.setattr(made._ports, "read_from", lambda lines: done.append(lines["trainer"].host))

    def build() -> None:
        done.append("build")
        raise SystemExit(0)

    monkeypatch.setattr(made._host, "build", build)
    with pytest.raises(SystemExit):
        made.run()
    assert done == ["Hello", "c", "build"]


def test_a_sign_of_life_tells_what_has_grown_within_the_slice_of_work() -> None:
    made = worker(FakeLink())
    made._host.runtimes = {"prompts": SimpleNamespace(under_way=lambda: {"tokens": 7})}  # type: ignore[dict-item]
    made._host.loops = {"prompts": SimpleNamespace(spent=dict)}  # type: ignore[dict-item]
    status = {"tokens": 3, "queue": 1}
    report = NodeReport(
        status=status,
        seconds=dict.fromkeys(STATES, 0.0),
        rows_in=0,
        rows_out=0,
        ended=False,
        blocked=False,
    )
    made._report = {"prompts": report}
    assert made.heartbeat().nodes["prompts"].status == {"tokens": 7, "queue": 1}


def test_a_receiver_that_moves_while_it_retires_has_gone_only_when_it_owes_nothing_there() -> None:
    edge, before, now = "prompts>generator:prompts", "tcp://10.0.0.1:1", "tcp://10.0.0.2:2"
    retire = RetireReceivers(receivers={edge: before}, ticket=3)
    made = worker(FakeLink([retire], [Moved(receivers={edge: now}, before={edge: [before]})]))
    calls: list[tuple[str, object]] = []
    made._ports.retire = lambda receivers: calls.append(("retire", receivers))  # type: ignore[method-assign]
    made._ports.move = lambda receivers, before: calls.append(("move", receivers))  # type: ignore[method-assign]
    made._hear()
    made._hear()
    assert calls == [("retire", {edge: before}), ("move", {edge: now})]
    assert made._retiring == [RetireReceivers(receivers={edge: now}, ticket=3)]


def test_what_a_worker_is_told_of_limits_reaches_it_over_the_wire() -> None:
    settings = Settings(
        folder="", run=RunSettings(limits=Limits(start_s=900.0, patience=Patience(of_one=2)))
    )
    assert msgspec.convert(msgpack.unpackb(msgpack.packb(asdict(settings))), Settings) == settings


@pytest.mark.parametrize(
    ("device", "host", "listen"),
    [("cuda:0", "a", "127.0.0.2"), ("cuda:0", "", ""), ("cpu", "a", "127.0.0.2")],
)
def test_nccl_of_a_worker_on_a_gpu_takes_the_interface_of_its_hosts_address_or_loopback(
    monkeypatch: pytest.MonkeyPatch, device: str, host: str, listen: str
) -> None:
    made = worker(FakeLink([Stop()]))
    made._link.send = lambda message: None  # type: ignore[method-assign]
    made._settings = dataclasses.replace(made._settings, device=device, host=host, listen=listen)
    monkeypatch.setattr(
        "dataflow.worker.weight_ports.interface_of",
        lambda address: f"of {address}" if address else "lo",
    )
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "a user's")
    with pytest.raises(SystemExit):
        made.run()
    expected = {("cuda:0", "a"): "=of 127.0.0.2", ("cuda:0", ""): "=lo", ("cpu", "a"): "a user's"}
    assert os.environ["NCCL_SOCKET_IFNAME"] == expected[device, host]
