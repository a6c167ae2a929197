"""Whatever a rank waits for in a process group of gloo's ends when it aborts."""

from __future__ import annotations

import datetime
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from transport.weights.sharded.process_group import _gloo, abort_gloo

RANKS = 4
NEVER = datetime.timedelta(days=365)
DEADLINE_S = 20.0


def made() -> list[Any]:
    """The ends of all ranks."""
    store = dist.HashStore()
    with ThreadPoolExecutor(RANKS) as ranks:
        return list(ranks.map(lambda rank: _gloo(store, rank, RANKS, ""), range(RANKS)))


@pytest.mark.parametrize("gone", [[], [1], [1, 2], [3]], ids=str)
def test_a_wait_for_a_silent_rank_ends_though_others_have_aborted_before(gone: list[int]) -> None:
    """Their connections to this rank are closed already, and nothing can time out there."""
    ends = made()
    silent = 2 if 2 not in gone else 3
    work = ends[0].recv([torch.empty(1)], silent, 5)
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(RuntimeError):
            work.wait(NEVER)
        ended.set()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    for rank in gone:
        abort_gloo(ends[rank], rank, RANKS)
    assert not ended.wait(0.2)
    abort_gloo(ends[0], 0, RANKS)
    assert ended.wait(DEADLINE_S)
