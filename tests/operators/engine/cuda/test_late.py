"""Flags come back in the step they are due in, whoever has left meanwhile; none is lost or told
twice.
"""

import numpy as np
import pytest
import torch

from operators.engine.cuda.late import LateFlags


def play(lag, ends, steps):
    """Rows that each end at their own step, and leave once that is known: by ticket, the steps they
    were in.
    """
    late = LateFlags(torch.device("cpu"), 8, lag)
    live = np.array(sorted(ends))
    drawn = dict.fromkeys(ends, 0)
    told = []
    for step in range(steps):
        for ticket in live.tolist():
            drawn[ticket] += 1
        late.push(live, torch.tensor([ends[ticket] == step for ticket in live.tolist()]))
        due = late.due()
        told += due.tolist()
        live = live[~np.isin(live, due)]
    return drawn, told


@pytest.mark.parametrize("lag", [0, 1])
def test_a_row_that_ended_has_drawn_exactly_lag_tokens_too_many(lag):
    ends = {3: 0, 4: 2, 7: 2, 9: 5}
    drawn, told = play(lag, ends, 9)
    assert drawn == {ticket: end + 1 + lag for ticket, end in ends.items()}
    assert sorted(told) == sorted(ends)


def test_the_rest_tells_of_the_newest_step_at_once_and_only_once():
    late = LateFlags(torch.device("cpu"), 4, 1)
    assert not len(late.rest())
    late.push(np.array([5, 6]), torch.tensor([False, True]))
    assert not len(late.due())
    assert late.rest().tolist() == [6]
    assert not len(late.rest()) and not len(late.due())
    late.push(np.array([5]), torch.tensor([True]))
    assert not len(late.due())
    late.push(np.array([5]), torch.tensor([False]))
    assert late.due().tolist() == [5]


def test_later_changes_of_rows_and_flags_do_not_reach_what_was_pushed():
    late = LateFlags(torch.device("cpu"), 4, 1)
    tickets, flags = np.array([1, 2]), torch.tensor([True, False])
    late.push(tickets, flags)
    tickets[:] = 0
    flags[:] = False
    late.push(np.array([2, 3]), torch.tensor([False, False]))
    assert late.due().tolist() == [1]


def test_without_a_gpu_reading_behind_is_just_reading():
    late = LateFlags(torch.device("cpu"), 4, 1)
    with late.behind():
        assert torch.zeros(1).item() == 0
