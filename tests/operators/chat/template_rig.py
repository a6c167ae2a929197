"""Byte-level BPE tokenizers that merge over line ends and over delimiters' borders, with chat
templates for them.
"""

import contextlib
import functools
import importlib.util
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dataflow.tokens.rollout_tokens import RolloutTokens
from operators.chat.chat_format import ChatError
from operators.chat.tool_calls import call_opening

SPECIAL = re.compile(r"<[|｜][^<>|｜\s]{2,40}[|｜]>|<(?:start|end)_of_turn>|\[/?[A-Z_]{4,20}\]")
"""What stands in templates for a special token."""
TEXTS = [
    "<|im_end|>\n<|im_start|>user\nhello\n\n world\n<|im_end|>\n",
    '> <tool_call>\n{"name": "',
    "\n</tool_call>\n",
    "</s>[INST] hello [/INST] hello</s>",
    "].\n\n[",
    ">\n\n",
    ">\n",
    "hello.\n\nhello\n",
    "}\n}\n",
    '"}}\n',
    "?>\n\nuser\n",
]
CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in"
    " messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or []"
    ' %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments |'
    " tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt"
    " %}<|im_start|>assistant\n{% endif %}"
)
STRIPPING = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content.split('</think>')[-1].lstrip() if m.role == 'assistant' and not loop.last else"
    " m.content }}",
)
"""Leaves out the thinking of turns that are past."""
MOVING = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.last"
    " %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content"
    " }}[/INST]{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}"
)
"""Puts tools before the last message of a user's alone."""
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "string", "description": "One."}},
            "required": ["a"],
        },
    },
}


@functools.cache
def trained():
    """A tokenizer whose merges go over line ends, brackets and blanks, as JSON."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core.train_from_iterator(
        TEXTS * 4,
        trainers.BpeTrainer(
            vocab_size=700, initial_alphabet=alphabet, show_progress=False, min_frequency=1
        ),
    )
    return core.to_str()


def tokenizer_for(template, name="tiny", *, begins="<bos>", ends="<eos>", special=None):
    """A tokenizer with this template, and the special tokens that stand in it (or those given)."""
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(trained()),
        bos_token=begins,
        eos_token=ends,
        chat_template=template,
        additional_special_tokens=(
            sorted(set(SPECIAL.findall(template))) if special is None else special
        ),
        clean_up_tokenization_spaces=False,
    )
    made.name_or_path = name
    return made


def trl_template(name):
    """A template of TRL's package, read where it is installed; the test is skipped where it is
    not.
    """
    found = importlib.util.find_spec("trl")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the extra `bench` (trl) is not installed")
    return (
        Path(found.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja"
    ).read_text("utf-8")


def mistral_template(version, *, spm=False):
    """A template of Mistral's, made by their package; the test is skipped where it is not
    installed.
    """
    made = pytest.importorskip("mistral_common.integrations.chat_templates.chat_templates")
    base = pytest.importorskip("mistral_common.tokens.tokenizers.base")
    return made.generate_chat_template(
        spm=spm,
        tokenizer_version=base.TokenizerVersion(version),
        image_support=False,
        audio_support=False,
        thinking_support=False,
        default_system_prompt=None,
        plain_thinking_support=False,
        use_special_token_variables=True,
        model_settings_fields=None,
        reasoning_effort_values=None,
        reasoning_effort_default=None,
    )


def sampled(form, text, rng, *, ends=True, version=0):
    """Tokens of a text as a policy might draw them: cut anywhere, so not as the tokenizer would cut
    it.
    """
    ids = []
    while text:
        size = rng.randint(1, 6)
        ids += form.encode(text[:size])
        text = text[size:]
    if ends:
        ids.append(form.end)
    return RolloutTokens.drawn(ids, [-rng.random() for _ in ids], [version] * len(ids))


PARTS = [
    "hello",
    "\n",
    "\n\n",
    " ",
    "}",
    '"',
    ">",
    "<",
    "é",
    "漢",
    ".",
    "{",
    "user",
    "]",
    "[",
    "</s",
    "tool_call>",
    "|",
    "\\n",
]


def words(rng, most=8):
    """A text that begins and ends with no blank."""
    middle = "".join(rng.choice(PARTS) for _ in range(rng.randint(0, most)))
    return f"h{middle}o"


def call(form, rng, content, place):
    """A call of TOOL as the template writes it, and as a message."""
    arguments = {"a": words(rng)}
    spelled = json.dumps(arguments, ensure_ascii=False)
    number = f"call{place:05d}"
    text = (
        form.calls.replace('{"xqp5": "xqg7"}', spelled)
        .replace("xqf3", "add")
        .replace("xqcall007", number)
    )
    made = {"id": number, "type": "function", "function": {"name": "add", "arguments": arguments}}
    return content + text, {"role": "assistant", "content": content, "tool_calls": [made]}


@functools.cache
def opening_of(form):
    """What a call of TOOL is made to begin with, where it has to be one; nothing where the template
    has no such.
    """
    with contextlib.suppress(ChatError):
        return call_opening(form, ["add"])
    return ""


def conversed(form, conversation, rng, *, turns, tools, cut=0.2):
    """Speak at random; what was sampled, turn by turn, and (prompt ids, messages) before each
    turn.
    """
    said, prompts = [], []
    conversation.hear({"role": "user", "content": words(rng)})
    for turn in range(turns):
        prompts.append((conversation.prompt(), list(conversation.messages)))
        ends = rng.random() >= cut
        begun = ""
        if tools and rng.random() < 0.5:
            text, message = call(form, rng, "", turn)
            begun = rng.choice(["", opening_of(form)])
            assert text.startswith(begun)
        else:
            text = words(rng)
            message = {"role": "assistant", "content": text}
        drawn = sampled(form, text.removeprefix(begun), rng, ends=ends, version=turn)
        conversation.say(drawn, begun=form.encode(begun), message=message)
        said.append(drawn)
        if message.get("tool_calls"):
            number = message["tool_calls"][0]["id"]
            conversation.hear(
                {"role": "tool", "tool_call_id": number, "name": "add", "content": words(rng)}
            )
        else:
            conversation.hear({"role": "user", "content": words(rng)})
    prompts.append((conversation.prompt(), list(conversation.messages)))
    return said, prompts


def check_rows(conversation, said):
    """Every token that was sampled is trained once, as it was sampled, and no other."""
    rows = conversation.rows
    by_turn = {}
    for row in rows:
        tokens = row.tokens
        assert len(tokens) == len(row.turns)
        assert np.array_equal(tokens.mask, row.turns >= 0)
        for turn in sorted(set(row.turns[tokens.mask].tolist())):
            assert turn not in by_turn
            by_turn[turn] = tokens.take(np.flatnonzero(row.turns == turn))
        assert not tokens.logprobs[~tokens.mask].any()
        assert (tokens.versions[~tokens.mask] == -1).all()
    assert sorted(by_turn) == list(range(len(said)))
    for turn, drawn in enumerate(said):
        for name in ("ids", "logprobs", "versions"):
            assert np.array_equal(getattr(by_turn[turn], name), getattr(drawn, name)), (turn, name)


def rng_of(*seed):
    return random.Random(repr(seed))
