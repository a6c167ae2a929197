"""What ranks say to each other of a rollout's tokens comes through as it was."""

import numpy as np
import pytest

from dataflow.tokens.rollout_tokens import KINDS, RolloutTokens, SamplingMask
from operators.engine.parallel.lockstep import CODEC, StartMessage, Step

MASK = SamplingMask.of([np.array([6, 7], np.int32), np.array([], np.int32)])


@pytest.mark.parametrize("mask", [None, MASK], ids=["whole vocabulary", "truncated"])
def test_tokens_come_through_a_message_as_they_were_and_writable(mask: SamplingMask | None) -> None:
    tokens = RolloutTokens.drawn([6, 9], [-0.5, -1.5], [3, 4], mask)
    prompt = StartMessage(
        tokens=tokens.ids,
        limit=9,
        tickets=(0,),
        seeds=(1,),
        sampling=None,
        stop=None,
        partial=(tokens,),
        goes_on=False,
    )
    (again,) = CODEC.decode(CODEC.encode(Step(0, (prompt,)))).prompts[0].partial
    for name, kind in KINDS.items():
        assert (
            getattr(again, name).tolist() == getattr(tokens, name).tolist()
            and getattr(again, name).dtype == kind
        )
    assert again.ids.flags.writeable and (again.sampling_mask is None) == (mask is None)
    if again.sampling_mask is not None:
        assert [ids.tolist() for ids in again.sampling_mask.lists()] == [[6, 7], []]
