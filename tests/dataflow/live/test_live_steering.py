"""A page that may steer: who may ask for what, once, and what the run is asked for."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from dataflow.errors import RunError
from dataflow.folder.request_log import RequestLog
from dataflow.folder.run_folder import RunFolder
from dataflow.live.server import ClientLimits
from dataflow.live.steering import BODY_BYTES, REMEMBERED, Controls, Steering

Serve = Callable[..., Any]


STOP = {"number": "1", "action": "stop"}


class Asked:
    """A run that writes down what it is asked for."""

    def __init__(self, slow_s: float = 0.0) -> None:
        self.calls: list[Any] = []
        self.slow_s = slow_s
        self.controls = Controls(
            stop=self.stop,
            scale=self.scale,
            swap=self.swap,
            set_knob=self.set_knob,
            checkpoint=self.checkpoint,
        )

    def stop(self, run: RunFolder, by: str) -> str:
        time.sleep(self.slow_s)
        self.calls.append(("stop", run.path.name, by))
        return "it ends"

    def scale(self, run: RunFolder, wishes: Mapping[str, int], by: str) -> str:
        self.calls.append(("scale", dict(wishes), by))
        if "nobody" in wishes:
            raise RunError("no node is called 'nobody'")
        return "scaled"

    def swap(self, run: RunFolder, node: str, reference: str, by: str) -> str:
        self.calls.append(("swap", node, reference, by))
        return "swapped"

    def set_knob(self, run: RunFolder, place: str, value: str, by: str) -> str:
        self.calls.append(("set", place, value, by))
        return "set"

    def checkpoint(self, run: RunFolder, by: str) -> str:
        self.calls.append(("checkpoint", by))
        return "kept"


def test_what_a_page_asks_for_reaches_its_run_in_somebodys_name(
    folder: RunFolder, serve: Serve
) -> None:
    run = Asked()
    page = serve([folder, folder], controls=run.controls)
    assert page.json("runs")["steers"] is True
    assert page.steer(STOP) == (200, {"answer": "it ends"})
    assert page.steer({"number": "2", "action": "scale", "node": "generator", "replicas": 2})[
        1
    ] == {"answer": "scaled"}
    swap = {"number": "3", "action": "swap", "node": "reward", "reference": "rewards:strict"}
    assert page.steer(swap)[1] == {"answer": "swapped"}
    wish = {"number": "5", "action": "set", "node": "trainer", "knob": "lr", "value": "3e-6"}
    assert page.steer(wish)[1] == {"answer": "set"}
    assert page.steer({"number": "6", "action": "checkpoint"})[1] == {"answer": "kept"}
    refused = page.steer({"number": "4", "action": "scale", "node": "nobody", "replicas": 1})
    assert refused == (409, {"error": "no node is called 'nobody'"})
    by = "somebody@here"
    assert run.calls == [
        ("stop", folder.path.name, by),
        ("scale", {"generator": 2}, by),
        ("swap", "reward", "rewards:strict", by),
        ("set", "trainer.lr", "3e-6", by),
        ("checkpoint", by),
        ("scale", {"nobody": 1}, by),
    ]


def test_a_request_that_comes_again_is_made_once_and_gets_the_same_answer(
    folder: RunFolder,
) -> None:
    run = Asked(slow_s=0.05)
    steering, answers = Steering(run.controls, "me"), []
    body = b'{"number": "7", "action": "stop"}'
    threads = [
        threading.Thread(target=lambda: answers.append(steering(folder, body))) for _ in range(4)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join(10)
    assert answers == ["it ends"] * 4 and len(run.calls) == 1
    run.slow_s = 0.0
    wrong = b'{"number": "8", "action": "scale", "node": "nobody", "replicas": 1}'
    for _ in range(2):
        with pytest.raises(RunError, match="nobody"):
            steering(folder, wrong)
    assert len(run.calls) == 2
    for number in range(REMEMBERED + 9):
        steering(folder, b'{"number": "n%d", "action": "stop"}' % number)
    assert len(run.calls) == REMEMBERED + 11 and len(steering._requests) == REMEMBERED


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (b"{", "not JSON"),
        (b"[]", "a JSON map"),
        ({}, "'number'"),
        ({"number": "1"}, "'action'"),
        ({"number": "1", "action": "drop"}, "there are stop, checkpoint, scale, swap and set"),
        ({"number": "1", "action": "scale", "node": "generator"}, "'replicas'"),
        ({"number": "1", "action": "scale", "node": "generator", "replicas": True}, "'replicas'"),
        ({"number": "1", "action": "scale", "node": "generator", "replicas": -1}, "'replicas'"),
        ({"number": "1", "action": "swap", "node": "reward", "reference": ""}, "'reference'"),
        ({"number": "1", "action": "set", "node": "trainer", "knob": "lr"}, "'value'"),
        ({"number": "1" * 501, "action": "stop"}, "'number'"),
        (b"\xff", "not JSON"),
    ],
)
def test_what_is_no_request_is_told_what_is_wrong(
    folder: RunFolder, serve: Serve, request_: Any, says: str
) -> None:
    run = Asked()
    status, answer = serve([folder], controls=run.controls).steer(request_)
    assert status == 400 and says in answer["error"] and not run.calls


def test_no_other_site_no_form_and_no_read_only_page_changes_a_run(
    folder: RunFolder, serve: Serve
) -> None:
    run = Asked()
    page = serve([folder], controls=run.controls)
    own = f"http://127.0.0.1:{page.port}"
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Host": "evil.example", "Origin": "http://evil.example"},
    ):
        assert page.steer(STOP, headers)[0] == 403, headers
    told = {"Content-Type": "application/json"}
    assert page.get("api/steer", told, "POST", body=b"{}")[0] == 403, (
        "a browser names the origin of every POST"
    )
    assert (
        page.get("api/steer", {**told, "Origin": own}, "POST", token="another", body=b"{}")[0]
        == 403
    )
    assert page.get("api/now", {**told, "Origin": own}, "POST", body=b"{}")[0] == 403
    assert page.get("api/steer", {**told, "Origin": own}, "PUT", body=b"{}")[0] == 405
    assert page.steer(b"x" * (BODY_BYTES + 1))[0] == 413
    assert page.get("api/steer")[0] == 404
    readonly = serve([folder])
    assert readonly.steer(STOP)[0] == 405 and readonly.json("runs")["steers"] is False
    assert not run.calls


def test_a_run_that_does_not_answer_holds_up_no_reader(folder: RunFolder, serve: Serve) -> None:
    run = Asked(slow_s=1.0)
    page = serve([folder], controls=run.controls, limits=ClientLimits(steer_s=0.2))
    answers: list[Any] = []
    asking = [
        threading.Thread(target=lambda n=n: answers.append(page.steer({**STOP, "number": str(n)})))
        for n in range(4)
    ]
    for each in asking:
        each.start()
    assert page.json("now")["state"] == "not finished"
    for each in asking:
        each.join(10)
    assert [status for status, _ in answers] == [503] * 4
    assert all("may still do it" in answer["error"] for _, answer in answers)


def test_requests_stand_in_the_folder_and_on_the_page(folder: RunFolder, serve: Serve) -> None:
    log = RequestLog(str(folder.path), pytest.fail, wall=lambda: 1.7e9)
    log.write("me@here", "generator = 2 replicas", 4, "generator: 2 live", refused=False)
    log.write("me@here", "reward = a:<b>", 5, "there is no a", refused=True)
    with (folder.path / "requests.jsonl").open("a") as file:
        file.write('{"at": 1, "by')
    assert serve([folder]).json("marks")["requests"] == [
        {
            "at": 1.7e9,
            "step": 4,
            "by": "me@here",
            "request": "generator = 2 replicas",
            "answer": "generator: 2 live",
            "refused": False,
        },
        {
            "at": 1.7e9,
            "step": 5,
            "by": "me@here",
            "request": "reward = a:<b>",
            "answer": "there is no a",
            "refused": True,
        },
    ]
