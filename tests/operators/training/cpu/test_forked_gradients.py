"""A trainer in a fork of a program that computed gradients with several threads, as torch for GPUs
does.
"""

from typing import Any

import pytest
import torch

from dataflow.errors import Unusable
from operators.training.learner.build import check_gradients


def test_it_says_at_once_that_it_cannot_train_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise RuntimeError("Unable to handle autograd's threading in combination with fork\nmore")

    monkeypatch.setattr(torch.Tensor, "backward", refused)
    with pytest.raises(
        Unusable, match=r"'trainer' cannot train.*autograd's threading.*first backward\(\)"
    ) as found:
        check_gradients("trainer")
    assert found.value.is_lasting, "no restart mends it"


def test_it_trains_where_gradients_can_be_computed() -> None:
    check_gradients("trainer")
