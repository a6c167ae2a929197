"""What a chat template is given: messages as it takes them, turns that have begun, stops and
beginnings of texts.
"""

import json

import pytest
import transformers
from template_rig import (
    CHATML,
    STRIPPING,
    TOOL,
    check_rows,
    rng_of,
    sampled,
    tokenizer_for,
    trl_template,
)
from tokenizers import AddedToken, normalizers

from operators.chat.chat_format import ChatError, ChatFormat
from operators.chat.chat_template import ChatTemplate, mixed_stop, special_tokens
from operators.chat.conversation import Conversation
from operators.generation.tokenize import RowLayout, encode

ASKED = [{"role": "user", "content": "hello"}]


SYSTEM, DEVELOPER = {"role": "system", "content": "one"}, {"role": "developer", "content": "two"}


REASONING = CHATML.replace(
    "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
)


"""Opens thinking in its generation prompt, as DeepSeek R1's, and writes past turns without it."""


ALWAYS = REASONING.replace(
    "{{ m.role }}\n",
    "{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}",
    1,
)


"""Writes past turns with thinking, empty where there is none, as Qwen's models that always
think."""


SPACED = CHATML.replace(
    "{{ m.content }}", "{{ ' ' if m.role == 'assistant' }}{{ m.content | trim }}"
)


"""With a blank before what the assistant says, as Llama 2's."""


HEAD = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


EMPTY = "<think>\n\n</think>\n\n"


STRICT = CHATML.replace(
    "<|im_start|>{{ m.role }}\n",
    "{% if m.role == 'developer' or (m.role == 'system' and not loop.first) %}{{"
    " raise_exception('no ' + m.role) }}{% endif %}<|im_start|>{{ m.role }}\n",
)


"""Takes one system message, at the beginning, and no developer's, as Qwen 3.5's."""


@pytest.mark.parametrize(
    ("template", "content", "head"),
    [
        (CHATML, "<think>\nOkay", HEAD),
        (CHATML, "It is", HEAD),
        (STRIPPING, "<think>", HEAD),
        (REASONING, "<think>\nOkay", HEAD),
        (REASONING, "<think>", HEAD),
        (REASONING, "It is", HEAD),
        (ALWAYS, "<think>\nOkay", HEAD),
        (ALWAYS, "It is", HEAD + EMPTY),
        (SPACED, "It is", f"{HEAD} "),
    ],
)
def test_a_turn_that_has_begun_is_neither_closed_nor_thought_about_twice(template, content, head):
    form = ChatFormat(tokenizer_for(template))
    begun = [*ASKED, {"role": "assistant", "content": content}]
    assert form.begun(begun) == (head, content)
    conversation = Conversation(form, begun)
    ids = conversation.prompt().tolist()
    assert form.decode(ids) == head + content
    drawn = sampled(form, " so it is", rng_of(template, content))
    assert conversation.say(drawn).message["content"] == f"{content} so it is"
    conversation.hear(*ASKED)
    after = conversation.prompt().tolist()
    assert after[: len(ids) + len(drawn)] == [*ids, *drawn.ids.tolist()]
    check_rows(conversation, [drawn])
    assert len(conversation.rows) == 1 and len(conversation.rows[0].tokens) == len(ids) + len(drawn)


@pytest.mark.parametrize("name", ["llama3", "llama3_1", "qwen2_5", "qwen3", "gemma", "deepseekv3"])
@pytest.mark.parametrize("content", ["<think>\nOkay", "It is"])
def test_templates_of_real_models_go_on_with_a_turn_that_has_begun(name, content):
    form = ChatFormat(tokenizer_for(trl_template(name), name))
    text, begun = form.begun([*ASKED, {"role": "assistant", "content": content}])
    assert begun == content and text.count("<think>") + begun.count("<think>") == content.count(
        "<think>"
    )
    opened = form.render(ASKED)
    assert opened.startswith(text) or text.startswith(opened)


def test_a_turn_that_has_begun_has_no_blank_in_front_that_tokenizers_put_before_a_text():
    """As Llama 2's, Mistral's and Zephyr's."""
    tokenizer = tokenizer_for(CHATML)
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend(" ")
    form, begun = ChatFormat(tokenizer), [*ASKED, {"role": "assistant", "content": "It is"}]
    ids = encode(
        tokenizer,
        [json.dumps(begun)],
        [RowLayout()],
        node="generator",
        template=form,
        context_tokens=1000,
    )[0]
    for prompt in (ids, Conversation(form, begun).prompt()):
        assert form.decode(prompt).endswith("assistant\nIt is")


def test_a_beginning_that_the_world_speaks_behind_was_a_turn():
    form = ChatFormat(tokenizer_for(CHATML))
    conversation = Conversation(form, [*ASKED, {"role": "assistant", "content": "It is"}])
    conversation.hear({"role": "user", "content": "what?"})
    text = form.decode(conversation.prompt())
    assert (
        text == f"{HEAD}It is<|im_end|>\n<|im_start|>user\nwhat?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_turn_of_the_policys_own_is_not_gone_on_with_when_it_speaks_again():
    form = ChatFormat(tokenizer_for(CHATML))
    conversation = Conversation(form, ASKED)
    conversation.say(sampled(form, "It is", rng_of("own")))
    conversation.rewrite([{"role": "system", "content": "s"}, *conversation.messages])
    assert form.decode(conversation.prompt()).endswith("It is<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("ended", ["hello </s>", "hello</s>"])
def test_an_end_behind_a_blank_of_the_templates_is_written_once(ended):
    """As Llama 2's template has it: ' text </s>'."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}"
        " {{ m.content | trim }} </s>{% endif %}{% endfor %}"
    )
    form = ChatFormat(tokenizer_for(template, ends="</s>", special=[]))
    assert (form.end, form.ending) == (form.tokenizer.eos_token_id, " </s>")
    conversation = Conversation(form, ASKED)
    conversation.say(sampled(form, ended.removesuffix("</s>"), rng_of(ended)))
    conversation.hear(*ASKED)
    assert form.decode(conversation.prompt()) == f"[INST] hello [/INST]{ended}[INST] hello [/INST]"


@pytest.mark.parametrize(
    ("closing", "stops"),
    [
        ("[END]", ("[END]",)),
        ("</s>\n", ("</s>",)),
        ("<|end|>\n<|", ("<|end|>",)),
        ("### End\n", ("### End",)),
        (".", ()),
        ("\n\n", ()),
        ("  ", ()),
    ],
)
def test_a_mark_that_ends_turns_is_a_stop_where_no_token_but_blanks_ends_them(closing, stops):
    template = CHATML.replace("<|im_end|>\n", f"{{{{ {closing!r} }}}}").replace(
        "<|im_start|>", "- "
    )
    tokenizer = tokenizer_for(template, special=[])
    tokenizer.add_tokens([AddedToken(blanks, special=False) for blanks in ("\n", "\n\n", "  ")])
    form = ChatFormat(tokenizer)
    assert (form.end, form.stops) == (None, stops)


def test_parts_of_text_are_the_text_and_others_are_refused():
    template, parts = (
        ChatTemplate(tokenizer_for(CHATML)),
        [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}],
    )
    begun = [{"role": "user", "content": parts}, {"role": "assistant", "content": parts}]
    assert template.begun(begun) == (HEAD, "hello")
    with pytest.raises(ChatError, match="may be text alone; found a part {'type': 'image'}"):
        template.begun([{"role": "user", "content": [*parts, {"type": "image"}]}])


def test_special_tokens_are_those_that_a_decoded_text_leaves_out():
    tokenizer = tokenizer_for(CHATML, special=[])
    tokenizer.add_tokens(
        [AddedToken("<|im_end|>", special=True), AddedToken("<call>", special=False)]
    )
    special = special_tokens(tokenizer)
    assert {"<bos>", "<eos>", "<|im_end|>"} <= set(special) and "<call>" not in special
    assert ChatFormat(tokenizer).end == special["<|im_end|>"]
    for text, is_mixed in (
        ("<|im_end|>", False),
        ("<call>", False),
        ("\n<|im_end|>", True),
        ("<eos>user", True),
    ):
        assert (mixed_stop(text, special) is not None) == is_mixed


def test_a_developers_messages_are_the_systems_where_the_template_knows_no_developer():
    strict = ChatTemplate(
        tokenizer_for(CHATML.replace("{% for m", "{% set d = 'developer' %}{% for m", 1))
    )
    assert "<|im_start|>developer\ntwo" in strict.render([DEVELOPER, *ASKED])
    assert "<|im_start|>system\ntwo" in ChatTemplate(tokenizer_for(CHATML)).render(
        [DEVELOPER, *ASKED]
    )


def test_messages_of_the_systems_stand_where_the_template_takes_them():
    kept, strict = (
        ChatTemplate(tokenizer_for(CHATML)),
        ChatTemplate(tokenizer_for(STRICT.replace("developer", "dev"))),
    )
    several, late = [SYSTEM, DEVELOPER, *ASKED], [SYSTEM, *ASKED, DEVELOPER, *ASKED]
    assert kept.render(several).startswith(
        "<|im_start|>system\none<|im_end|>\n<|im_start|>system\ntwo<|im_end|>\n"
    )
    assert strict.render(several).startswith(
        "<|im_start|>system\none\n\ntwo<|im_end|>\n<|im_start|>user\nhello"
    )
    assert "user\nhello<|im_end|>\n<|im_start|>system\ntwo<|im_end|>" in kept.render(late)
    assert "user\nhello<|im_end|>\n<|im_start|>user\ntwo<|im_end|>" in strict.render(late)


def test_tools_that_a_template_would_leave_out_are_refused():
    template = ChatTemplate(
        tokenizer_for(
            CHATML.replace("{% if tools %}", "{% if false %}").replace("m.tool_calls", "[]")
        )
    )
    with pytest.raises(ChatError, match="has no place for tools; found 1"):
        template.begun(ASKED, [TOOL])
    with pytest.raises(ChatError, match="has no chat template"):
        ChatTemplate(
            transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer_for(CHATML)._tokenizer)
        )
