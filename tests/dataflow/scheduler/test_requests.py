"""What the scheduler replies to somebody who is no worker."""

import threading
from pathlib import Path
from typing import Any

import pytest
import zmq
from opened import closed, opened

from dataflow.errors import GraphError, RunError
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.socket_folder import CONTROL
from dataflow.scheduler import requests
from dataflow.scheduler.requests import (
    REQUESTS,
    FactsTold,
    Reply,
    Request,
    Scale,
    Scaled,
    Stopping,
    StopRun,
    TellFacts,
    answer,
    ask_to_stop,
)
from dataflow.system.messages import MessageError, Refused


def replied(request: Request, stopped: list[bool] | None = None) -> Reply:
    def scale(wishes: Any) -> dict[str, dict[str, int]]:
        if "nobody" in wishes:
            raise GraphError("no such node")
        return {node: {"live": count} for node, count in wishes.items()}

    def facts(stacks: bool) -> dict[str, Any]:
        return {"step": 7, "stacks": stacks}

    return answer(request, scale, facts, lambda: ([] if stopped is None else stopped).append(True))


def test_a_wish_is_passed_on_and_facts_are_told() -> None:
    assert replied(Scale({"generator": 2})) == Scaled({"generator": {"live": 2}})
    assert replied(TellFacts()) == FactsTold({"step": 7, "stacks": True})
    assert replied(TellFacts(stacks=False)) == FactsTold({"step": 7, "stacks": False})


def test_who_asks_a_run_to_stop_is_told_that_it_will() -> None:
    stopped: list[bool] = []
    assert replied(StopRun(), stopped) == Stopping() and stopped == [True]


def test_a_refusal_is_answered_with_its_reason() -> None:
    assert replied(Scale({"nobody": 2})) == Refused("no such node")


JUNK: list[Any] = [
    None,
    7,
    b"\x00",
    "TellFacts",
    [],
    {},
    ["TellFacts", {}],
    ["Facts?", {}],
    [["TellFacts"], {}],
    ["Scale", {}],
    ["Scale", {"wishes": {"a": True}}],
    ["Scale", {"wishes": {7: 1}}],
    ["Scale", {"wishes": {"a": -1}}],
]


@pytest.mark.parametrize("junk", JUNK)
def test_anything_else_is_no_request(junk: Any) -> None:
    protocol = opened(REQUESTS.encode(TellFacts()))[0]
    whole = [protocol, *junk] if isinstance(junk, list) and junk[:1] != ["TellFacts"] else junk
    with pytest.raises(MessageError):
        REQUESTS.decode(closed(whole))


def test_who_asks_a_scheduler_that_is_replaced_meanwhile_is_told_so_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "_LOOK_MS", 20)
    folder, listening = RunFolder.create(tmp_path, "taken"), zmq.Context[zmq.Socket[bytes]]()
    router = listening.socket(zmq.ROUTER)
    router.bind(f"ipc://{tmp_path}/control")
    address = {"address": f"ipc://{tmp_path}/control"}
    folder.write_json(CONTROL, {**address, "pid": 1})
    later = threading.Timer(0.1, lambda: folder.write_json(CONTROL, {**address, "pid": 2}))
    later.start()
    try:
        with pytest.raises(
            RunError, match="was replaced while it was asked, so it may have done it or not"
        ):
            ask_to_stop(folder, timeout_s=20.0)
    finally:
        later.join()
        router.close(0)
        listening.term()
