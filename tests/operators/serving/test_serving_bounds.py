"""What a stranger sends is bounded before anything is built of it."""

import gc
import json
import re
import threading
import weakref

import pytest
from rigs.machine import wait_until
from serving_rig import END, ScriptedEngine, byte_tokenizer, scripted, service_of

from operators.engine.decode import MOST_STOPS
from operators.engine.stop_strings import StopCache
from operators.serving import app as routes
from operators.serving.errors import ApiError, Bounds, Budget, read_json
from operators.serving.requests import parse

TEXT = {"model": "tiny", "prompt": "ab"}


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


SMALL = Bounds(
    body_bytes=1 << 16,
    values=1000,
    messages=8,
    rollouts=8,
    stops=4,
    stop_characters=10,
    name_characters=20,
    characters_per_token=2,
)


"""Of a context of 256 tokens."""


JSON = {"Content-Type": "application/json"}


REFUSED = {
    "body": (TEXT | {"prompt": "x" * (1 << 16)}, 413, None, "more than 65536 bytes"),
    "values": (TEXT | {"prompt": [[1] * 10] * 100}, 400, None, r"values, and at most 1000"),
    "values_in_what_is_unknown": (
        TEXT | {"metadata": [[]] * 1000},
        400,
        None,
        r"values, and at most 1000",
    ),
    "messages": (
        CHAT | {"messages": CHAT["messages"] * 9},
        400,
        "messages",
        "found 9 of at most 8",
    ),
    "prompts": (TEXT | {"prompt": ["a"] * 9}, 400, "prompt", "found 9 of at most 8"),
    "prompts_times_n": (
        TEXT | {"prompt": ["a"] * 3, "n": 4},
        400,
        "prompt",
        "found 3 of at most 2",
    ),
    "stops": (TEXT | {"stop": list("abcde")}, 400, "stop", "4 texts of 10 characters; found 5"),
    "long_stop": (TEXT | {"stop": "a" * 11}, 400, "stop", "the longest of 11"),
    "text": (TEXT | {"prompt": "x" * 513}, 400, "prompt", "513 characters.*at most 512"),
    "one_of_two_texts": (
        TEXT | {"prompt": ["a", "x" * 513]},
        400,
        "prompt",
        "513 characters.*at most 512",
    ),
    "chat": (
        CHAT | {"messages": [{"role": "user", "content": "x" * 600}]},
        400,
        "messages",
        "at most 512",
    ),
    "ignored_in_a_message": (
        CHAT | {"messages": [{"role": "user", "x": "x" * 600}]},
        400,
        "messages",
        "at most 512",
    ),
    "tools": (CHAT | {"tools": [{"x": "x" * 600}]}, 400, "tools", "at most 512"),
    "token": (TEXT | {"prompt": [10**30]}, 400, "prompt", "token 1000"),
    "top_k": (TEXT | {"top_k": 10**30}, 400, "top_k", "at most 2147483647"),
    "max_tokens": (TEXT | {"max_tokens": 10**30}, 400, "max_tokens", "at most 2147483647"),
    "model": (TEXT | {"model": "m" * 21}, 400, "model", "at most 20 characters"),
    "user": (TEXT | {"user": "u" * 21}, 400, "user", "at most 20 characters"),
    "field": (TEXT | {"f" * 2000: 1}, 400, "f" * 80, "not a field"),
    "depth": (b"[" * 900 + b"]" * 900, 400, None, "JSON"),
    "depth_of_tools": (
        TEXT | {"tools": json.loads("[" * 900 + "]" * 900)},
        400,
        None,
        "nest too deep",
    ),
    "not_a_number": (b'{"model": "tiny", "prompt": "a", "metadata": [NaN]}', 400, None, "not JSON"),
    "infinity": (
        b'{"model": "tiny", "prompt": "a", "metadata": {"a": 1e999}}',
        400,
        None,
        "not JSON",
    ),
    "huge": (TEXT | {"temperature": 10**400}, 400, "temperature", "must be a number"),
    "surrogate": (rb'{"model": "tiny", "prompt": "a\uD800b"}', 400, None, r"\\ud800 alone"),
    "surrogate_in_a_name": (
        rb'{"model": "tiny", "prompt": "a", "\udfff": 1}',
        400,
        None,
        r"\\udfff alone",
    ),
    "surrogate_in_utf8": (b'{"model": "tiny", "prompt": "\xed\xa0\x80"}', 400, None, "utf-8"),
    "surrogate_in_a_stop": (
        rb'{"model": "tiny", "prompt": "a", "stop": "\ud812"}',
        400,
        None,
        r"\\ud812 alone",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_too_much_is_refused_at_the_door_and_leaves_nothing(case, client_of, rows):
    body, status, param, said = REFUSED[case]
    client = client_of("x", bounds=SMALL)
    path = (
        "/v1/chat/completions"
        if isinstance(body, dict) and "messages" in body
        else "/v1/completions"
    )
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post(path, content=content, headers=JSON)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (
        status,
        param,
        "invalid_request_error",
    )
    assert re.search(said, error["message"]), error["message"]
    assert len(answer.content) < 1000, "nothing large comes back"
    service = client.app.state.service
    assert rows == [] and service.thread.engine.started == [] and service.reading.taken == 0
    assert client.post("/v1/completions", json=TEXT).json()["choices"][0]["text"] == "x"


def test_a_pair_of_surrogates_is_a_character(client_of, rows):
    client = client_of("x")
    answer = client.post(
        "/v1/completions", content=rb'{"model": "tiny", "prompt": "\ud83d\ude00"}', headers=JSON
    )
    assert answer.status_code == 200 and rows[0]["prompt"] == "\U0001f600"


def test_brackets_that_nest_deeper_than_python_goes_are_no_fault_of_the_server():
    with pytest.raises(ValueError, match="nest too deep"):
        read_json("[" * 200_000 + "]" * 200_000, 1 << 30)


@pytest.mark.parametrize(
    "arguments", ["[" + "[]," * 1000 + "[]]", '{"a": "\\ud800"}', "[" * 200_000]
)
def test_arguments_of_a_tool_call_that_are_too_much_stay_the_text_that_they_are(arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    body = CHAT | {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}
    (message,) = parse("chat", body, SMALL).messages
    assert message["tool_calls"] == [call]


def test_arguments_of_a_call_that_nest_without_end_are_the_callers_fault(client_of):
    call = {"type": "function", "function": {"name": "f", "arguments": "[" * 2000}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    answer = client_of("x").post(
        "/v1/chat/completions", json=CHAT | {"messages": [*CHAT["messages"], turn]}
    )
    assert answer.status_code == 400, answer.text[:200]


def test_an_overloaded_server_refuses_a_call_before_it_reads_its_body(client_of, monkeypatch):
    permits = threading.Semaphore(0)
    engine = ScriptedEngine(lambda prompt, seed: [5, END], slots=1, permits=permits)
    client = client_of(engine, most_waiting=1)
    calls = [
        threading.Thread(target=client.post, args=("/v1/completions",), kwargs={"json": TEXT})
        for _ in range(2)
    ]
    calls[0].start()
    wait_until(lambda: engine.entered == 1, what="the first call to start")
    calls[1].start()
    wait_until(lambda: client.get("/health").json()["waiting"] == 1, what="the second call to wait")
    read = []
    monkeypatch.setattr(routes, "read_json", lambda *_: read.append("body"))
    answer = client.post("/v1/completions", content=b"no JSON at all", headers=JSON)
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1" and read == []
    for _ in range(8):
        permits.release()
    for call in calls:
        call.join()


def test_a_call_of_many_prompts_is_refused_before_one_of_them_is_made_tokens_of(
    tokenizer, monkeypatch
):
    service = service_of(scripted(tokenizer, "x"), tokenizer, most_waiting=2)
    monkeypatch.setattr(service.vocabulary, "tokenizer", None)
    with pytest.raises(ApiError, match="3 prompts cannot be queued"):
        service.begin(parse("completion", TEXT | {"prompt": ["a", "b", "c"]}), None)


def test_bodies_that_are_being_read_share_a_budget_which_they_give_back(client_of):
    budget = Budget(100)
    budget.take(60)
    with pytest.raises(
        ApiError, match="60 bytes of calls are being read, of at most 100"
    ) as refused:
        budget.take(41)
    assert refused.value.status == 429
    budget.give(60)
    budget.take(100)
    client = client_of("x", bounds=Bounds(bodies_bytes=40))
    answer = client.post("/v1/completions", json=TEXT | {"user": "u" * 40})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
    assert client.app.state.service.reading.taken == 0
    assert client.post("/v1/completions", json=TEXT).status_code == 200


def test_no_more_stop_lists_are_kept_than_have_a_place():
    stopping = StopCache(byte_tokenizer(), frozenset([END]))
    first = stopping(("first",))
    again = stopping(("first",))
    assert first is again
    gone, made = weakref.ref(first), stopping.made
    del first, again
    for number in range(3 * MOST_STOPS):
        assert stopping((f"stop {number}",)) is not None
    gc.collect()
    assert made.cache_info().currsize == MOST_STOPS and gone() is None
