"""What the scheduler replies to somebody who is no worker."""

from typing import Any

import msgpack
import pytest

from dataflow.errors import GraphError
from dataflow.scheduler.requests import (
    REQUESTS,
    FactsTold,
    Refused,
    Reply,
    Request,
    Scale,
    Scaled,
    Stopping,
    StopRun,
    TellFacts,
    answer,
)  # fmt: skip
from dataflow.system.messages import MessageError


def replied(request: Request, stopped: list[bool] | None = None) -> Reply:
    def scale(wishes: Any) -> dict[str, dict[str, int]]:
        if "nobody" in wishes:
            raise GraphError("no such node")
        return {node: {"live": count} for node, count in wishes.items()}

    return answer(request, scale, lambda: {"step": 7}, lambda: ([] if stopped is None else stopped).append(True))


def test_a_wish_is_passed_on_and_facts_are_told() -> None:
    assert replied(Scale({"generator": 2})) == Scaled({"generator": {"live": 2}})
    assert replied(TellFacts()) == FactsTold({"step": 7})


def test_who_asks_a_run_to_stop_is_told_that_it_will() -> None:
    stopped: list[bool] = []
    assert replied(StopRun(), stopped) == Stopping() and stopped == [True]


def test_a_refusal_is_answered_with_its_reason() -> None:
    assert replied(Scale({"nobody": 2})) == Refused("no such node")


JUNK: list[Any] = [
    None, 7, b"\x00", "TellFacts", [], {}, ["TellFacts", {}], ["Facts?", {}], [["TellFacts"], {}], ["Scale", {}],
    ["Scale", {"wishes": {"a": True}}], ["Scale", {"wishes": {7: 1}}], ["Scale", {"wishes": {"a": -1}}],
]  # fmt: skip


@pytest.mark.parametrize("junk", JUNK)
def test_anything_else_is_no_request(junk: Any) -> None:
    protocol = msgpack.unpackb(REQUESTS.encode(TellFacts()))[0]
    whole = [protocol, *junk] if isinstance(junk, list) and junk[:1] != ["TellFacts"] else junk
    with pytest.raises(MessageError):
        REQUESTS.decode(msgpack.packb(whole))
