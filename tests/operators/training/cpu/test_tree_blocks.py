"""Laws of attention in blocks: every node asks once, and is answered by its own path and by nothing
else.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.examples import examples

from operators.training.learner import packed_attention
from operators.training.learner.packed_attention import attention_blocks, subtree_ends, visible
from operators.training.learner.rows import pack

ROWS = st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=9), min_size=1, max_size=12)


def _positions(rows: list[list[int]], *, share: bool = True) -> np.ndarray:
    offsets = np.r_[0, np.cumsum([len(row) for row in rows])]
    return pack(np.concatenate(rows), np.ones(offsets[-1], bool), offsets, share=share).positions_N


def _paths(positions: np.ndarray) -> list[list[int]]:
    open_nodes: list[int] = []
    found = []
    for node, depth in enumerate(positions.tolist()):
        open_nodes[depth:] = [node]
        found.append(list(open_nodes))
    return found


def _seen(positions: np.ndarray) -> list[list[int]]:
    """Of each node, the keys that answer it."""
    ends, (blocks, back) = subtree_ends(positions), attention_blocks(positions)
    found = []
    for block in blocks:
        keys, (_, wide) = block.keys_B_K, block.queries_B_Q.shape
        if block.is_causal:
            seen = np.tril(np.ones((wide, wide), bool)) & (keys[:, None] >= 0)
        else:
            seen = visible(block.queries_B_Q, keys, ends)
        found += [
            np.sort(row[mask]).tolist()
            for row, of_row in zip(keys, seen, strict=True)
            for mask in of_row
        ]
    return [found[at] for at in back]


@pytest.mark.parametrize("long_row", [512, 4, 1])
@given(ROWS, st.booleans())
@examples(150)
def test_a_node_sees_itself_and_its_ancestors(long_row, rows, share):
    positions = _positions(rows, share=share)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_attention, "LONG_ROW", long_row)
        assert _seen(positions) == _paths(positions)


def test_a_prefix_that_groups_have_in_common_asks_once():
    system = list(range(40))
    rows = [
        system + [100 + group] * 9 + [200 + rollout] * 6
        for group in range(8)
        for rollout in range(4)
    ]
    positions = _positions(rows)
    blocks, _ = attention_blocks(positions)
    asked = sum(block.queries_B_Q.size * block.keys_B_K.shape[1] for block in blocks)
    assert len(positions) == 40 + 8 * 9 + 32 * 5
    assert asked < len(rows) * len(rows[0]) ** 2 / 3


def test_a_long_row_of_its_own_needs_no_mask():
    blocks, back = attention_blocks(np.arange(2000))
    assert [(block.queries_B_Q.shape, block.is_causal) for block in blocks] == [((1, 2000), True)]
    assert back.tolist() == list(range(2000))


def test_an_empty_tree_has_no_blocks():
    assert attention_blocks(np.zeros(0, np.int64))[0] == ()
