"""A rollout's tokens keep all that is known of them through slices, joins, Arrow columns and plain
bytes.
"""

import numpy as np
import pyarrow as pa
import pytest

from dataflow.errors import RecordError
from dataflow.records import MASK, ROLLOUT_ID, SAMPLING_MASK
from dataflow.tokens.rollout_tokens import COLUMNS, KINDS, RolloutTokens, SamplingMask


def rollout(prompt: int, drawn: int, version: int = 3, masks: bool = True) -> RolloutTokens:
    ids = np.arange(drawn)
    left = (
        SamplingMask.of([np.arange(i, i + i % 3, dtype=np.int32) for i in ids]) if masks else None
    )
    return RolloutTokens.joined(
        [
            RolloutTokens.given(np.arange(prompt) + 50),
            RolloutTokens.drawn(ids, -ids, np.full(drawn, version), left),
        ]
    )


def facts(tokens: RolloutTokens) -> list[object]:
    found: list[object] = [getattr(tokens, name).tolist() for name in KINDS]
    return [*found, tokens.sampling_mask and [ids.tolist() for ids in tokens.sampling_mask.lists()]]


def table(*rollouts: RolloutTokens, sampling_mask: bool = True) -> pa.Table:
    offsets = np.r_[0, np.cumsum([len(each) for each in rollouts])]
    columns = RolloutTokens.joined(rollouts).columns(offsets, sampling_mask=sampling_mask)
    return pa.table({ROLLOUT_ID: pa.array(range(len(rollouts))), **columns})


def test_a_prompt_is_nobodys_and_a_completion_is_the_policys() -> None:
    tokens = rollout(2, 3)
    assert facts(tokens) == [
        [50, 51, 0, 1, 2],
        [False, False, True, True, True],
        [0, 0, 0, -1, -2],
        [-1, -1, 3, 3, 3],
        [[], [], [], [1], [2, 3]],
    ]
    assert all(getattr(tokens, name).dtype == kind for name, kind in KINDS.items())
    assert (
        facts(RolloutTokens.joined(())) == [[], [], [], [], None]
        and len(RolloutTokens.joined(())) == 0
    )


@pytest.mark.parametrize("masks", [False, True])
def test_slices_end_to_end_are_the_whole(masks: bool) -> None:
    tokens = rollout(3, 8, masks=masks)
    for at in range(len(tokens) + 1):
        assert facts(RolloutTokens.joined([tokens[:at], tokens[at:]])) == facts(tokens)
    assert facts(tokens.take(np.arange(2, 7))) == facts(tokens[2:7])


@pytest.mark.parametrize("masks", [False, True])
def test_columns_give_the_tokens_back(masks: bool) -> None:
    first, second = rollout(2, 5, masks=masks), rollout(4, 3, version=7, masks=masks)
    rows = table(first, RolloutTokens.joined(()), second)
    found, offsets = RolloutTokens.of_rows(rows)
    assert offsets.tolist() == [0, 7, 7, 14] and facts(found) == facts(
        RolloutTokens.joined([first, second])
    )
    again, _ = RolloutTokens.of_rows(rows.take(pa.array([2, 0])).combine_chunks())
    assert facts(again) == facts(RolloutTokens.joined([second, first]))


def test_what_truncation_left_nothing_out_of_is_null() -> None:
    assert table(rollout(1, 3)).column(SAMPLING_MASK).to_pylist() == [[None, None, [1], [2, 3]]]
    assert set(table(rollout(1, 3), sampling_mask=False).column_names) == {
        ROLLOUT_ID,
        *COLUMNS.values(),
    }


def test_lists_of_unequal_length_are_refused_by_name() -> None:
    rows = table(rollout(1, 2)).set_column(2, MASK, pa.array([[True]]))
    with pytest.raises(
        RecordError, match="column 'mask' of rollout 0 has 1 numbers but the rollout has 3 tokens"
    ):
        RolloutTokens.of_rows(rows)


def test_a_sampling_mask_without_the_token_drawn_is_refused() -> None:
    tokens = RolloutTokens.drawn([5], [0.0], [0], SamplingMask.of([np.array([6], np.int32)]))
    with pytest.raises(RecordError, match="leaves out token 5 at 0"):
        RolloutTokens.of_rows(table(tokens))
