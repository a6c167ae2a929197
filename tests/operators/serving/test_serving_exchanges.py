"""A conversation goes on with the tokens that it was made of, wherever they spell what the caller
sent.
"""

import itertools

import pyarrow as pa
import pytest
from serving_rig import END, ScriptedEngine, byte_tokenizer, service_of
from starlette.testclient import TestClient

from operators.serving.app import make_app
from operators.serving.rows import COLUMNS, conversations
from operators.serving.sessions import KnownTurn, TurnStore, text_prompt
from operators.serving.text import Vocabulary


def turn(text, tokens, session="s", end=None, number=0):
    return KnownTurn(session=session, key=text, tokens=tokens, end=end, rollout_id=number)


def encoded(tokenizer, turns, text, session="s"):
    return text_prompt(Vocabulary(tokenizer), turns, text, session=session, chat=True)


def test_tokens_are_reused_where_tokenising_would_merge_across_turns(tokenizer):
    ids = dict(tokenizer.get_vocab())
    turns = TurnStore()
    turns.add(turn("xhell", (ids["x"], ids["hell"]), number=9))
    found = encoded(tokenizer, turns, "xhello")
    assert found.tokens == (ids["x"], ids["hell"], ids["o"])
    assert (found.parent, found.reused) == (9, 2)
    assert tuple(tokenizer("xhello")["input_ids"]) == (ids["x"], ids["hello"])


def test_the_end_token_that_was_written_is_reused_with_it(tokenizer):
    ids = dict(tokenizer.get_vocab())
    turns = TurnStore()
    turns.add(turn("a", (ids["a"],), end=(END, "<|im_end|>")))
    assert encoded(tokenizer, turns, "a<|im_end|>b").tokens == (ids["a"], END, ids["b"])
    assert encoded(tokenizer, turns, "a<|im_end|>b").reused == 2
    assert encoded(tokenizer, turns, "ab").reused == 1


def test_the_longest_turn_of_the_same_session_is_gone_on_from(tokenizer):
    ids = dict(tokenizer.get_vocab())
    x, y = ids["x"], ids["y"]
    turns = TurnStore()
    turns.add(turn("x", (x,), number=1))
    turns.add(turn("xy", (x, y), number=2))
    turns.add(turn("xyx", (x, y, x), number=3, session="other"))
    assert encoded(tokenizer, turns, "xyxy").parent == 2
    assert encoded(tokenizer, turns, "xxx").parent == 1
    assert encoded(tokenizer, turns, "yx").parent is None
    assert encoded(tokenizer, turns, "xyxy", session=None).parent is None


def test_turns_that_spell_something_else_are_passed_over(tokenizer):
    turns = TurnStore()
    turns.add(turn("hell", (5, 6, 7)))
    found = encoded(tokenizer, turns, "hello")
    assert found.parent is None and found.tokens == tuple(tokenizer("hello")["input_ids"])


def test_only_the_latest_turns_are_kept(tokenizer):
    turns = TurnStore(most=2)
    for number, text in enumerate(("a", "b", "c")):
        turns.add(turn(text, (number,), number=number))
        turns.find("s", "a...")
    assert [turns.find("s", text) is not None for text in ("a", "b", "c")] == [
        True,
        False,
        True,
    ]


def test_turns_of_text_and_of_messages_share_the_room_that_there_is(monkeypatch):
    monkeypatch.setattr("operators.serving.sessions.MOST_SIZE", 12)
    turns = TurnStore()
    turns.add(turn("abc", (1, 2, 3), number=1))
    turns.add(turn(b"key", (1, 2, 3), number=2))
    assert turns.find("s", "abc...").rollout_id == 1 and turns.get("s", b"key").rollout_id == 2
    turns.find("s", "abc")
    turns.add(turn("ab", (1,), number=3))
    assert turns.get("s", b"key") is None, "it was used longest ago"
    assert turns.find("s", "abc...").rollout_id == 1 and turns.find("s", "ab").rollout_id == 3


@pytest.mark.parametrize("kind", ["bytes", "fallback"])
def test_a_conversation_is_recorded_without_tokenising_it_again(kind):
    tokenizer = byte_tokenizer(byte_fallback=kind == "fallback")
    ids = dict(tokenizer.get_vocab())
    # Pieces that the tokenizer itself would have merged: what a policy that explores writes.
    answers = [
        [ids["a"], ids["b"], ids["c"], END],
        [ids["h"], ids["e"], END],
        [ids["b"], ids["c"], END],
    ]
    engine = ScriptedEngine(lambda prompt, seed: answers[len(engine.started) - 1])
    rows = []
    service = service_of(engine, tokenizer, rows)
    messages = []
    with TestClient(make_app(service), base_url="http://localhost") as client:
        for question in ("hd", "ab", "c"):
            messages.append({"role": "user", "content": question})
            answer = client.post(
                "/v1/chat/completions", json={"model": "tiny", "messages": messages, "user": "s"}
            )
            messages.append(answer.json()["choices"][0]["message"])
    for earlier, later in itertools.pairwise(rows):
        assert later["parent_rollout_id"] == earlier["rollout_id"]
        assert later["reused_tokens"] == len(earlier["tokens"])
        assert later["tokens"][: len(earlier["tokens"])] == earlier["tokens"]
        own = tokenizer(tokenizer.decode(later["tokens"]), add_special_tokens=False)["input_ids"]
        assert kind == "fallback" or own != later["tokens"], (
            "the tokenizer would have cut it otherwise"
        )
    (whole,) = conversations(
        pa.Table.from_pylist(rows, pa.schema(list(COLUMNS.items())))
    ).to_pylist()
    wrote = [token for token, chosen in zip(whole["tokens"], whole["mask"], strict=True) if chosen]
    assert wrote == [token for answer in answers for token in answer]


def test_a_conversation_goes_on_after_a_stop_string_with_the_tokens_before_it(tokenizer):
    ids = dict(tokenizer.get_vocab())
    engine = ScriptedEngine(lambda prompt, seed: [ids["x"], ids["y"], ids["abc"], END])
    rows = []
    with TestClient(
        make_app(service_of(engine, tokenizer, rows)), base_url="http://localhost"
    ) as client:
        ask = {"model": "tiny", "prompt": "hello", "stop": "c", "max_tokens": 5}
        text = client.post("/v1/completions", json=ask).json()["choices"][0]["text"]
        client.post("/v1/completions", json={**ask, "prompt": f"hello{text} hello"})
    assert text == "xyab"
    assert (rows[1]["parent_rollout_id"], rows[1]["reused_tokens"]) == (rows[0]["rollout_id"], 3)
    assert rows[1]["tokens"][:4] == [ids["hello"], ids["x"], ids["y"], ids["ab"]]


def test_siblings_may_each_be_gone_on_from(tokenizer):
    ids = dict(tokenizer.get_vocab())
    engine = ScriptedEngine(lambda prompt, seed: [[ids["x"], END], [ids["y"], END]][seed % 2])
    rows = []
    service = service_of(engine, tokenizer, rows)
    with TestClient(make_app(service), base_url="http://localhost") as client:
        ask = {"model": "tiny", "prompt": "q", "n": 8, "seed": 3}
        choices = client.post("/v1/completions", json=ask).json()["choices"]
        assert {choice["text"] for choice in choices} == {"x", "y"}
        for text in ("x", "y"):
            client.post("/v1/completions", json={"model": "tiny", "prompt": f"q{text}?"})
    parents = [row["parent_rollout_id"] for row in rows[8:]]
    texts = {row["rollout_id"]: row["completion"] for row in rows}
    assert [texts[parent] for parent in parents] == ["x", "y"]


def test_a_session_that_is_forgotten_takes_its_turns_and_no_others_along():
    turns = TurnStore(most=4)
    for number, (session, text) in enumerate(
        (("s", "a"), ("other", "a"), ("s", "ab"), (None, "a"), ("s", "a"))
    ):
        turns.add(turn(text, (number,), session=session, number=number))
    for session in ("s", "s", "unknown"):
        turns.forget(session)
    assert turns.find("s", "abc") is None
    assert [turns.find(session, "abc").rollout_id for session in ("other", None)] == [1, 3]
    turns.add(turn("ab", (9,), session="s", number=9))
    assert turns.find("s", "abc").rollout_id == 9
