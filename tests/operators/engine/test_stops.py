"""Stop strings are found where they span tokens, and asking costs nothing for tokens that cannot
end one.
"""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import transformers
from replaying import drive
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from operators.engine import decode
from operators.engine.interface import STOPPED, TOO_LONG, PromptStart
from operators.engine.sampler import Sampling
from operators.engine.stop_strings import StopCache, StopStrings, end_tokens, split, stops_of
from operators.models.folders import ModelError


def ids(tokenizer, text):
    return np.array(tokenizer(text)["input_ids"])


def test_only_tokens_with_the_last_character_of_a_stop_are_looked_at(tokenizer):
    may = StopStrings(tokenizer, ("xyz", "q.")).may_stop(40)
    assert sorted(np.nonzero(may.numpy())[0]) == sorted(
        [*ids(tokenizer, "z"), *ids(tokenizer, ".")]
    )


def test_the_text_before_the_first_stop_is_kept(tokenizer):
    stops = StopStrings(tokenizer, ("end", "halt"))
    assert stops.find(ids(tokenizer, "abcend")) == "abc"
    assert stops.find(ids(tokenizer, "abhaltxend")) == "ab"
    assert stops.find(ids(tokenizer, "abcen")) is None
    assert stops.find(ids(tokenizer, "a" * 40 + "end")) == "a" * 40


def test_rows_end_at_a_stop_string_that_spans_tokens(make_model, tokenizer, make_engine):
    stops = StopStrings(tokenizer, ("ab", "cd", "q\n", "xx"))
    engine = make_engine(
        make_model(), slots=32, sampling=Sampling(temperature=3.0), end_tokens=[], stop=stops
    )
    prompt = ids(tokenizer, "ab=a")
    rows = drive(
        engine,
        [
            PromptStart(prompt=prompt, limit=44, tickets=range(i, i + 8), seeds=range(i, i + 8))
            for i in range(0, 160, 8)
        ],
    )
    stopped = [row for row in rows.values() if row["reason"] == STOPPED]
    assert 10 < len(stopped) < 160
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


@pytest.mark.parametrize(
    "make",
    [
        lambda t, stop: split(t, (stop,), 32),
        StopStrings,
        lambda t, stop: StopCache(t, frozenset())((stop,)),
    ],
)
@pytest.mark.parametrize("stop", ["\n<eos>", "<eos>a", "a<pad>b"])
def test_a_stop_that_mixes_text_and_special_tokens_is_refused(make, stop, tokenizer):
    with pytest.raises(
        ModelError, match="has no special tokens; found '<.*>' in it; give '<.*>' alone"
    ):
        make(tokenizer, (stop,) if make is StopStrings else stop)


def test_special_tokens_end_a_rollout_by_their_ids_wherever_the_tokenizer_names_them(tokenizer):
    """As Llama 3's on the hub, which are special in `added_tokens_decoder` alone."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens([AddedToken("<|eot|>", special=True), AddedToken("<call>", special=False)])
    assert "<|eot|>" not in tokenizer.all_special_tokens
    assert split(tokenizer, ("end", "<|eot|>"), 40) == ([32], ("end",))
    stops = StopStrings(tokenizer, ("<|eot|>", "cd", 7))
    again = StopStrings(tokenizer, stops.strings)  # as another rank makes it
    for each in (stops, again, StopCache(tokenizer, frozenset([7]))(("<|eot|>", "cd"))):
        assert each.may_stop(40)[32] and not each.may_stop(40)[33]
        assert each.find(np.array([5, 6, 32])) == tokenizer.decode([5, 6])
        assert each.find(ids(tokenizer, "abcd")) == "ab" and each.find(ids(tokenizer, "ab")) is None
    assert stops.find(np.array([5, 6, 7])) == tokenizer.decode([5, 6]) and stops.may_stop(40)[7]
    assert StopCache(tokenizer, frozenset([32]))(("<|eot|>",)) is None
    assert StopStrings(tokenizer, ("<call>",)).find(np.array([5, 33])) == tokenizer.decode([5])


def test_what_ends_a_turn_in_the_chat_template_ends_a_completion(tokenizer):
    tokenizer, model = (
        copy.deepcopy(tokenizer),
        SimpleNamespace(config=SimpleNamespace(eos_token_id=1)),
    )
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=True)])
    template = (
        "{% for m in messages %}{{ m.role }}={{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}a={% endif %}"
    )
    assert stops_of(tokenizer, model, ("end", 7), 40, chat=True) == ({1, 7}, ("end",)), (
        "without a template"
    )
    tokenizer.chat_template = template
    for chat in (False, True):
        assert stops_of(tokenizer, model, ("end",), 40, chat=chat) == ({1, 32}, ("end",))
        assert stops_of(tokenizer, model, ("end",), 32, chat=chat)[0] == {1}, (
            "a token that the model does not know"
        )
    tokenizer.chat_template = template.replace("<|im_end|>", "</s>")
    assert [stops_of(tokenizer, model, ("end",), 40, chat=chat)[1] for chat in (False, True)] == [
        ("end",),
        ("end", "</s>"),
    ]


@pytest.mark.parametrize("stop", ["END", "<|im_end|>", 32, -1])
def test_a_stop_that_can_never_occur_is_refused(stop, tokenizer):
    with pytest.raises(ModelError, match="can never occur: .*; take it out of stop"):
        split(tokenizer, ("end", stop), 32)


def test_a_stop_of_many_bytes_to_a_character_is_found_at_the_end_of_a_long_completion():
    """With a tokenizer of single bytes, ten such characters are forty tokens."""
    core = Tokenizer(
        models.BPE(
            {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []
        )
    )
    core.pre_tokenizer, core.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    byte_wise = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, clean_up_tokenization_spaces=False
    )
    stop = "\U0001f600" * 10
    assert StopStrings(byte_wise, (stop,)).find(ids(byte_wise, "a" * 60 + stop)) == "a" * 60


def test_stops_that_no_row_has_any_more_are_let_go(make_model, tokenizer, make_engine, monkeypatch):
    monkeypatch.setattr(decode, "MOST_STOPS", 3)
    engine = make_engine(make_model(), slots=4, end_tokens=[])
    for i in range(12):
        stops = StopStrings(tokenizer, ("abcdefghijkl"[i],))
        found = drive(
            engine,
            [PromptStart(prompt=np.array([5]), limit=30, tickets=[i], seeds=[i], stop=stops)],
        )
        text = tokenizer.decode(found[i]["tokens"][1:], skip_special_tokens=True)
        assert "abcdefghijkl"[i] not in text[:-1]
        assert len(engine._watched) <= 4
