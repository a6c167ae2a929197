"""Calls of tools: read in each model's own format; what is broken stays text, with the reason."""

import json

import pytest
from template_rig import CHATML, mistral_template, tokenizer_for, trl_template

from operators.chat.chat_format import ChatError, ChatFormat
from operators.chat.tool_calls import (
    FORMATS,
    arguments_of,
    definition_of,
    definitions_of,
    format_of,
    result_of,
)

WRITTEN = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x\\n"}}\n</tool_call>',
    "xml": (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n\n</parameter>\n"
        "</function>\n</tool_call>"
    ),
    "llama": '{"name": "add", "parameters": {"a": 1, "b": "x\\n"}}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": "x\\n"}}]',
    "mistral-named": '[TOOL_CALLS]add[ARGS]{"a": 1, "b": "x\\n"}',
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
        '```json\n{"a": 1, "b": "x\\n"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
}


def add(a: int, b: str = "") -> str:
    """Adds.

    Args:
        a: A number.
        b: A text.
    """
    return f"{a}{b}"


TOOLS = [definition_of(add)]


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_is_read(name):
    read = FORMATS[name].read(WRITTEN[name], TOOLS, first=7)
    (call,) = read.message["tool_calls"]
    assert (call["id"], call["type"], call["function"]["name"]) == ("call00007", "function", "add")
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": "x\n"}
    assert (read.message["content"], read.broken) == ("", ())


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "llama"])
def test_text_before_a_call_is_content(name):
    read = FORMATS[name].read(f"well\n{WRITTEN[name]}", TOOLS)
    assert read.message["content"] == "well"
    assert len(read.message["tool_calls"]) == 1


def test_several_calls_are_read_in_order():
    several = {
        "hermes": WRITTEN["hermes"] + "\n" + WRITTEN["hermes"].replace('"add"', '"sub"'),
        "mistral": WRITTEN["mistral"][:-1] + ', {"name": "sub", "arguments": {}}]',
        "mistral-named": WRITTEN["mistral-named"] + "[TOOL_CALLS]sub[CALL_ID]abcdefghi[ARGS]{}",
        "deepseek": (
            WRITTEN["deepseek"].replace(
                "<｜tool▁calls▁end｜>",
                "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>sub\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            )
        ),
    }
    for name, text in several.items():
        read = FORMATS[name].read(text, TOOLS)
        assert [call["function"]["name"] for call in read.message["tool_calls"]] == [
            "add",
            "sub",
        ], name
        assert read.message["content"] == ""
        assert len({call["id"] for call in read.message["tool_calls"]}) == 2


BROKEN = {
    "hermes": [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}\n</tool_call>',
        "<tool_call>add(1)</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        "<tool_call>",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"b": "\\ud83d"}}</tool_call>',
        '<tool_call>{"name": "\\udce9", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "{\\"b\\": -1e999}"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 900 + "]" * 900 + "}}</tool_call>",
    ],
    "xml": [
        "<tool_call>\n<parameter=a>\n1\n</parameter>\n</tool_call>",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>",
    ],
    "llama": [
        '{"name": "add", "parameters": {"a": 1}',
        '{"name": "add", "parameters": 3}',
        '{"name": "add"} or so',
    ],
    "mistral": [
        "[TOOL_CALLS] [",
        '[TOOL_CALLS] [{"name": "add", "id": "\\ud83d"}]',
        '[TOOL_CALLS] [{"arguments": {}}]',
        "[TOOL_CALLS] 3",
    ],
    "mistral-named": [
        "[TOOL_CALLS]add{}",
        "[TOOL_CALLS]add[ARGS]{",
        '[TOOL_CALLS]add[ARGS]{"a": -1e999}',
        "[TOOL_CALLS][ARGS]{}",
    ],
    "deepseek": [
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{\n```<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>add<｜tool▁call▁end｜>",
    ],
}


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in BROKEN.items() for text in texts]
)
def test_what_is_broken_is_text_with_the_reason(name, text):
    read = FORMATS[name].read(text, TOOLS)
    assert read.message == {"role": "assistant", "content": text}
    assert len(read.broken) == 1
    assert "found" in read.broken[0]


def test_a_whole_call_beside_a_broken_one_is_a_call():
    read = FORMATS["hermes"].read(f"<tool_call>no</tool_call>\n{WRITTEN['hermes']}", TOOLS)
    assert len(read.message["tool_calls"]) == 1
    assert read.message["content"] == "<tool_call>no</tool_call>"
    assert len(read.broken) == 1


def test_text_without_a_call_is_text():
    for each in FORMATS.values():
        assert each.read('hello {"a": 1} ', TOOLS).message == {
            "role": "assistant",
            "content": 'hello {"a": 1} ',
        }


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_shown_of_a_growing_text_is_never_a_part_of_a_call(name):
    before = "" if name == "llama" else "well "
    text = before + WRITTEN[name]
    shown = [FORMATS[name].certain(text[:size]) for size in range(len(text) + 1)]
    assert shown == sorted(shown)
    assert max(shown) == len(before)
    assert FORMATS[name].certain("hello world") == len("hello world")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("qwen2_5", "hermes"),
        ("qwen3", "hermes"),
        ("qwen3_5_think", "xml"),
        ("llama3_1", "llama"),
        ("deepseekv3", "deepseek"),
        ("v3", "mistral"),
        ("v7", "mistral"),
        ("v11", "mistral-named"),
        ("v13", "mistral-named"),
        ("llama3", None),
    ],
)
def test_the_format_is_seen_in_what_the_template_writes(template, name):
    made = mistral_template(template) if template.startswith("v") else trl_template(template)
    found = format_of(ChatFormat(tokenizer_for(made, template)))
    assert (found and found.name) == name


def test_what_a_template_writes_is_read_as_it_was_called():
    form = ChatFormat(tokenizer_for(CHATML))
    (call,) = format_of(form).read(form.calls).message["tool_calls"]
    assert call["function"] == {"name": "xqf3", "arguments": '{"xqp5": "xqg7"}'}


def test_a_function_is_a_tool_by_its_hints_and_docstring():
    (tool,) = definitions_of([add])
    assert tool["function"]["name"] == "add"
    assert tool["function"]["parameters"]["properties"]["a"] == {
        "type": "integer",
        "description": "A number.",
    }
    assert tool["function"]["parameters"]["required"] == ["a"]


def test_a_function_without_hints_or_of_a_name_that_is_taken_is_no_tool():
    def bare(a):
        """Adds."""

    with pytest.raises(
        ChatError, match=r"'bare' cannot be a tool: .*; found it in .*; give every parameter"
    ):
        definition_of(bare)
    with pytest.raises(ChatError, match="two tools have one name"):
        definitions_of([add, add])


def test_a_call_that_cannot_be_made_is_told_to_the_model():
    def call(name, arguments):
        return {"id": "call00000", "function": {"name": name, "arguments": arguments}}

    assert arguments_of(call("add", '{"a": 1}'), TOOLS) == {"a": 1}
    for name, arguments, why in (
        ("sub", "{}", "no tool"),
        ("add", "{}", "needs"),
        ("add", '{"a": 1, "c": 2}', "has no"),
    ):
        with pytest.raises(ValueError, match=why):
            arguments_of(call(name, arguments), TOOLS)
    assert result_of(call("add", "{}"), "4") == {
        "role": "tool",
        "tool_call_id": "call00000",
        "name": "add",
        "content": "4",
    }
