"""The routes: shapes of answers, streams, errors, keys; the engine follows a script."""

import json
import threading

import pytest
from rigs.machine import wait_until
from serving_rig import END, ScriptedEngine, byte_tokenizer

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


TEXT = {"model": "tiny", "prompt": "hi", "max_tokens": 30}


def post(client, body, path="/v1/completions", status=200, **headers):
    answer = client.post(path, json=body, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


def chat(client, body, **knobs):
    return post(client, {**CHAT, **body}, "/v1/chat/completions", **knobs)


def events(client, body, path="/v1/completions"):
    """The chunks of a stream, after which it says that it is done."""
    answer = client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith(
        "text/event-stream"
    )
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_completion_has_the_shape_of_openai(client_of, tokenizer):
    body = post(client_of("hello world"), {**TEXT, "logprobs": 0, "return_token_ids": True})
    assert (
        body["object"] == "text_completion"
        and body["model"] == "tiny"
        and body["id"].startswith("cmpl-")
    )
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["index"]) == ("hello world", "stop", 0)
    assert choice["prompt_token_ids"] == tokenizer("hi")["input_ids"]
    assert choice["token_ids"] == [*tokenizer("hello world")["input_ids"], END]
    assert choice["logprobs"] == {
        "tokens": ["hello", " world", "<|im_end|>"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": None,
        "text_offset": [0, 5, 11],
    }
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def test_a_chat_completion_has_the_shape_of_openai(client_of, tokenizer):
    body = chat(client_of("hello é"), {"logprobs": True, "return_token_ids": True})
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello é", "refusal": None}
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["hello", " ", "\ufffd", "\ufffd", "<|im_end|>"]
    assert entries[0] == {
        "token": "hello",
        "logprob": -0.5,
        "bytes": list(b"hello"),
        "top_logprobs": [],
    }
    assert entries[2]["bytes"] is None
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert body["prompt_token_ids"] == tokenizer(prompt, add_special_tokens=False)["input_ids"]


def test_prompts_may_be_texts_or_token_ids_and_choices_are_counted_through(client_of, rows):
    client = client_of(lambda prompt: prompt.upper())
    body = post(client, {**TEXT, "prompt": ["ab", "cd"], "n": 2})
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (0, "AB"),
        (1, "AB"),
        (2, "CD"),
        (3, "CD"),
    ]
    ids = [byte_tokenizer()(text)["input_ids"] for text in ("hello", "xy")]
    assert [c["text"] for c in post(client, {**TEXT, "prompt": ids})["choices"]] == ["HELLO", "XY"]
    assert [c["text"] for c in post(client, {**TEXT, "prompt": ids[0]})["choices"]] == ["HELLO"]
    assert [(row["group_id"], row["group_size"], row["position"]) for row in rows[:4]] == [
        (0, 2, 0),
        (0, 2, 1),
        (1, 2, 0),
        (1, 2, 1),
    ]
    assert rows[-1]["prompt"] == "hello" and len({row["rollout_id"] for row in rows}) == 7


@pytest.mark.parametrize("stops", [[], ["wor"], ["xyz", "😀"]])
def test_a_stream_adds_up_to_the_whole_answer(client_of, stops):
    client = client_of("hello wörld 😀 worldly")
    ask = {**CHAT, "stop": stops, "logprobs": True, "return_token_ids": True, "seed": 5}
    whole = chat(client, ask)["choices"][0]
    chunks = events(
        client, {**ask, "stream_options": {"include_usage": True}}, "/v1/chat/completions"
    )
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == len(
        whole["token_ids"]
    )
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert "".join(c["delta"].get("content", "") for c in choices) == whole["message"]["content"]
    assert [token for c in choices for token in c.get("token_ids", [])] == whole["token_ids"]
    entries = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert entries == whole["logprobs"]["content"]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop"]
    for stop in stops:
        assert stop not in whole["message"]["content"]


def test_a_stream_of_several_choices_keeps_them_apart(client_of):
    client = client_of(lambda prompt: prompt.upper())
    chunks = events(client, {**TEXT, "prompt": ["ab", "cd"], "n": 2})
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: "AB", 1: "AB", 2: "CD", 3: "CD"}


def test_a_stop_string_ends_the_text_before_it(client_of, rows):
    client = client_of("one two three")
    for stop, text in ((" tw", "one"), (["ee", "two"], "one "), ("never", "one two three")):
        choice = post(client, {**TEXT, "stop": stop})["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    assert [row["completion"] for row in rows] == ["one", "one ", "one two three"]


def test_a_special_token_may_be_a_stop(client_of):
    client = client_of("one <|im_start|> two")
    assert post(client, {**TEXT, "stop": "<|im_start|>"})["choices"][0]["text"] == "one "
    assert post(client, {**TEXT, "stop": ["<|im_start|>", "ne"]})["choices"][0]["text"] == "o"
    assert post(client, {**TEXT, "stop": "<|im_end|>"})["choices"][0]["text"] == "one  two"


def test_length_is_a_finish_reason(client_of):
    client = client_of("hello world hello world")
    assert post(client, {**TEXT, "max_tokens": 2})["choices"][0]["finish_reason"] == "length"
    assert chat(client, {"max_completion_tokens": 1})["choices"][0]["message"]["content"] == "hello"
    del_max = {"model": "tiny", "prompt": "hi"}
    assert post(client_of("x" * 40), del_max)["usage"]["completion_tokens"] == 16


def test_the_knobs_of_a_call_reach_the_engine(client_of):
    client = client_of("x")
    knobs = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 3,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
    }
    post(client, {**TEXT, **knobs, "seed": 1, "n": 2})
    post(client, {**TEXT, **knobs, "seed": 1, "n": 2})
    first, second = client.engine.started
    assert {name: getattr(first.sampling, name) for name in knobs} == knobs
    assert list(first.seeds) == list(second.seeds) and len(set(first.seeds)) == 2


def test_calls_are_recorded_with_who_asked_and_how(client_of, rows):
    client = client_of("hello")
    first = chat(client, {"user": "ann", "temperature": 0.5})
    post(client, {**TEXT, "user": "ann"}, **{"X-Session-Id": "run-7"})
    post(client, TEXT)
    assert [row["session_id"] for row in rows] == ["ann", "run-7", None]
    assert rows[0]["request_id"] == first["id"] and rows[0]["model"] == "tiny"
    assert json.loads(rows[0]["prompt"]) == CHAT["messages"]
    assert json.loads(rows[0]["parameters"])["temperature"] == 0.5
    assert rows[0]["completion"] == "hello" and rows[0]["finish_reason"] == "stop"
    assert rows[1]["tokens"][-1] == END and rows[1]["mask"] == [False, False, True, True]


def test_messages_may_have_parts_nulls_and_tools(client_of, rows, tokenizer):
    client = client_of("x")
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    messages = [
        {"role": "user", "content": parts, "name": None},
        {"role": "assistant", "content": None},
    ]
    chat(client, {"messages": messages, "tools": [tool]})
    text = tokenizer.decode(rows[0]["tokens"])
    assert "<|im_start|>user\nhello<|im_end|>" in text and '"name": "add"' in text
    chat(client, {"tools": [tool], "tool_choice": "none"})
    assert "add" not in tokenizer.decode(rows[1]["tokens"])


BAD = {
    "no_json": (b"{", 400, None, "invalid_json"),
    "no_object": (b"[]", 400, None, "invalid_json"),
    "no_model": ({"prompt": "x"}, 400, "model", "missing_required_parameter"),
    "other_model": ({**TEXT, "model": "gpt"}, 404, "model", "model_not_found"),
    "no_prompt": ({"model": "tiny"}, 400, "prompt", "missing_required_parameter"),
    "empty_prompt": ({**TEXT, "prompt": ""}, 400, "prompt", "invalid_value"),
    "empty_list": ({**TEXT, "prompt": []}, 400, "prompt", "invalid_value"),
    "mixed_prompt": ({**TEXT, "prompt": ["a", 3]}, 400, "prompt", "invalid_value"),
    "unknown_token": ({**TEXT, "prompt": [10**6]}, 400, "prompt", "unknown_token"),
    "too_long": ({**TEXT, "prompt": "x" * 300}, 400, "prompt", "context_length_exceeded"),
    "too_many_tokens": ({**TEXT, "max_tokens": 255}, 400, "prompt", "context_length_exceeded"),
    "no_tokens": ({**TEXT, "max_tokens": 0}, 400, "max_tokens", "invalid_value"),
    "cold": ({**TEXT, "temperature": -1}, 400, "temperature", "invalid_value"),
    "hot": ({**TEXT, "temperature": "hot"}, 400, "temperature", "invalid_value"),
    "top_p": ({**TEXT, "top_p": 0}, 400, "top_p", "invalid_value"),
    "top_k": ({**TEXT, "top_k": 1.5}, 400, "top_k", "invalid_value"),
    "penalty": ({**TEXT, "repetition_penalty": 0}, 400, "repetition_penalty", "invalid_value"),
    "n": ({**TEXT, "n": 0}, 400, "n", "invalid_value"),
    "n_many": ({**TEXT, "n": 1000}, 400, "n", "invalid_value"),
    "stop": ({**TEXT, "stop": [""]}, 400, "stop", "invalid_value"),
    "seed": ({**TEXT, "seed": True}, 400, "seed", "invalid_value"),
    "alternatives": ({**TEXT, "logprobs": 21}, 400, "logprobs", "invalid_value"),
    "echo": ({**TEXT, "echo": True}, 400, "echo", "unsupported_parameter"),
    "penalised": (
        {**TEXT, "presence_penalty": 0.5},
        400,
        "presence_penalty",
        "unsupported_parameter",
    ),
    "unknown": ({**TEXT, "max_tokns": 3}, 400, "max_tokns", "unknown_parameter"),
    "messages_there": ({**TEXT, "messages": []}, 400, "messages", "unknown_parameter"),
    "stream_options": (
        {**TEXT, "stream_options": {"include_usage": True}},
        400,
        "stream_options",
        "invalid_value",
    ),
}


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}


BAD_CHAT = {
    "no_messages": ({"messages": []}, "messages", "invalid_value"),
    "no_role": ({"messages": [{"content": "x"}]}, "messages[0].role", "invalid_value"),
    "image": ({"messages": [IMAGE]}, "messages[0].content", "unsupported_content"),
    "template": (
        {"messages": [{"role": "moderator", "content": "x"}]},
        "messages",
        "invalid_value",
    ),
    "alternatives": ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    "an engine without them": (
        {"logprobs": True, "top_logprobs": 3},
        "top_logprobs",
        "unsupported_parameter",
    ),
    "tool_choice": ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    "format": (
        {"response_format": {"type": "json_object"}},
        "response_format",
        "unsupported_parameter",
    ),
    "two_limits": ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_completion_call_is_refused_with_an_error_of_openai(client_of, case):
    body, status, param, code = BAD[case]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    client = client_of("x")
    answer = client.post(
        "/v1/completions", content=content, headers={"Content-Type": "application/json"}
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code)
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert error["message"].count(";") >= 1
    assert post(client, TEXT)["choices"][0]["text"] == "x"


@pytest.mark.parametrize("case", BAD_CHAT)
def test_a_bad_chat_call_is_refused_with_an_error_of_openai(client_of, case):
    body, param, code = BAD_CHAT[case]
    error = chat(client_of("x"), body, status=400)["error"]
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")


def test_values_that_ask_for_nothing_are_accepted(client_of):
    nothing = {
        "presence_penalty": 0,
        "logit_bias": {},
        "best_of": None,
        "echo": False,
        "suffix": None,
        "store": True,
    }
    assert post(client_of("x"), {**TEXT, **nothing})["choices"][0]["text"] == "x"
    chat(
        client_of("x"),
        {"response_format": {"type": "text"}, "top_logprobs": 0, "metadata": {"a": "b"}},
    )


def test_a_tokenizer_without_a_chat_template_serves_completions_only(rows):
    from serving_rig import scripted, service_of
    from starlette.testclient import TestClient

    from operators.serving.app import make_app

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    service = service_of(scripted(tokenizer, "x"), tokenizer)
    with TestClient(make_app(service), base_url="http://localhost") as client:
        assert chat(client, {}, status=400)["error"]["code"] == "no_chat_template"
        assert post(client, TEXT)["choices"][0]["text"] == "x"


def test_a_text_with_a_token_that_the_model_lacks_is_refused(client_of, rows):
    client = client_of("x", vocabulary=100)
    assert post(client, {**TEXT, "prompt": "hello"}, status=400)["error"]["code"] == "unknown_token"
    assert post(client, {**TEXT, "prompt": [99, 3]})["choices"][0]["text"] == "x" and len(rows) == 1


def test_a_prompt_that_is_too_long_is_a_record_too(client_of, rows):
    post(client_of("x"), {**TEXT, "prompt": ["a" * 300, "b"]}, status=400)
    assert [row["finish_reason"] for row in rows] == ["error", "error"]
    assert "300 tokens" in rows[0]["error"] and rows[0]["mask"] == [False] * 300


def test_an_overloaded_server_says_when_to_come_again(client_of, rows):
    permits = threading.Semaphore(0)
    engine = ScriptedEngine(lambda prompt, seed: [5, END], slots=1, permits=permits)
    client = client_of(engine, most_waiting=1)
    calls = [threading.Thread(target=post, args=(client, TEXT)) for _ in range(2)]
    calls[0].start()
    wait_until(lambda: engine.entered == 1, what="the first call to start")
    calls[1].start()
    wait_until(lambda: client.get("/health").json()["waiting"] == 1, what="the second call to wait")
    answer = client.post("/v1/completions", json=TEXT)
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
    assert (
        answer.json()["error"]["type"] == "rate_limit_error"
        and answer.json()["error"]["code"] == "overloaded"
    )
    permits.release(100)
    for call in calls:
        call.join(20)
    assert len(rows) == 2


def test_a_call_that_takes_too_long_is_ended_and_recorded(client_of, rows):
    permits = threading.Semaphore(1)
    engine = ScriptedEngine(lambda prompt, seed: [*prompt, 5, END], permits=permits)
    client = client_of(engine, call_timeout_s=0.05)
    assert post(client, TEXT, status=504)["error"]["code"] == "timeout"
    permits.release(100)
    wait_until(lambda: rows, what="the record")
    assert "not over after 0.05 s" in rows[0]["error"]


def test_an_engine_that_fails_is_an_error_of_the_server(client_of, rows):
    engine = ScriptedEngine(lambda prompt, seed: [5, END])
    client = client_of(engine)
    engine.broken = RuntimeError("out of memory")
    error = post(client, TEXT, status=503)["error"]
    assert error["type"] == "server_error" and "out of memory" in error["message"]
    assert client.get("/health").status_code == 503
    engine.broken = RuntimeError("again")
    chunks = events(client, TEXT)
    assert "again" in chunks[-1]["error"]["message"]
    assert post(client, TEXT)["usage"]["completion_tokens"] == 2
    assert client.get("/health").json()["status"] == "ok"
    assert [row["error"] is None for row in rows] == [False, False, True]


def test_a_call_that_cannot_be_recorded_is_not_answered(tokenizer):
    from serving_rig import scripted, service_of
    from starlette.testclient import TestClient

    from operators.serving.app import make_app

    service = service_of(scripted(tokenizer, "x"), tokenizer)

    def full(rows):
        raise OSError("the disk is full")

    service._on_rollout = (full,)
    with TestClient(make_app(service), base_url="http://localhost") as client:
        error = post(client, TEXT, status=500)["error"]
    assert error["code"] == "not_recorded" and "the disk is full" in error["message"]


def test_models_and_health_are_told(client_of):
    client = client_of("x")
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"]) == ("tiny", "model")
    post(client, TEXT)
    health = client.get("/health").json()
    assert (health["status"], health["live"], health["recorded"], health["version"]) == (
        "ok",
        0,
        1,
        0,
    )


def test_an_address_that_is_not_served_names_those_that_are(client_of):
    client = client_of("x")
    for method, path, status in (("GET", "/v1/embeddings", 404), ("GET", "/v1/completions", 405)):
        answer = client.request(method, path)
        assert (
            answer.status_code == status
            and "POST /v1/completions" in answer.json()["error"]["message"]
        )


def test_a_key_is_asked_of_every_call(client_of):
    client = client_of("x", app={"api_key": "secret"})
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        answer = client.post("/v1/completions", json=TEXT, headers=headers)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert "secret" not in answer.text
    assert client.get("/health").status_code == 401
    post(client, TEXT, Authorization="Bearer secret")


def test_a_page_on_another_host_cannot_call(client_of):
    client = client_of("x")
    answer = client.post("/v1/completions", json=TEXT, headers={"Host": "evil.example"})
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "host_not_allowed"
    answer = client.post(
        "/v1/completions", content=json.dumps(TEXT), headers={"Content-Type": "text/plain"}
    )
    assert answer.status_code == 415
