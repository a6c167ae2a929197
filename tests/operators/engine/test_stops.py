"""Stop strings are found where they span tokens, and asking costs nothing for tokens that cannot end one."""

import numpy as np
import pytest
from replaying import drive

from operators.engine.results import STOPPED, TOO_LONG, Start
from operators.engine.sampler import Sampling
from operators.engine.stops import StopStrings, end_tokens, split
from operators.models import ModelError


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


def test_rows_end_at_a_stop_string_that_spans_tokens(make_model, tokenizer, make_engine):
    stops = StopStrings(tokenizer, ("ab", "cd", "q\n", "xx"))
    engine = make_engine(make_model(), slots=32, sampling=Sampling(temperature=3.0), end_tokens=[], stop=stops)
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
    assert split(tokenizer, ("end", "<pad>", 7), 32) == ([0, 7], ("end",))


@pytest.mark.parametrize("stop", ["END", "<|im_end|>", 32, -1])
def test_a_stop_that_can_never_occur_is_refused(stop, tokenizer):
    with pytest.raises(ModelError, match="can never occur: .*; take it out of stop"):
        split(tokenizer, ("end", stop), 32)
