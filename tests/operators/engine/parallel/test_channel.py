"""Words between two ranks arrive whole, and the end of a rank is heard."""

from __future__ import annotations

import dataclasses
import socket

import numpy as np
import pytest

from dataflow.folder.partial_rollouts import PartialRollout
from dataflow.model import Model
from dataflow.rollout_tokens import RolloutTokens, SamplingMask
from operators.engine.parallel.words import declaration_of, plain_declaration, plain_start, start_of
from operators.engine.results import Start
from operators.engine.sampler import Sampling
from operators.engine.stop_strings import StopStrings
from operators.generator import Generator
from operators.ranks.channel import Channel


@pytest.fixture
def ends():
    one, other = (Channel(end, 0.05) for end in socket.socketpair())
    yield one, other
    one.close()
    other.close()


def test_words_arrive_whole_and_in_order(ends):
    words = [{"do": "step", "starts": [b"x" * 5000]}, {"do": "close"}]
    for word in words:
        ends[0].send(word)
    assert [ends[1].receive(5.0) for _ in words] == words
    assert not ends[1].readable(0.0)


def test_the_end_of_a_rank_is_heard_also_in_the_middle_of_a_word(ends):
    ends[0]._end.sendall(b"\x09\0\0\0\0\0\0\0half")
    ends[0].close()
    with pytest.raises(EOFError):
        ends[1].receive(5.0)


def test_a_wait_for_a_word_and_for_a_rank_that_does_not_read_have_deadlines(ends):
    with pytest.raises(TimeoutError):
        ends[1].receive(0.01)
    with pytest.raises(TimeoutError):
        ends[0].send({"prompt": bytes(1 << 24)})


def test_a_start_and_a_declaration_come_through_as_they_were(tokenizer, ends):
    stop = StopStrings(tokenizer, ("ab", "c"))
    start = Start(
        prompt=np.array([3, 4, 5]), limit=9, tickets=range(2), seeds=[-7, 1 << 62],
        sampling=Sampling(temperature=0.5, top_p=0.9), stop=stop,
        partial=[
            None,
            PartialRollout(
                begin=0,
                tokens=RolloutTokens.drawn(
                    [7, 8], [-1.5, -2.5], [3, 4], SamplingMask.of([np.array([7], np.int32), np.array([], np.int32)])
                ),
            ),
        ],
    )  # fmt: skip
    ends[0].send(plain_start(start))
    found = start_of(ends[1].receive(5.0), lambda strings: stop if strings == ["ab", "c"] else None)
    assert found.prompt.tolist() == [3, 4, 5] and found.prompt.dtype == np.int64
    assert list(found.tickets) == [0, 1] and list(found.seeds) == [-7, 1 << 62]
    assert (found.limit, found.sampling, found.stop) == (9, start.sampling, stop)
    none, partial = found.partial
    assert none is None and partial is not None
    tokens = partial.tokens
    assert (tokens.ids.tolist(), tokens.logprobs.tolist(), tokens.versions.tolist()) == ([7, 8], [-1.5, -2.5], [3, 4])
    assert tokens.mask.all() and [mask.tolist() for mask in tokens.sampling_mask.lists()] == [[7], []]
    declaration = Generator(Model("somewhere", dtype="bfloat16"), stop=("a", "b"), top_k=3, name="sampler")
    ends[0].send(plain_declaration(declaration))
    again = declaration_of(ends[1].receive(5.0))
    for item in dataclasses.fields(declaration):
        assert getattr(again, item.name) == getattr(declaration, item.name)
