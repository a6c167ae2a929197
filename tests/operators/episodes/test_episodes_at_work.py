"""What counts as work of an episode's processes."""

from types import SimpleNamespace

import pytest

from operators.episodes.runtime import EpisodesRuntime


@pytest.mark.parametrize(("isolate", "share"), [(True, 0.5), (False, 0.0)])
def test_functions_that_wait_for_the_policy_are_not_at_work(isolate: bool, share: float) -> None:
    runtime = object.__new__(EpisodesRuntime)
    runtime.__dict__ |= {
        "_worlds": SimpleNamespace(open_calls=6), "_asked": dict.fromkeys("ab"), "_at_once": 8,
        "_episode": SimpleNamespace(works_beside=isolate),
    }  # fmt: skip
    assert runtime.beside() == share
