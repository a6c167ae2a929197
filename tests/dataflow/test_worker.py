"""A worker hears every word of the scheduler, also those that come while it waits for another."""

from typing import Any

import pytest

from dataflow import Graph, Model
from dataflow.errors import DeadlineError
from dataflow.host import Settings
from dataflow.plan import Devices, plan
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from dataflow.worker import Worker


class FakeLink:
    """Gives its words in the portions in which they would come."""

    def __init__(self, *portions: list[dict[str, Any]]) -> None:
        self.portions = list(portions)
        self.socket = self

    def poll(self, milliseconds: int) -> int:
        return 0

    def words(self) -> list[dict[str, Any]]:
        return self.portions.pop(0) if self.portions else []


def worker(link: FakeLink) -> Worker:
    graph, model = Graph("test"), Model("policy")
    generator, trainer = FakeGenerator(model=model), FakeTrainer(model=model)
    trainer(generator(graph.source(FakePrompts())))
    graph.feedback(trainer.weights, generator, max_staleness=1)
    made = plan(graph, Devices(cpus=2))
    return Worker(graph, made, Settings(folder="", worker="prompts"), link)  # type: ignore[arg-type]


def test_words_that_come_before_or_with_the_awaited_one_are_heard_later() -> None:
    pause = {"kind": "tell", "node": "prompts", "message": {"pause": True}}
    evaluate = {"kind": "tell", "node": "prompts", "message": {"evaluate": 0}}
    made = worker(FakeLink([pause], [{"kind": "start"}, evaluate]))
    assert made._wait_for("start", deadline_s=5.0) == {"kind": "start"}
    told: list[Any] = []
    made._host.tell = lambda node, message: told.append(message)  # type: ignore[method-assign,assignment]
    made._hear()
    assert told == [{"pause": True}, {"evaluate": 0}]


def test_a_stop_ends_the_wait() -> None:
    with pytest.raises(SystemExit):
        worker(FakeLink([{"kind": "stop"}]))._wait_for("start", deadline_s=5.0)


def test_a_wait_has_a_deadline_and_says_who_waited_for_what() -> None:
    with pytest.raises(DeadlineError, match=r"worker 'prompts' waited 0 s for the scheduler's word 'start'"):
        worker(FakeLink())._wait_for("start", deadline_s=0.01)
