"""A call that has to call a tool: what is forced is context, the rest is sampled, and no call is
text.
"""

import json

import pytest
from serving_rig import END, TEMPLATE, TOOLED, byte_tokenizer, scripted, served, service_of
from starlette.testclient import TestClient

from operators.serving.app import make_app

ANY, ADD = '<tool_call>\n{"name": "', '<tool_call>\n{"name": "add", "arguments":'


REST = {ANY: 'add", "arguments": {"a": 1}}\n</tool_call>', ADD: ' {"a": 1}}\n</tool_call>'}


"""What the policy writes behind each."""


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


USER = {"role": "user", "content": "hello"}


NAMES = ("add", "subtract")


CHAT_TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES
]


TOOLS = {
    "/v1/chat/completions": CHAT_TOOLS,
    "/v1/responses": [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES],
    "/v1/messages": [{"name": name, "input_schema": SCHEMA} for name in NAMES],
}


ASKED = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/responses": {"input": [USER]},
    "/v1/messages": {"messages": [USER], "max_tokens": 500},
}


CHOICES = {
    ("/v1/chat/completions", ANY): "required",
    ("/v1/chat/completions", ADD): {"type": "function", "function": {"name": "add"}},
    ("/v1/responses", ANY): "required",
    ("/v1/responses", ADD): {"type": "function", "name": "add"},
    ("/v1/messages", ANY): {"type": "any"},
    ("/v1/messages", ADD): {"type": "tool", "name": "add"},
}


def answers(prompt):
    """What is missing of a call, and once its result is there, the answer."""
    forced = [rest for opening, rest in REST.items() if prompt.endswith(opening)]
    return forced[0] if forced else "hello world"


@pytest.fixture
def tooled():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TOOLED
    return tokenizer


@pytest.fixture
def client_of_answers(tooled, rows):
    opened = []

    def make(answer=answers):
        service = service_of(scripted(tooled, answer, context_tokens=2048), tooled, rows)
        opened.append(TestClient(make_app(service), base_url="http://127.0.0.1"))
        return opened[-1].__enter__()

    yield make
    for client in opened:
        client.__exit__(None, None, None)


def post(client, path, body, status=200):
    answer = client.post(path, json={"model": "tiny", **body})
    assert answer.status_code == status, answer.text
    return answer.json()


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def check_forced(row, tokenizer, opening, said):
    """The opening is the end of the context, to the id; what was sampled behind it, and no more, is
    the policy's.
    """
    sampled = [*ids_of(tokenizer, said), END]
    given = len(row["tokens"]) - len(sampled)
    assert row["tokens"][given:] == sampled
    assert row["mask"] == [False] * given + [True] * len(sampled)
    assert row["logprobs"] == [0.0] * given + [-0.5] * len(sampled)
    assert row["versions"] == [-1] * given + [0] * len(sampled)
    forced = ids_of(tokenizer, opening)
    assert row["tokens"][given - len(forced) : given] == forced
    assert tokenizer.decode(row["tokens"][: given - len(forced)]).endswith(
        "<|im_start|>assistant\n"
    )


def calls_in(path, said):
    """Name and arguments of the calls in an answer, and why it ended."""
    if path == "/v1/responses":
        assert [item["type"] for item in said["output"]] == ["function_call"]
        return [(item["name"], json.loads(item["arguments"])) for item in said["output"]], said[
            "status"
        ]
    if path == "/v1/messages":
        assert [block["type"] for block in said["content"]] == ["tool_use"]
        return [(block["name"], block["input"]) for block in said["content"]], said["stop_reason"]
    (choice,) = said["choices"]
    assert choice["message"]["content"] is None
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    return [(each["name"], json.loads(each["arguments"])) for each in functions], choice[
        "finish_reason"
    ]


@pytest.mark.parametrize(("path", "opening"), CHOICES)
def test_a_forced_call_begins_as_the_template_has_it_and_only_the_rest_is_the_policys(
    client_of_answers, rows, tooled, path, opening
):
    asked = {**ASKED[path], "tools": TOOLS[path], "tool_choice": CHOICES[path, opening]}
    said = post(client_of_answers(), path, asked)
    ends = {"/v1/responses": "completed", "/v1/messages": "tool_use"}
    assert calls_in(path, said) == ([("add", {"a": 1})], ends.get(path, "tool_calls"))
    (row,) = rows
    check_forced(row, tooled, opening, REST[opening])
    assert row["completion"] == opening + REST[opening]
    assert json.loads(row["parameters"])["must_call"] == (
        ["add"] if opening == ADD else ["add", "subtract"]
    )
    if path == "/v1/responses":
        assert said["tool_choice"] == CHOICES[path, opening]
    if path == "/v1/chat/completions":
        sampled = len(ids_of(tooled, REST[opening])) + 1
        assert said["usage"]["completion_tokens"] == sampled
        assert said["usage"]["prompt_tokens"] == len(row["tokens"]) - sampled


@pytest.mark.parametrize("opening", [ANY, ADD])
def test_a_chat_goes_on_with_the_ids_of_a_forced_call(client_of_answers, rows, tooled, opening):
    path = "/v1/chat/completions"
    client = client_of_answers()
    asked = {"messages": [USER], "tools": CHAT_TOOLS, "tool_choice": CHOICES[path, opening]}
    message = post(client, path, asked)["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "4"}
    said = post(client, path, {"messages": [USER, message, result], "tools": CHAT_TOOLS})
    assert said["choices"][0]["message"]["content"] == "hello world"
    first, second = rows
    assert second["tokens"][: len(first["tokens"])] == first["tokens"]
    assert (second["parent_rollout_id"], second["reused_tokens"]) == (
        first["rollout_id"],
        len(first["tokens"]),
    )
    again = post(client, path, {**asked, "messages": [USER, message, result]})
    assert again["choices"][0]["finish_reason"] == "tool_calls"
    check_forced(rows[2], tooled, opening, REST[opening])
    assert rows[2]["tokens"][: len(first["tokens"])] == first["tokens"]


def test_one_tool_that_has_to_be_called_is_named(client_of_answers, rows, tooled):
    asked = {"messages": [USER], "tools": CHAT_TOOLS[:1], "tool_choice": "required"}
    post(client_of_answers(), "/v1/chat/completions", asked)
    check_forced(rows[0], tooled, ADD, REST[ADD])


@pytest.mark.parametrize(("limit", "ends"), [(None, "stop"), (3, "length")])
def test_what_comes_to_no_call_is_text_with_what_it_was_made_to_begin_with(
    client_of_answers, rows, tooled, limit, ends
):
    asked = {
        "messages": [USER],
        "tools": CHAT_TOOLS,
        "tool_choice": "required",
        "max_tokens": limit,
    }
    client = client_of_answers("hello(world")
    (choice,) = post(client, "/v1/chat/completions", asked)["choices"]
    text = ANY + tooled.decode(ids_of(tooled, "hello(world")[:limit])
    assert choice["finish_reason"] == ends and "tool_calls" not in choice["message"]
    assert choice["message"]["content"] == text
    post(client, "/v1/chat/completions", {**asked, "messages": [USER, choice["message"], USER]})
    first, second = rows
    assert second["tokens"][: len(first["tokens"])] == first["tokens"]
    assert second["parent_rollout_id"] == first["rollout_id"]


def test_a_stop_string_is_looked_for_behind_what_was_forced(client_of_answers, rows):
    asked = {"messages": [USER], "tools": CHAT_TOOLS, "tool_choice": "required", "stop": ['"']}
    (choice,) = post(client_of_answers(), "/v1/chat/completions", asked)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (ANY + "add", "stop")


def test_a_stream_of_a_forced_call_shows_none_of_it_as_content(client_of_answers):
    asked = {
        "messages": [USER],
        "tools": CHAT_TOOLS,
        "tool_choice": "required",
        "stream": True,
        "model": "tiny",
    }
    lines = client_of_answers().post("/v1/chat/completions", json=asked).text.splitlines()
    deltas = [
        json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")
    ]
    assert not "".join(delta.get("content") or "" for delta in deltas)
    (called,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert called[0]["function"] == {"name": "add", "arguments": '{"a": 1}'}


WRONG = {
    "no tools": {"tool_choice": "required", "tools": []},
    "another": {"tool_choice": {"type": "function", "function": {"name": "multiply"}}},
    "no name": {"tool_choice": {"type": "function"}},
    "some of them": {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}},
    "a word": {"tool_choice": "always"},
}


@pytest.mark.parametrize("case", WRONG)
def test_a_choice_that_names_no_tool_of_the_call_is_refused(client_of_answers, rows, case):
    asked = {"messages": [USER], "tools": CHAT_TOOLS, **WRONG[case]}
    error = post(client_of_answers(), "/v1/chat/completions", asked, status=400)["error"]
    assert (error["param"], error["code"]) == (
        "tool_choice",
        "invalid_value",
    ) and "send tools" in error["message"]
    for path, choice in (("/v1/messages", {"type": "any"}), ("/v1/responses", "required")):
        post(client_of_answers(), path, {**ASKED[path], "tool_choice": choice}, status=400)
    assert not rows


COUNTING = TEMPLATE.replace("{{ m.content }}", "{{ m.content }}{{ m.content | length }}")


"""What stands behind a turn depends on it, so that no delimiters can be told."""


@pytest.mark.parametrize("template", [TEMPLATE, COUNTING])
def test_a_template_whose_calls_have_no_known_beginning_is_refused(rows, template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    service = service_of(scripted(tokenizer, answers, context_tokens=2048), tokenizer, rows)
    with TestClient(make_app(service), base_url="http://127.0.0.1") as client:
        asked = {"messages": [USER], "tools": CHAT_TOOLS, "tool_choice": "required"}
        error = post(client, "/v1/chat/completions", asked, status=400)["error"]
        assert (error["param"], error["code"]) == ("tool_choice", "unsupported_parameter")
        assert "no call can be forced" in error["message"]
    assert not rows


def test_the_client_of_openai_forces_calls(tooled, rows):
    openai = pytest.importorskip("openai")
    with (
        served(service_of(scripted(tooled, answers, context_tokens=2048), tooled, rows)) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="one", max_retries=0) as theirs,
    ):
        said = theirs.chat.completions.create(
            model="tiny", messages=[USER], tools=CHAT_TOOLS, tool_choice="required"
        )
        assert said.choices[0].message.tool_calls[0].function.name == "add"
        path = "/v1/responses"
        said = theirs.responses.create(
            model="tiny", input=[USER], tools=TOOLS[path], tool_choice=CHOICES[path, ADD]
        )
        assert said.output[0].name == "add" and said.tool_choice.name == "add"
    assert len(rows) == 2


def test_the_client_of_anthropic_forces_calls(tooled, rows):
    anthropic = pytest.importorskip("anthropic")
    with (
        served(service_of(scripted(tooled, answers, context_tokens=2048), tooled, rows)) as address,
        anthropic.Anthropic(base_url=address, api_key="two", max_retries=0) as other,
    ):
        said = other.messages.create(
            model="tiny",
            messages=[USER],
            max_tokens=500,
            tools=TOOLS["/v1/messages"],
            tool_choice={"type": "any"},
        )
        assert (said.content[0].name, said.stop_reason) == ("add", "tool_use")
    assert len(rows) == 1
