"""Stop strings are found where they span tokens, and asking costs nothing for tokens that cannot end one."""

import numpy as np
from replaying import drive

from operators.engine.decode import STOPPED, TOO_LONG, Engine, Start
from operators.engine.sampler import Sampling
from operators.engine.stops import StopStrings, end_tokens, split


def ids(tokenizer, text):
    return np.array(tokenizer(text)["input_ids"])


def test_only_tokens_with_the_last_character_of_a_stop_are_looked_at(tokenizer):
    may = StopStrings(tokenizer, ("xyz", "q.")).may_stop(40)
    assert sorted(np.nonzero(may.numpy())[0]) == sorted([*ids(tokenizer, "z"), *ids(tokenizer, ".")])


def test_the_text_before_the_first_stop_is_kept(tokenizer):
    stops = StopStrings(tokenizer, ("end", "halt"))
    assert stops.find(ids(tokenizer, "abcend")) == "abc"
    assert stops.find(ids(tokenizer, "abhaltxend")) == "ab"
    assert stops.find(ids(tokenizer, "abcen")) is None
    assert stops.find(ids(tokenizer, "a" * 40 + "end")) == "a" * 40


def test_rows_end_at_a_stop_string_that_spans_tokens(make_model, tokenizer, adapt):
    model = make_model()
    kernel = adapt(model)
    stops = StopStrings(tokenizer, ("ab", "cd", "q\n", "xx"))
    engine = Engine(
        model,
        slots=32,
        context_tokens=64,
        sampling=Sampling(temperature=3.0),
        end_tokens=[],
        may_stop=stops.may_stop(32),
        find_stop=stops.find,
        kernel=kernel,
    )
    prompt = ids(tokenizer, "ab=a")
    rows = drive(
        engine,
        [Start(prompt=prompt, limit=44, tickets=range(i, i + 8), seeds=range(i, i + 8)) for i in range(0, 400, 8)],
    )
    stopped = [row for row in rows.values() if row["reason"] == STOPPED]
    assert 10 < len(stopped) < 400
    for row in rows.values():
        text = tokenizer.decode(row["tokens"][row["start"] :], skip_special_tokens=True)
        hits = [at for at in (text.find(stop) for stop in ("ab", "cd", "q\n", "xx")) if at >= 0]
        if row["reason"] == STOPPED:
            assert row["text"] == text[: min(hits)] and min(hits) == len(text) - 2
        else:
            assert row["reason"] == TOO_LONG and row["text"] is None and not hits


def test_every_end_token_that_is_declared_counts(make_model, tokenizer):
    model = make_model()
    model.generation_config.eos_token_id = [7, 9]
    assert end_tokens(model, tokenizer) == [1, 7, 9]


def test_a_stop_that_is_a_special_token_is_an_end_token(tokenizer):
    assert split(tokenizer, ("END", "<pad>")) == ([0], ("END",))
