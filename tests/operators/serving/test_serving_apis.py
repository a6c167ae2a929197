"""Every API over one engine: tools are called, turns keep their ids, clients of OpenAI and
Anthropic are served.
"""

import json

import pytest
from serving_rig import END, TOOLED, byte_tokenizer, scripted, served, service_of
from starlette.testclient import TestClient

from operators.serving.app import make_app

CALLED = 'well <tool_call>\n{"arguments": {"a":1},   "name": "add"}\n</tool_call>'


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA},
}


USER = {"role": "user", "content": "hello"}


TORN = [
    CALLED.replace('"a":1', f'"a":{value}')
    for value in (r'"\ud83d"', "1e999", "-Infinity", "[" * 200 + "]" * 200)
]


"""Calls that no answer can hold."""


def answers(prompt):
    """A call, and once its result is there, the answer."""
    torn = prompt.partition("torn ")[2][:1]
    return TORN[int(torn)] if torn else "hello world" if "<|im_start|>tool\n" in prompt else CALLED


@pytest.fixture
def tooled():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TOOLED
    return tokenizer


@pytest.fixture
def client(tooled, rows):
    service = service_of(scripted(tooled, answers, context_tokens=2048), tooled, rows)
    with TestClient(make_app(service), base_url="http://127.0.0.1") as client:
        yield client


def post(client, path, body, status=200, **knobs):
    answer = client.post(path, json=body, **knobs)
    assert answer.status_code == status, answer.text
    return answer.json()


def check_kept(rows, tokenizer):
    """The second call goes on with the ids of the first."""
    first, second = rows
    assert second["tokens"][: len(first["tokens"])] == first["tokens"]
    assert second["parent_rollout_id"] == first["rollout_id"]
    assert second["reused_tokens"] == len(first["tokens"])
    text = tokenizer.decode(second["tokens"])
    assert (
        CALLED
        + "<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\nhello world<|im_end|>"
        in text
    )


def test_a_call_is_parsed_and_its_result_goes_on_with_the_ids_that_were_drawn(client, rows, tooled):
    chat = {"model": "tiny", "messages": [USER], "tools": [TOOL]}
    (choice,) = post(client, "/v1/chat/completions", chat)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]) == (
        "function",
        {"name": "add", "arguments": '{"a": 1}'},
    )
    assert choice["message"]["content"] == "well"
    result = {"role": "tool", "tool_call_id": call["id"], "content": "4"}
    chat = {**chat, "messages": [USER, choice["message"], result]}
    (choice,) = post(client, "/v1/chat/completions", chat)["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "hello world")
    assert "tool_calls" not in choice["message"]
    check_kept(rows, tooled)


def test_a_history_that_was_rewritten_begins_anew(client, rows):
    chat = {"model": "tiny", "messages": [USER], "tools": [TOOL]}
    (choice,) = post(client, "/v1/chat/completions", chat)["choices"]
    said = {"role": "assistant", "content": "another"}
    post(client, "/v1/chat/completions", {**chat, "messages": [USER, said, USER]})
    assert rows[1]["parent_rollout_id"] is None
    post(
        client,
        "/v1/chat/completions",
        {**chat, "tools": [], "messages": [USER, choice["message"], USER]},
    )
    assert rows[2]["parent_rollout_id"] is None


def test_a_stream_shows_no_part_of_a_call_as_content(client):
    chat = {"model": "tiny", "messages": [USER], "tools": [TOOL], "stream": True}
    lines = client.post("/v1/chat/completions", json=chat).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "well"
    (called,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert called[0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_without_tools_a_call_is_text(client):
    (choice,) = post(client, "/v1/chat/completions", {"model": "tiny", "messages": [USER]})[
        "choices"
    ]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALLED, "stop")


def test_ids_go_in_and_out_by_the_token_route(client, rows, tooled):
    ids = tooled("hello", add_special_tokens=False)["input_ids"]
    body = {
        "model": "tiny",
        "token_ids": ids,
        "cache_salt": "7",
        "sampling_params": {"logprobs": 1, "seed": 3},
    }
    answer = post(client, "/inference/v1/generate", body)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == [*tooled(CALLED, add_special_tokens=False)["input_ids"], END]
    assert (answer["prompt_token_ids"], choice["finish_reason"]) == (ids, "stop")
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-0.5] * len(
        choice["token_ids"]
    )
    assert (
        rows[0]["tokens"] == ids + choice["token_ids"]
        and answer["request_id"] == rows[0]["request_id"]
    )
    stop = tooled(CALLED, add_special_tokens=False)["input_ids"][2]
    body["sampling_params"] = {"stop_token_ids": [stop], "skip_special_tokens": False}
    (choice,) = post(client, "/inference/v1/generate", body)["choices"]
    assert (choice["token_ids"][-1], choice["finish_reason"]) == (stop, "stop")
    post(
        client, "/inference/v1/generate", {**body, "sampling_params": {"min_tokens": 3}}, status=400
    )
    post(client, "/inference/v1/generate", {**body, "token_ids": "hello"}, status=400)


def test_models_say_how_much_fits_into_the_context(client):
    (model,) = client.get("/v1/models").json()["data"]
    assert model["max_model_len"] == 2048


def test_a_key_names_the_session_where_none_is_asked_for(client, rows):
    chat = {"model": "tiny", "messages": [USER]}
    for headers in (
        {"authorization": "Bearer rollout-7"},
        {"x-api-key": "rollout-7"},
        {"authorization": "Bearer none"},
    ):
        post(client, "/v1/chat/completions", chat, headers=headers)
    assert [row["session_id"] for row in rows] == ["rollout-7", "rollout-7", None]


def test_anthropics_messages_call_tools(client, rows, tooled):
    tool = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
    ask = {"model": "tiny", "max_tokens": 900, "system": "s", "messages": [USER], "tools": [tool]}
    said = post(client, "/v1/messages", ask)
    text, use = said["content"]
    assert text == {"type": "text", "text": "well"}
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "add", {"a": 1})
    assert (said["stop_reason"], said["type"], said["role"]) == ("tool_use", "message", "assistant")
    result = {
        "type": "tool_result",
        "tool_use_id": use["id"],
        "content": [{"type": "text", "text": "4"}],
    }
    turns = [
        USER,
        {"role": "assistant", "content": said["content"]},
        {"role": "user", "content": [result]},
    ]
    said = post(client, "/v1/messages", {**ask, "messages": turns})
    assert (said["content"], said["stop_reason"]) == (
        [{"type": "text", "text": "hello world"}],
        "end_turn",
    )
    check_kept(rows, tooled)
    said = post(client, "/v1/messages", {**ask, "messages": turns, "stop_sequences": [" world"]})
    assert (said["stop_reason"], said["stop_sequence"]) == ("stop_sequence", " world")
    for wrong in ({"max_tokens": None}, {"messages": 3}, {"mcp_servers": [{}]}, {"tools": [{}]}):
        error = post(client, "/v1/messages", {**ask, **wrong}, status=400)
        assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("torn", range(len(TORN)))
def test_a_call_that_no_answer_can_hold_is_the_text_that_the_policy_wrote(client, torn, stream):
    tool = {"name": "add", "description": "Adds."}
    user = {"role": "user", "content": f"torn {torn}"}
    own = {"model": "tiny", "stream": stream}
    asked = {
        "/v1/chat/completions": {**own, "messages": [user], "tools": [TOOL]},
        "/v1/messages": {
            **own,
            "messages": [user],
            "tools": [{**tool, "input_schema": SCHEMA}],
            "max_tokens": 900,
        },
        "/v1/responses": {
            **own,
            "input": [user],
            "tools": [{"type": "function", **tool, "parameters": SCHEMA}],
        },
    }
    for path, body in asked.items():
        answer = client.post(path, json=body)
        assert answer.status_code == 200 and '"error": {' not in answer.text, answer.text
        assert stream or (
            r"<tool_call>\n{\"arguments\": {\"a\":" in answer.text and "tool_use" not in answer.text
        )


def test_openais_responses_call_tools(client, rows, tooled):
    tool = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA}
    ask = {"model": "tiny", "instructions": "s", "input": "hello", "tools": [tool]}
    said = post(client, "/v1/responses", ask)
    message, call = said["output"]
    assert message["content"][0]["text"] == "well"
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "add", '{"a": 1}')
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "4"}
    said = post(client, "/v1/responses", {**ask, "input": [USER, *said["output"], result]})
    assert (said["output"][0]["content"][0]["text"], said["status"]) == ("hello world", "completed")
    check_kept(rows, tooled)
    post(client, "/v1/responses", {**ask, "previous_response_id": "resp_1"}, status=400)
    post(client, "/v1/responses", {**ask, "input": [{"type": "image"}]}, status=400)


def test_the_clients_of_openai_are_served(tooled, rows):
    openai = pytest.importorskip("openai")
    with (
        served(service_of(scripted(tooled, answers, context_tokens=2048), tooled, rows)) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="rollout-1", max_retries=0) as client,
    ):
        said = client.chat.completions.create(model="tiny", messages=[USER], tools=[TOOL])
        (call,) = said.choices[0].message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
        turns = [USER, said.choices[0].message, result]
        assert (
            client.chat.completions.create(model="tiny", messages=turns, tools=[TOOL])
            .choices[0]
            .message.content
        )
        check_kept(rows, tooled)
        tool = {"type": "function", **TOOL["function"]}
        said = client.responses.create(model="tiny", input=[USER], tools=[tool])
        assert said.output_text == "well" and said.output[1].name == "add"
        with client.responses.stream(model="tiny", input=[USER], tools=[tool]) as stream:
            kinds = [event.type for event in stream]
            assert stream.get_final_response().output[1].arguments == '{"a": 1}'
        assert "response.output_text.delta" in kinds and kinds[-1] == "response.completed"
    assert {row["session_id"] for row in rows} == {"rollout-1"}


def test_the_client_of_anthropic_is_served(tooled, rows):
    anthropic = pytest.importorskip("anthropic")
    tool = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
    ask = {"model": "tiny", "max_tokens": 900, "tools": [tool]}
    with (
        served(service_of(scripted(tooled, answers, context_tokens=2048), tooled, rows)) as address,
        anthropic.Anthropic(base_url=address, api_key="rollout-1", max_retries=0) as client,
    ):
        said = client.messages.create(messages=[USER], **ask)
        use = said.content[1]
        assert (use.name, use.input) == ("add", {"a": 1})
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "4"}
        turns = [
            USER,
            {"role": "assistant", "content": said.content},
            {"role": "user", "content": [result]},
        ]
        assert client.messages.create(messages=turns, **ask).content[0].text == "hello world"
        check_kept(rows, tooled)
        with client.messages.stream(messages=[USER], **ask) as stream:
            assert "".join(stream.text_stream) == "well"
            final = stream.get_final_message()
        assert (final.stop_reason, final.content[1].input) == ("tool_use", {"a": 1})
        thinking = {
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"effort": "low"},
        }
        assert client.messages.create(messages=[USER], **thinking, **ask).stop_reason == "tool_use"
        assert client.messages.count_tokens(messages=[USER], model="tiny").input_tokens == 9
        assert (
            [model.id for model in client.models.list()]
            == [client.models.retrieve("tiny").id]
            == ["tiny"]
        )
    assert {row["session_id"] for row in rows} == {"rollout-1"}
