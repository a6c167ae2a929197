"""A worker hears every word of the scheduler, also those that come while it waits for another."""

from typing import Any

import msgpack
import pytest

from dataflow import Graph, Model
from dataflow.errors import DeadlineError
from dataflow.limits import Limits, Patience
from dataflow.planning.plan import Devices, plan
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from dataflow.worker.host import Settings
from dataflow.worker.worker import Worker


class FakeLink:
    """Gives its words in the portions in which they would come."""

    def __init__(self, *portions: list[dict[str, Any]], passes_s: float = 0.0) -> None:
        """passes_s: the time from one portion to the next."""
        self.portions, self.passes_s, self.now = list(portions), passes_s, 0.0
        self.socket = self

    def poll(self, milliseconds: int) -> int:
        self.now += self.passes_s
        return 0

    def words(self) -> list[dict[str, Any]]:
        return self.portions.pop(0) if self.portions else []


def worker(link: FakeLink, start_s: float = 1.0) -> Worker:
    graph, model = Graph("test"), Model("policy")
    generator, trainer = FakeGenerator(model=model), FakeTrainer(model=model)
    trainer(generator(graph.source(FakePrompts())))
    graph.feedback(trainer.weights, generator, max_staleness=1)
    made = plan(graph, Devices(cpus=2))
    settings = Settings(folder="", worker="prompts", limits=Limits(start_s=start_s))
    return Worker(graph, made, settings, link, clock=lambda: link.now)  # type: ignore[arg-type]


def test_words_that_come_before_or_with_the_awaited_one_are_heard_later() -> None:
    pause = {"kind": "tell", "node": "prompts", "message": {"pause": True}}
    evaluate = {"kind": "tell", "node": "prompts", "message": {"evaluate": 0}}
    made = worker(FakeLink([pause], [{"kind": "start"}, evaluate]))
    assert made._wait_for("start") == {"kind": "start"}
    told: list[Any] = []
    made._host.tell = lambda node, message: told.append(message)  # type: ignore[method-assign,assignment]
    made._hear()
    assert told == [{"pause": True}, {"evaluate": 0}]


def test_a_stop_ends_the_wait() -> None:
    with pytest.raises(SystemExit):
        worker(FakeLink([{"kind": "stop"}]))._wait_for("start")


def test_a_wait_has_a_deadline_and_says_who_waited_for_what() -> None:
    with pytest.raises(DeadlineError, match=r"worker 'prompts' waited 900 s .* word 'start' .*or raise Limits.start_s"):
        worker(FakeLink(passes_s=100.0), start_s=900.0)._wait_for("start")


@pytest.mark.parametrize("kind", ["wire", "start"])
def test_a_worker_waits_for_a_model_that_loads_elsewhere_as_long_as_the_start_may_take(kind: str) -> None:
    silence: list[list[dict[str, Any]]] = [[]] * 6
    made = worker(FakeLink(*silence, [{"kind": kind}], passes_s=100.0), start_s=900.0)
    assert made._wait_for(kind) == {"kind": kind}


def test_what_a_worker_is_told_of_limits_reaches_it_over_the_wire() -> None:
    settings = Settings(folder="", limits=Limits(start_s=900.0, patience=Patience(of_one=2)))
    assert Settings.from_plain(msgpack.unpackb(msgpack.packb(settings.to_plain()))) == settings
