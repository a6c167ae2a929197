"""Tokens once, with the chat templates of real models: trained as sampled, in the text that the
template lays out.
"""

import json

import pytest
from template_rig import (
    TOOL,
    check_rows,
    conversed,
    mistral_template,
    rng_of,
    tokenizer_for,
    trl_template,
)

from operators.chat.chat_format import ChatError, ChatFormat
from operators.chat.conversation import Conversation
from operators.chat.tool_calls import call_opening, format_of

TRL = [
    "llama3",
    "llama3_1",
    "llama3_2",
    "qwen2_5",
    "qwen3",
    "qwen3_instruct_2507",
    "gemma",
    "gemma3",
    "deepseekv3",
]
MISTRAL = ["v1", "v2", "v3", "v7", "v11", "v13"]


def form_of(name):
    if name.startswith("mistral-"):
        version, _, spm = name.removeprefix("mistral-").partition("-")
        return ChatFormat(
            tokenizer_for(mistral_template(version, spm=bool(spm)), name, begins="<s>", ends="</s>")
        )
    return ChatFormat(tokenizer_for(trl_template(name), name))


def as_past(name, text):
    """DeepSeek's template opens a turn with thinking and with the beginning of calls, and leaves
    both out of the past: the thinking always, the beginning from the second turn with calls on.
    """
    if name != "deepseekv3":
        return text
    call = "<｜tool▁call▁begin｜>"
    text = text.replace("<think>\n", "").replace(f"\n{call}", call)
    return text.replace(f"<｜Assistant｜><｜tool▁calls▁begin｜>{call}", call)


@pytest.mark.parametrize(
    "name", [*TRL, *(f"mistral-{version}" for version in [*MISTRAL, "v3-spm"])]
)
@pytest.mark.parametrize(
    "count", [10, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def test_tokens_trained_are_tokens_sampled_in_the_text_that_the_template_lays_out(name, count):
    form = form_of(name)
    rows = 0
    for number in range(count):
        rng = rng_of(name, number)
        tools = [TOOL] if form.calls else ()
        conversation = Conversation(form, tools=tools)
        said, prompts = conversed(
            form, conversation, rng, turns=rng.randint(1, 6), tools=bool(tools)
        )
        check_rows(conversation, said)
        for ids, messages in prompts:
            assert as_past(name, form.decode(ids)) == as_past(name, form.render(messages, tools))
        rows += len(conversation.rows)
    assert rows >= count


CALLING = [
    "llama3_1",
    "llama3_2",
    "qwen2_5",
    "qwen3",
    "qwen3_instruct_2507",
    "mistral-v3",
    "mistral-v7",
    "mistral-v11",
]


@pytest.mark.parametrize("name", CALLING)
def test_what_a_forced_call_begins_with_is_the_beginning_of_every_call(name):
    form = form_of(name)
    known = format_of(form)
    several, one = call_opening(form, ["add", "b"]), call_opening(form, ["add"])
    assert one.startswith(several + "add") and several
    for function, arguments in (("add", {"a": "7"}), ("add", {}), ("b", {"c": [1]})):
        text = form.calling(function, arguments).removeprefix(form.opening)
        assert text.startswith(several) and text.startswith(one) == (function == "add")
        written = text[: text.index(form.closing)]
        (made,) = known.read(written).message["tool_calls"]
        assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == (
            function,
            arguments,
        )


def test_a_generation_prompt_that_opens_thinking_forces_no_call():
    with pytest.raises(
        ChatError, match=r"'deepseekv3'; found that a generation prompt ends with .*<think>"
    ):
        call_opening(form_of("deepseekv3"), ["add"])
