"""Text grows by whole characters, never shows a stop string, and ends as the tokenizer's own
decoding.
"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.examples import examples
from serving_rig import END, byte_tokenizer

from operators.serving.text import Transcript, Vocabulary, held_back

TOKENIZERS = {"bytes": byte_tokenizer(), "fallback": byte_tokenizer(byte_fallback=True)}


TEXTS = st.text(st.sampled_from("abcdefgh é€😀 \n"), max_size=30)


def grown(tokenizer, tokens, stops=()):
    """What was shown after each token, and in the end."""
    transcript = Transcript(Vocabulary(tokenizer), stops)
    shown = []
    for token in tokens:
        transcript.push(token)
        shown.append(transcript.text)
    transcript.finish()
    return shown, transcript.text


@pytest.mark.parametrize("kind", TOKENIZERS)
@examples(200)
@given(data=st.data())
def test_the_stream_of_any_tokens_is_their_decoding(kind, data):
    tokenizer = TOKENIZERS[kind]
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=60))
    shown, text = grown(tokenizer, tokens)
    assert text == tokenizer.decode(tokens, skip_special_tokens=True)
    for earlier, later in itertools.pairwise([*shown, text]):
        assert later.startswith(earlier)


@pytest.mark.parametrize("kind", TOKENIZERS)
@examples(100)
@given(text=TEXTS)
def test_half_a_character_is_never_shown(kind, text):
    tokenizer = TOKENIZERS[kind]
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    shown, end = grown(tokenizer, tokens)
    assert end == tokenizer.decode(tokens) and "\ufffd" not in "".join(shown)


@examples(200)
@given(text=TEXTS, stops=st.lists(st.text("abc é", min_size=1, max_size=4), min_size=1, max_size=3))
def test_nothing_of_a_stop_string_is_shown(text, stops):
    tokenizer = TOKENIZERS["bytes"]
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    first = None  # where generation ends: at the first token that completes a stop string
    for count in range(1, len(tokens) + 1):
        so_far = tokenizer.decode(tokens[:count])
        places = [so_far.find(stop) for stop in stops if stop in so_far]
        if places:
            first = so_far[: min(places)]
            tokens = tokens[:count]
            break
    shown, end = grown(tokenizer, tokens, stops)
    assert end == (tokenizer.decode(tokens) if first is None else first)
    assert all(end.startswith(part) for part in shown)


def test_what_could_begin_a_stop_string_is_held_back():
    assert held_back("one END", ["ENDING"]) == 3
    assert held_back("one END.", ["ENDING"]) == 0
    assert held_back("aa", ["aab", "ab"]) == 2
    assert held_back("x", []) == 0


def test_tokens_that_lie_wholly_before_a_stop_string_are_counted():
    tokenizer = TOKENIZERS["bytes"]
    tokens = tokenizer("x abc", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(tokens) == ["x", "Ġ", "abc"]
    transcript = Transcript(Vocabulary(tokenizer), ["c"])
    for token in tokens:
        transcript.push(token)
    transcript.finish()
    assert (transcript.text, transcript.whole_tokens()) == ("x ab", 2)
    assert transcript.text[: transcript.end_of(2)] == "x "


def test_no_stop_string_is_looked_for_in_what_a_text_is_made_to_begin_with():
    """Nor one that begins there, as whoever ends the rollout sees what was sampled alone."""
    tokenizer = TOKENIZERS["bytes"]
    begun, tokens = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("abc é", "hello abc")
    )
    for stops, expected in (
        (["bc"], "abc éhello a"),
        (["éh"], "abc éhello abc"),
        (["abc é"], "abc éhello abc"),
    ):
        transcript = Transcript(Vocabulary(tokenizer), stops, begun)
        assert transcript.text == "abc é"
        for token in tokens:
            transcript.push(token)
        transcript.finish()
        assert transcript.text == expected
        assert len(transcript.offsets) == len(tokens) and transcript.offsets[0] == len("abc é")


def test_special_tokens_have_no_part_in_the_text():
    tokenizer = TOKENIZERS["bytes"]
    tokens = tokenizer("ab<|im_start|>cd", add_special_tokens=False)["input_ids"]
    assert grown(tokenizer, [*tokens, END])[1] == "abcd"
