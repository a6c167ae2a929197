"""A conversation goes on with the tokens that it was made of, wherever they spell what the caller
sent.
"""

from serving_rig import END, ScriptedEngine, service_of
from starlette.testclient import TestClient

from operators.serving.app import make_app
from operators.serving.sessions import Exchanges, ServedExchange, encode
from operators.serving.text import Vocabulary


def exchange(text, tokens, session="s", end=None, number=0):
    return ServedExchange(session=session, text=text, tokens=tokens, end=end, rollout_id=number)


def encoded(tokenizer, exchanges, text, session="s"):
    return encode(Vocabulary(tokenizer), exchanges, text, session=session, chat=True)


def test_tokens_are_reused_where_tokenising_would_merge_across_turns(tokenizer):
    ids = dict(tokenizer.get_vocab())
    exchanges = Exchanges()
    exchanges.add(exchange("xhell", (ids["x"], ids["hell"]), number=9))
    found = encoded(tokenizer, exchanges, "xhello")
    assert found.tokens == (ids["x"], ids["hell"], ids["o"])
    assert (found.parent, found.reused) == (9, 2)
    assert tuple(tokenizer("xhello")["input_ids"]) == (ids["x"], ids["hello"])


def test_the_end_token_that_was_written_is_reused_with_it(tokenizer):
    ids = dict(tokenizer.get_vocab())
    exchanges = Exchanges()
    exchanges.add(exchange("a", (ids["a"],), end=(END, "<|im_end|>")))
    assert encoded(tokenizer, exchanges, "a<|im_end|>b").tokens == (ids["a"], END, ids["b"])
    assert encoded(tokenizer, exchanges, "a<|im_end|>b").reused == 2
    assert encoded(tokenizer, exchanges, "ab").reused == 1


def test_exchanges_that_spell_something_else_are_passed_over(tokenizer):
    exchanges = Exchanges()
    exchanges.add(exchange("hell", (5, 6, 7)))
    found = encoded(tokenizer, exchanges, "hello")
    assert found.parent is None and found.tokens == tuple(tokenizer("hello")["input_ids"])


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
