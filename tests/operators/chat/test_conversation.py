"""A conversation's ids: those that were sampled as they were, those of the world put behind
them.
"""

import re

import numpy as np
import pytest
from serving_rig import tiny_llama
from template_rig import (
    CHATML,
    MOVING,
    STRIPPING,
    TOOL,
    call,
    check_rows,
    conversed,
    rng_of,
    sampled,
    tokenizer_for,
)

from dataflow.tokens.rollout_tokens import NO_TURN, RolloutTokens
from operators.chat.chat_format import ChatError, ChatFormat
from operators.chat.conversation import Conversation
from operators.chat.tool_calls import call_opening

USER = {"role": "user", "content": "hello"}


PLAIN = (
    "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)


def form_of(template=CHATML, **knobs):
    return ChatFormat(tokenizer_for(template, **knobs))


def say(conversation, text, rng=None, **knobs):
    drawn = sampled(conversation.form, text, rng or rng_of(text), **knobs)
    conversation.say(drawn)
    return drawn


@pytest.mark.parametrize("template", [CHATML, MOVING, PLAIN])
@pytest.mark.parametrize("special", [None, []])
def test_every_sampled_token_is_trained_once_as_it_was_and_the_text_is_the_templates(
    template, special
):
    form = form_of(template, special=special)
    for number in range(20):
        rng = rng_of(template, number)
        tools = [TOOL] if form.calls or template is MOVING else []
        conversation = Conversation(form, tools=tools)
        speaks = form.end is not None
        said, prompts = conversed(
            form, conversation, rng, turns=4, tools=bool(form.calls), cut=0.3 if speaks else 1.0
        )
        check_rows(conversation, said)
        for ids, messages in prompts:
            assert form.decode(ids) == form.render(messages, tools)


def test_log_probabilities_are_those_of_a_full_forward_pass():
    torch = pytest.importorskip("torch")
    from log_distribution import log_distribution

    from operators.engine import build
    from operators.engine.decode import Engine
    from operators.engine.interface import PromptStart
    from operators.engine.sampler import Sampling

    form = form_of()
    model = tiny_llama(len(form.tokenizer), context=1024)
    decoder = tiny_llama(len(form.tokenizer), context=1024).requires_grad_(False)
    found = build.adapt(decoder, "tiny")
    sampling = Sampling(temperature=0.8)
    engine = Engine(
        decoder,
        slots=4,
        context_tokens=1024,
        sampling=sampling,
        end_tokens=sorted(form.ends),
        kernel=found.kernel,
        token_bytes=found.token_bytes,
    )
    conversation = Conversation(form, [USER], tools=[TOOL])
    for turn in range(4):
        prompt = conversation.prompt().astype(np.int64)
        ended = engine.step(
            [PromptStart(prompt=prompt, limit=len(prompt) + 12, tickets=[turn], seeds=[turn])]
        )
        while not ended:
            ended = engine.step()
        conversation.say(ended[0].tokens[ended[0].start :])
        conversation.hear({"role": "user", "content": f"hello\n{turn}>"})
    (row,) = conversation.rows
    ids = torch.tensor(row.tokens.ids.astype(np.int64))
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    table = log_distribution(logits, sampling, None)
    expected = np.r_[0, table.gather(1, ids[1:, None])[:, 0].numpy()]
    assert set(row.turns.tolist()) == {NO_TURN, 0, 1, 2, 3}
    assert np.allclose(row.tokens.logprobs, np.where(row.tokens.mask, expected, 0), atol=1e-4)


def test_what_the_template_strips_from_the_past_is_kept_begins_a_row_or_is_refused():
    thought = "<think>long</think>\nhello"
    for past, rows in (("sampled", 1), ("rendered", 2)):
        form = form_of(STRIPPING)
        conversation = Conversation(form, [USER], past=past)
        first = say(conversation, thought)
        conversation.hear(USER)
        seen = form.decode(conversation.prompt())
        assert ("long" in seen) == (past == "sampled")
        assert (seen == form.render(conversation.messages)) == (past == "rendered")
        second = say(conversation, "hello")
        check_rows(conversation, [first, second])
        assert len(conversation.rows) == rows
    conversation = Conversation(form_of(STRIPPING), [USER], past="refused")
    say(conversation, thought)
    conversation.hear(USER)
    with pytest.raises(
        ChatError, match=r"changes what was sampled once it is past; found .*; give past='sampled'"
    ):
        conversation.prompt()


def test_a_turn_that_the_template_keeps_begins_no_row():
    for past in ("sampled", "rendered", "refused"):
        conversation = Conversation(form_of(STRIPPING), [USER], past=past)
        said = []
        for turn in range(3):
            said.append(say(conversation, "hello\n\nworld", ends=turn != 1))
            conversation.hear(USER)
        check_rows(conversation, said)
        assert len(conversation.rows) == 1


def test_tools_that_move_to_the_last_message_begin_a_row_each():
    conversation = Conversation(form_of(MOVING), [USER], tools=[TOOL])
    said = []
    for _ in range(3):
        said.append(say(conversation, "hello"))
        conversation.hear(USER)
    check_rows(conversation, said)
    assert len(conversation.rows) == 3
    assert all(
        conversation.form.decode(row.tokens.ids).count("[AVAILABLE_TOOLS]") == 1
        for row in conversation.rows
    )


def test_a_past_that_was_cut_begins_a_row_in_which_turns_keep_their_ids():
    conversation = Conversation(form_of(), [USER])
    said = []
    for text in ("one", "two", "three"):
        said.append(say(conversation, text))
        conversation.hear({"role": "user", "content": f"after {text}"})
    left = [{"role": "user", "content": "in short: one"}, *conversation.messages[3:]]
    conversation.rewrite(left)
    prompt = conversation.prompt()
    assert conversation.form.decode(prompt) == conversation.form.render(left)
    for drawn in said[1:]:
        assert (
            (np.lib.stride_tricks.sliding_window_view(prompt, len(drawn)) == drawn.ids)
            .all(-1)
            .any()
        )
    said.append(say(conversation, "four"))
    check_rows(conversation, said)
    assert len(conversation.rows) == 2


def test_a_past_that_only_goes_on_is_no_rewriting():
    conversation = Conversation(form_of(), [USER])
    said = [say(conversation, "hello")]
    conversation.rewrite([*conversation.messages, USER])
    said.append(say(conversation, "world"))
    check_rows(conversation, said)
    assert len(conversation.rows) == 1


def test_the_world_may_say_more_after_a_prompt_that_nobody_answered():
    conversation, other = Conversation(form_of(), [USER]), Conversation(form_of(), [USER, USER])
    conversation.prompt()
    conversation.hear(USER)
    assert np.array_equal(conversation.prompt(), other.prompt())
    say(conversation, "hello")
    say(other, "hello")
    for one in (conversation, other):
        one.hear(USER)
    conversation.prompt()
    conversation.hear(USER)
    other.hear(USER)
    assert np.array_equal(conversation.prompt(), other.prompt())


def test_what_was_said_before_a_fork_is_trained_in_one_branch():
    conversation = Conversation(form_of(), [USER])
    first = say(conversation, "hello")
    conversation.hear(USER)
    conversation.prompt()
    other = conversation.fork()
    assert np.array_equal(other.prompt(), conversation.prompt())
    left, right = say(conversation, "left"), say(other, "right")
    check_rows(conversation, [first, left])
    (row,) = other.rows
    assert np.array_equal(row.tokens.ids[row.tokens.mask], right.ids)
    assert set(row.turns.tolist()) == {NO_TURN, 1}


@pytest.mark.parametrize(
    "ending", ["<|im_end|>\n", "<|im_end|>\n<|im_start|>", "<|im_end|>", "<|im"]
)
def test_a_stop_string_that_the_policy_wrote_is_not_written_twice(ending):
    form = form_of(special=[])
    conversation = Conversation(form, [USER])
    ids = form.encode(f"hello{ending}")
    conversation.say(RolloutTokens.drawn(ids, [0.0] * len(ids), [0] * len(ids)), text="hello")
    conversation.hear(USER)
    assert form.decode(conversation.prompt()) == form.render(conversation.messages)


def test_another_end_token_is_kept_and_the_template_ends_the_turn():
    form = form_of()
    conversation = Conversation(form, [USER])
    ids = [*form.encode("hello"), form.tokenizer.eos_token_id]
    message = conversation.say(RolloutTokens.drawn(ids, [0.0] * len(ids), [0] * len(ids))).message
    conversation.hear(USER)
    assert message["content"] == "hello"
    assert "hello<eos><|im_end|>\n<|im_start|>user\n" in form.decode(conversation.prompt())


def test_calls_are_read_and_numbered_and_stand_in_the_ids_with_their_results():
    form, rng = form_of(), rng_of("call")
    conversation = Conversation(form, [USER], tools=[TOOL])
    for turn in range(2):
        text, _ = call(form, rng, "well", 0)
        said = conversation.say(sampled(form, text, rng))
        (made,) = said.message["tool_calls"]
        assert (made["id"], made["function"]["name"], said.broken) == (f"call0000{turn}", "add", ())
        conversation.hear(
            {"role": "tool", "tool_call_id": made["id"], "name": "add", "content": "4"}
        )
        assert form.decode(conversation.prompt()) == form.render(conversation.messages, [TOOL])
    assert len(conversation.rows) == 1


def test_a_broken_call_is_what_the_policy_said():
    conversation = Conversation(form_of(), [USER], tools=[TOOL])
    said = conversation.say(
        sampled(conversation.form, "<tool_call>add(1)</tool_call>", rng_of("broken"))
    )
    assert said.message == {"role": "assistant", "content": "<tool_call>add(1)</tool_call>"}
    assert len(said.broken) == 1


REFUSED = {
    "upper": (
        CHATML.replace("{{ m.content }}", "{{ m.content | upper }}"),
        "does not stand in what it lays out",
    ),
    "last only": (CHATML.replace("in messages", "in messages[-1:]"), "stands 0 times"),
    "no end": ("{% for m in messages %}{{ m.content }}{% endfor %}", "it ends a turn with ''"),
    "other end": (
        CHATML.replace("<|im_end|>", "{{ ('!' if loop.last else '?') if m.role == 'assistant' }}"),
        "it ends a turn with '!",
    ),
    "counting": (
        CHATML.replace("<|im_end|>", "<|im_end|>{{ m.content | length }}"),
        "depends on the turn",
    ),
    "raising": (CHATML + "{{ raise_exception('never') }}", "refuses the messages: never"),
    "changing": (
        CHATML.replace("{{ m.role }}", "{{ m.role }} of {{ messages | length }}"),
        "changes",
    ),
    "none": (None, "has no chat template"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_without_delimiters_is_refused_by_name_with_the_reason(name):
    template, why = REFUSED[name]
    tokenizer = tokenizer_for(CHATML, "mine")
    tokenizer.chat_template = template
    with pytest.raises(ChatError, match=re.escape(why)) as refused:
        ChatFormat(tokenizer)
    assert "mine" in str(refused.value) and str(refused.value).count("; ") >= 2


def test_tools_without_a_place_are_refused():
    form = form_of("{% for m in messages %}<|x|>{{ m.role }} {{ m.content }}<|e|>{% endfor %}")
    with pytest.raises(ChatError, match="has no place for tools"):
        Conversation(form, tools=[TOOL])


def test_the_world_cannot_speak_for_the_policy():
    with pytest.raises(ChatError, match="cannot speak for the policy"):
        Conversation(form_of(), [USER]).hear({"role": "assistant", "content": "hello"})


THINKING = CHATML.replace(
    "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
)


NUMBERED = CHATML.replace('{"name"', '{"id": "{{ c.id }}", "name"')


SPECIAL = ["<|im_start|>", "<|im_end|>", "<tool_call>"]


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (CHATML.replace("<tool_call>", "<call>"), "it writes calls in no form that is known here"),
        (THINKING, "<think>\\n', which stands before no call"),
        (NUMBERED, "which does not name it"),
    ],
)
def test_a_template_whose_calls_begin_otherwise_each_time_forces_none_and_is_named(template, why):
    form = form_of(template, name="mine", special=SPECIAL)
    with pytest.raises(ChatError, match=re.escape(why)) as refused:
        call_opening(form, ["add"])
    assert "'mine'" in str(refused.value) and str(refused.value).count("; ") >= 2


def test_what_a_turn_was_made_to_begin_with_is_context_and_stands_in_the_past():
    form = form_of()
    conversation = Conversation(form, [USER], tools=[TOOL])
    text, _ = call(form, rng_of("forced"), "", 0)
    opening = call_opening(form, ["add"])
    begun, drawn = form.encode(opening), sampled(form, text.removeprefix(opening), rng_of("forced"))
    before = conversation.prompt()
    said = conversation.say(drawn, begun=begun)
    assert said.message["tool_calls"][0]["function"]["name"] == "add" and not said.broken
    conversation.hear({"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "4"})
    assert form.decode(conversation.prompt()) == form.render(conversation.messages, [TOOL])
    (row,) = conversation.rows
    assert row.tokens.ids.tolist() == [*before.tolist(), *begun, *drawn.ids.tolist()]
    assert row.tokens.mask.tolist() == [False] * (len(before) + len(begun)) + [True] * len(drawn)
    check_rows(conversation, [drawn])
