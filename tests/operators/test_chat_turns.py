"""Where a turn ends and what stands in front of one: a base model whose chat template ends turns by
its own token.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import transformers
from rigs.policy import tiny_policy
from tokenizers import AddedToken, processors

from dataflow import Graph, Model, collect
from dataflow.errors import RecordError
from operators import Generator, Prompts, episode
from operators.chat.chat_template import ChatTemplate
from operators.demonstrations import Demonstrations
from operators.episodes.chat import Chat
from operators.generation.tokenize import RowLayout

CHATML = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }}{% endfor %}-{% endif %}"
    "{% if enable_thinking is defined %}e={{ enable_thinking | lower }}-{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role[0] }}={{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a={% endif %}"
)


SPECIAL = ("<bos>", "<|im_start|>", "<|im_end|>", "<|eot|>")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose tokenizer names one end token, and has others that are special by
    `added_tokens_decoder` alone.
    """
    folder = tiny_policy(tmp_path_factory.mktemp("base"))
    return retold(folder, folder, CHATML)


def retold(
    folder: Path, other: Path, template: str, *, begins: bool = False, ends: bool = False
) -> Path:
    """The folder with the special tokens and a template. begins, ends: the tokenizer adds a token
    there by itself.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.chat_template = template
    if begins or ends:
        end = tokenizer.eos_token_id
        tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{'<bos> ' * begins}$A{f' {tokenizer.eos_token}' * ends}",
            special_tokens=[
                ("<bos>", tokenizer.convert_tokens_to_ids("<bos>")),
                (tokenizer.eos_token, end),
            ],
        )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(other)
    tokenizer.save_pretrained(other)
    return other


def drawn(
    folder: Path, prompt: Any = "ab", *, chat: bool = True, **knobs: Any
) -> list[dict[str, Any]]:
    """Rollouts of one prompt, by a random policy."""
    generator = Generator(
        Model(str(folder)), chat=chat, **{"group_size": 32, "max_tokens": 40, **knobs}
    )
    source = Prompts([{"prompt": prompt}], chat=chat, epochs=1)
    return collect(generator(Graph("g").source(source)), rows=generator.group_size).to_pylist()


def said(row: dict[str, Any]) -> list[int]:
    return np.array(row["tokens"])[np.array(row["mask"])].tolist()


def ended_at(rows: list[list[int]], token: int) -> int:
    """How many wrote the token; none goes on behind it."""
    assert all(token not in ids[:-1] for ids in rows)
    return sum(token in ids for ids in rows)


def test_a_turn_ends_where_the_chat_template_ends_it(base: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    assert tokenizer.eos_token != "<|im_end|>" and "<|im_end|>" not in tokenizer.all_special_tokens
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    rows = drawn(base)
    assert ended_at([said(row) for row in rows], end) > 8
    assert all(row["finish_reason"] == "stop" for row in rows if said(row)[-1] == end)
    laid_out = (
        tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
        + "<|im_start|>a="
    )
    assert ended_at([said(row) for row in drawn(base, laid_out, chat=False)], end) > 8, (
        "laid out already"
    )


def test_a_stop_that_is_special_by_its_added_token_alone_is_its_id(base: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    stop = tokenizer.convert_tokens_to_ids("<|eot|>")
    for chat in (False, True):
        assert (
            ended_at([said(row) for row in drawn(base, chat=chat, stop=("<|eot|>", "ab"))], stop)
            > 8
        )


def test_a_turn_of_an_episode_ends_where_the_chat_template_ends_it(base: Path) -> None:
    @episode(isolate=False, max_turns=2)
    async def talks(chat: Chat) -> None:
        await chat.say()
        chat.hear("and")
        await chat.say()

    end = transformers.AutoTokenizer.from_pretrained(base).convert_tokens_to_ids("<|im_end|>")
    generator = Generator(Model(str(base)), chat=True, group_size=16, max_tokens=12)
    rows = collect(
        talks(generator, Graph("g").source(Prompts(["ab"], chat=True, epochs=1))), rows=16
    ).to_pylist()
    turns = [
        np.array(row["tokens"])[np.array(row["turn"]) == turn].tolist()
        for row in rows
        for turn in set(row["turn"])
        if turn >= 0
    ]
    assert ended_at(turns, end) > 3


# What stands in front


BEGUN = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]


LAID_OUT = "<|im_start|>u=hi<|im_end|><|im_start|>a=so"


def front(row: dict[str, Any], folder: Path) -> str:
    """What the policy saw before its first token."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return str(tokenizer.decode(row["tokens"][: row["mask"].index(True)]))


def shown(
    folder: Path,
    rows: list[dict[str, Any]],
    *,
    chat: bool = True,
    form: str | None = None,
    **knobs: Any,
) -> Any:
    """By prompt what the policy saw before its first token, or why it failed; of a generator and of
    demonstrations.
    """
    rows = [{"answer": "ok", **row} for row in rows]
    model, said = Model(str(folder)), []
    for maker in (
        Generator(model, chat=chat, group_size=1, max_tokens=2, **knobs),
        Demonstrations(model, chat=chat, **knobs),
    ):
        source = Prompts(rows, columns=("answer",), chat=chat, form=form, epochs=1)
        table = collect(maker(Graph("g").source(source)), rows=len(rows)).sort_by("group_id")
        errors = [
            (row["error"] or "").removeprefix(f"{maker.name}: unusable: ")
            for row in table.to_pylist()
        ]
        said.append(
            [
                error or front(row, folder)
                for error, row in zip(errors, table.to_pylist(), strict=True)
            ]
        )
    assert said[0] == said[1], "what is shown is laid out as what is drawn"
    return said[0]


@pytest.mark.parametrize("form", [None, "trl"])
def test_what_the_assistant_has_begun_is_gone_on_with(base: Path, form: str | None) -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    unanswered = [BEGUN[0], {"role": "assistant", "content": None, "tool_calls": calls}]
    begun, no, refused = shown(
        base, [{"prompt": BEGUN}, {"prompt": BEGUN[:1]}, {"prompt": unanswered}], form=form
    )
    assert begun == LAID_OUT and no == LAID_OUT.removesuffix("so")
    assert "cannot end with calls of tools that have no results" in refused


def test_an_episode_goes_on_with_what_the_assistant_has_begun(base: Path) -> None:
    @episode(isolate=False, max_turns=2)
    async def talks(chat: Chat) -> None:
        await chat.say(max_tokens=4)
        chat.hear("and")
        await chat.say(max_tokens=4)

    generator = Generator(Model(str(base)), chat=True, group_size=4, temperature=0.5)
    rows = collect(
        talks(generator, Graph("g").source(Prompts([{"prompt": BEGUN}], chat=True, epochs=1))),
        rows=4,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    for row in rows.to_pylist():
        assert row["error"] is None and front(row, base) == LAID_OUT
        tokens, turns = np.array(row["tokens"]), np.array(row["turn"])
        first = tokenizer.decode(tokens[turns == 0]).removesuffix("<|im_end|>")
        between = f"{LAID_OUT}{first}<|im_end|><|im_start|>u=and<|im_end|><|im_start|>a="
        assert tokenizer.decode(tokens[: np.argmax(turns == 1)]) == between
        assert len(set(row["training_row"])) == 1 and row["mask"] == (turns >= 0).tolist()


def test_no_end_token_of_the_tokenizers_own_stands_behind_a_prompt(
    base: Path, tmp_path: Path
) -> None:
    folder = retold(base, tmp_path, CHATML, begins=True, ends=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("ab")["input_ids"]) == f"<bos>ab{tokenizer.eos_token}"
    texts = ["ab", "<bos>ab", "<bos><|im_start|>u=hi<|im_end|>"]
    assert shown(folder, [{"prompt": text} for text in texts], chat=False) == [
        "<bos>ab",
        *texts[1:],
    ]
    assert shown(folder, [{"prompt": "hi"}]) == ["<|im_start|>u=hi<|im_end|><|im_start|>a="], (
        "a template begins itself"
    )


def test_a_chat_is_laid_out_with_the_tools_and_options_of_its_row(
    base: Path, tmp_path: Path
) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        for name in "fg"
    ]
    rows = [
        {"prompt": "a", "tools": tools, "chat_template_kwargs": {"enable_thinking": False}},
        {"prompt": "b", "tools": json.dumps(tools[:1]), "chat_template_kwargs": None},
        {"prompt": "c"},
        {"prompt": "d", "tools": "no list"},
    ]
    user = "<|im_start|>u={}<|im_end|><|im_start|>a=".format
    for knobs, default in (
        ({}, ""),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "e=true-"),
    ):
        *good, bad = shown(base, rows, **knobs)
        assert good == [
            f"fg-e=false-{user('a')}",
            f"f-{default}{user('b')}",
            f"{default}{user('c')}",
        ]
        assert "column 'tools' holds no JSON list; found 'no list'" in bad
    table = pa.Table.from_pylist(
        [{"prompt": "a", "answer": "b", "tools": [{**tools[0], "strict": None}], "other": 1}]
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    source = Prompts(tmp_path / "rows.parquet", columns=("answer",), chat=True, epochs=1)
    (row,) = collect(Graph("g").source(source), rows=1).to_pylist()
    assert json.loads(row["tools"]) == tools[:1], "nulls of the table are none of the tool's"


def test_what_lays_a_chat_out_is_never_left_unread(base: Path) -> None:
    source = Prompts(["a"], rows=lambda text: {"prompt": text, "tools": [{}]}, chat=True, epochs=1)
    with pytest.raises(
        RecordError, match="has 'tools', which says how its chat is laid out.*name it in columns="
    ):
        collect(Graph("g").source(source), rows=1)
    for maker in (Generator, Demonstrations):
        declared = maker(Model(str(base)), chat_template_kwargs={"enable_thinking": False})
        (fault,) = declared.faults()
        assert "which no chat template is given; set chat=True" in fault


def test_an_episode_lays_a_row_out_with_its_own_tools_and_options(base: Path) -> None:
    @episode(isolate=False)
    async def talks(chat: Chat) -> None:
        await chat.say(max_tokens=2)

    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in "fg"]
    rows = [
        {"prompt": "a", "tools": tools[:1], "chat_template_kwargs": {"enable_thinking": False}},
        {"prompt": "b"},
    ]
    generator = Generator(Model(str(base)), chat=True, group_size=1)
    table = collect(talks(generator, Graph("g").source(Prompts(rows, chat=True, epochs=1))), rows=2)
    said = [front(row, base) for row in table.sort_by("group_id").to_pylist()]
    assert said[0].startswith("f-e=false-<|im_start|>u=a") and said[1].startswith("<|im_start|>u=b")
    template = ChatTemplate(transformers.AutoTokenizer.from_pretrained(base))
    assert (
        RowLayout(json.dumps(tools[:1])).of(template, tools)[1] == tools[:1]
        and RowLayout().of(template, tools)[1]
    )
    with pytest.raises(
        ValueError, match=r"the row has tools that its episode has not; found \['g'\]"
    ):
        RowLayout(json.dumps(tools)).of(template, tools[:1])


def test_content_may_be_null_beside_calls_of_tools(base: Path) -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    asked = {"role": "assistant", "content": None, "tool_calls": calls}
    done = {"role": "tool", "tool_call_id": "1", "content": "ok"}
    for first in (asked, {name: value for name, value in asked.items() if name != "content"}):
        (text,) = shown(base, [{"prompt": [BEGUN[0], first, done]}])
        assert text == (
            "<|im_start|>u=hi<|im_end|><|im_start|>a=<|im_end|>"
            "<|im_start|>t=ok<|im_end|><|im_start|>a="
        )
    with pytest.raises(RecordError, match="which is no list of messages"):
        shown(base, [{"prompt": [{"role": "user", "content": None}]}])


def test_a_demonstration_of_a_chat_ends_as_the_template_ends_a_turn(base: Path) -> None:
    source = Prompts([{"prompt": "hi", "answer": "ok"}], columns=("answer",), chat=True, epochs=1)
    (row,) = collect(
        Demonstrations(Model(str(base)), chat=True)(Graph("g").source(source)), rows=1
    ).to_pylist()
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    assert tokenizer.decode(said(row)) == "ok<|im_end|>"
