"""The chunks of a stream, wherever they are cut, add up to the answer that a call without a stream
gets.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.examples import examples
from serving_rig import END, byte_tokenizer

from dataflow.tokens.rollout_tokens import RolloutTokens
from operators.engine.interface import STOPPED, TOO_LONG
from operators.serving.apis import chunks, news, whole
from operators.serving.calls import CallPrompt, Choice, ServedCall
from operators.serving.requests import parse
from operators.serving.sessions import Prompt
from operators.serving.text import Transcript, Vocabulary
from operators.serving.work import News

VOCABULARY = Vocabulary(byte_tokenizer())
ENDS = frozenset([END])


def call_of(kind, n, stops):
    prompt = (
        {"prompt": "x"}
        if kind == "completion"
        else {"messages": [{"role": "user", "content": "x"}]}
    )
    logprobs = 0 if kind == "completion" else True
    body = {
        "model": "m",
        "n": n,
        "logprobs": logprobs,
        "return_token_ids": True,
        "stop": stops,
        **prompt,
    }
    request = parse(kind, body)
    choices = [Choice(i, Transcript(VOCABULARY, request.stop)) for i in range(n)]
    part = CallPrompt(group_id=0, prompt=Prompt((5,), "x", "x"), seeds=[0] * n, choices=choices)
    call = ServedCall(
        request=request,
        session=None,
        request_id="r",
        created_ms=0,
        parts=[part],
        ends=ENDS,
        finished=lambda call, part: None,
    )
    return call, part


def heard(position, tokens, reason=None):
    count = len(tokens)
    logprobs = -np.arange(count, dtype=np.float32) / 4
    return News(position, RolloutTokens.drawn(tokens, logprobs, np.zeros(count)), reason)


def added_up(kind, chunks, n):
    """What the chunks of each choice say together."""
    made = [
        {"text": "", "tokens": [], "logprobs": [], "offsets": [], "reasons": []} for _ in range(n)
    ]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        mine = made[choice["index"]]
        mine["text"] += (
            choice["text"] if kind == "completion" else choice["delta"].get("content", "")
        )
        mine["tokens"] += choice.get("token_ids", [])
        mine["reasons"] += [choice["finish_reason"]] if choice["finish_reason"] else []
        if choice["logprobs"] and kind == "completion":
            mine["logprobs"] += choice["logprobs"]["token_logprobs"]
            mine["offsets"] += choice["logprobs"]["text_offset"]
        elif choice["logprobs"]:
            mine["logprobs"] += [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return made


@pytest.mark.parametrize("kind", ["completion", "chat"])
@examples(150)
@given(data=st.data())
def test_chunks_add_up_to_the_whole_answer(kind, data):
    n = data.draw(st.integers(1, 3))
    stops = data.draw(st.lists(st.text("ab é", min_size=1, max_size=3), max_size=2))
    call, part = call_of(kind, n, stops)
    stream = chunks(call, VOCABULARY)
    sent = list(news(stream)) if data.draw(st.booleans()) else []
    for position in data.draw(st.permutations(range(n))):
        tokens = data.draw(
            st.lists(
                st.sampled_from([END + 1, *range(60, 80), 130, 200, 258, 259, 260]), max_size=12
            )
        )
        for count in sorted(data.draw(st.sets(st.integers(0, len(tokens))))):
            call.hear(part, heard(position, tokens[:count]))
            if data.draw(st.booleans()):
                sent += news(stream)
        ended = data.draw(st.booleans())
        call.hear(
            part,
            heard(position, [*tokens, END] if ended else tokens, STOPPED if ended else TOO_LONG),
        )
    assert call.is_over
    sent += news(stream)
    assert list(stream) == []
    for mine, choice in zip(
        added_up(kind, sent, n), whole(call, VOCABULARY)["choices"], strict=True
    ):
        assert mine["text"] == (
            choice["text"] if kind == "completion" else choice["message"]["content"]
        )
        assert mine["tokens"] == choice["token_ids"]
        assert mine["reasons"] == [choice["finish_reason"]]
        if kind == "completion":
            assert mine["logprobs"] == choice["logprobs"]["token_logprobs"]
            assert mine["offsets"] == choice["logprobs"]["text_offset"]
        else:
            assert mine["logprobs"] == [entry["logprob"] for entry in choice["logprobs"]["content"]]
