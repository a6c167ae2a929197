"""A judge behind HTTP: answers, pauses, failures that are none of the policy's, a cache, and a key
that is nowhere.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dataflow import Graph, GraphError, collect
from dataflow.scoring.failure import RolloutFailure
from dataflow.testing import FakeGenerator
from operators import Prompts
from operators.rewards import Judge

pytest.importorskip("httpx", reason="httpx is not installed; pip install dataflow-rl[judge]")
KEY = "sk-a-secret-that-nobody-writes-down"


class Server(ThreadingHTTPServer):
    """Answers with what the test says, by the last word of the question."""

    daemon_threads = True

    def __init__(self, replies: dict[str, list[tuple[int, Any]]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies = replies
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        word = body["messages"][-1]["content"].split()[-1]
        with self.server.lock:
            self.server.asked.append(body)
            self.server.keys.append(self.headers["authorization"])
            left = self.server.replies[word]
            status, said = left.pop(0) if len(left) > 1 else left[0]
        if status == 0:
            self.close_connection = True
            return
        reply = (
            {"choices": [{"message": {"role": "assistant", "content": said}}]}
            if status == 200
            else said
        )
        text = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        if status == 429:
            self.send_header("retry-after", "0")
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: Any) -> None:
        """Silent."""


@contextmanager
def serving(**replies: list[tuple[int, Any]]) -> Iterator[Server]:
    server = Server(replies)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def judged(judge: Judge, words: list[str]) -> list[dict[str, Any]]:
    rows = [{"prompt": "Is it right?", "word": word} for word in words]
    rollouts = FakeGenerator(group_size=1)(
        Graph("g").source(Prompts(rows, columns=("word",), epochs=1))
    )
    found: list[dict[str, Any]] = (
        collect(judge(rollouts), rows=len(rows)).sort_by("group_id").to_pylist()
    )
    return found


def test_a_judge_is_asked_about_each_rollout_and_its_verdict_is_the_reward(tmp_path: Path) -> None:
    def passed(text: str) -> float | None:
        return None if text == "skip" else float(text == "yes")

    with serving(right=[(200, "yes")], wrong=[(200, "no")], neither=[(200, "skip")]) as server:
        judge = Judge(
            ask="{prompt} {word}",
            model="m",
            url=server.url,
            verdict=passed,
            system="Be strict.",
            params={"seed": 1},
            cache=str(tmp_path),
        )
        rows = judged(judge, ["right", "wrong", "neither"])
    assert [(row["reward"], row["error"]) for row in rows] == [
        (1.0, None),
        (0.0, None),
        (None, None),
    ]
    body = next(each for each in server.asked if each["messages"][-1]["content"].endswith("right"))
    assert body == {
        "model": "m",
        "temperature": 0,
        "seed": 1,
        "messages": [
            {"role": "system", "content": "Be strict."},
            {"role": "user", "content": "Is it right? right"},
        ],
    }


def test_a_busy_or_broken_judge_is_asked_again_and_what_fails_for_good_is_no_reward(
    tmp_path: Path,
) -> None:
    replies: dict[str, list[tuple[int, Any]]] = {
        "busy": [(429, {}), (429, {}), (200, "1")],
        "closed": [(0, None), (200, "0.5")],
        "down": [(503, {"why": "down"})],
        "refused": [(400, {"why": "no such model"})],
        "mute": [(200, "no number")],
    }
    with serving(**replies) as server:
        judge = Judge(
            ask="{prompt} {word}", model="m", url=server.url, retries=2, cache=str(tmp_path)
        )
        rows = judged(judge, list(replies))
    assert [row["reward"] for row in rows] == [1.0, 0.5, None, None, None]
    failures = [row["error"] and RolloutFailure.read(row["error"]) for row in rows]
    assert [failure and failure.cause for failure in failures] == [
        None,
        None,
        "world",
        "raised",
        "raised",
    ]
    asked = [each["messages"][-1]["content"].split()[-1] for each in server.asked]
    assert {word: asked.count(word) for word in replies} == {
        "busy": 3,
        "closed": 2,
        "down": 3,
        "refused": 1,
        "mute": 1,
    }


def test_what_was_said_is_kept_by_what_was_asked_and_a_failure_is_not(tmp_path: Path) -> None:
    replies: dict[str, list[tuple[int, Any]]] = {
        "good": [(200, "1")],
        "bad": [(200, "hm"), (200, "2")],
    }
    with serving(**replies) as server:
        judge = Judge(ask="{word}", model="m", url=server.url, cache=str(tmp_path))
        assert [row["reward"] for row in judged(judge, ["good", "good", "bad"])] == [1.0, 1.0, None]
        assert len(server.asked) == 2, "of two equal questions one is asked"
        assert [row["reward"] for row in judged(judge, ["good", "bad"])] == [1.0, 2.0]
        assert len(server.asked) == 3
        other = Judge(ask="{word}", model="another", url=server.url, cache=str(tmp_path))
        assert [row["reward"] for row in judged(other, ["good"])] == [1.0]
        assert len(server.asked) == 4
        without = Judge(ask="{word}", model="m", url=server.url, cache=None)
        assert [row["reward"] for row in judged(without, ["good"])] == [1.0]
        assert len(server.asked) == 5


def test_the_key_comes_from_the_environment_and_is_written_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_JUDGES_KEY", KEY)
    with serving(good=[(200, "1")], leaky=[(401, {"error": f"the key {KEY} is wrong"})]) as server:
        judge = Judge(
            ask="{word}", model="m", url=server.url, key_env="MY_JUDGES_KEY", cache=str(tmp_path)
        )
        rows = judged(judge, ["good", "leaky"])
        assert set(server.keys) == {f"Bearer {KEY}"}
    assert KEY not in repr(judge) + repr(rows) + json.dumps(judge.scorer.knobs(), default=str)
    assert "the key ... is wrong" in rows[1]["error"]
    assert not any(KEY in path.read_text() for path in tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"ask": "no column"}, "name one, such as"),
        ({"ask": "{completion"}, "which is no template|is no template"),
        ({"ask": "{0}"}, "name one, such as"),
        ({"ask": "{completion}", "url": "localhost:8000"}, "which is no address"),
        ({"ask": "{completion}", "retries": -1}, "retries=-1"),
        ({"ask": "{completion}", "deadline_s": 0}, "timeout_s=0"),
    ],
)
def test_a_judge_that_cannot_be_is_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        _ = Judge(model="m", **knobs).scorer
