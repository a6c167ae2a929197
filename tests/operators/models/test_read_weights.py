"""Weights that were let go of are there again only once somebody has filled them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from operators.models.read_weights import ReadWeights


@dataclass(frozen=True)
class Offer:
    version: int


@dataclass
class End:
    """A reader's end whose trainer was started again and offers the number that is in use."""

    tensor: torch.Tensor
    is_withdrawn: bool
    is_there: bool
    version: int = 3
    note: Mapping[str, int | float | str] = None  # type: ignore[assignment]
    adopted: bool = False

    def poll(self) -> Offer:
        return Offer(3)

    def adopt(self) -> int:
        self.adopted = not self.is_withdrawn
        return 3

    def let_go(self) -> bool:
        return True

    def again(self) -> bool:
        return self.adopted or self.is_there


@pytest.mark.parametrize(
    ("is_withdrawn", "is_there", "taken"),
    [(True, False, None), (True, True, 3), (False, False, 3), (False, True, 3)],
)
def test_an_offer_that_is_withdrawn_before_it_is_taken_fills_nothing(
    is_withdrawn: bool, is_there: bool, taken: int | None, tmp_path: Path
) -> None:
    end = End(torch.ones(4), is_withdrawn, is_there)
    weights = ReadWeights(end, {"w": end.tensor}, tmp_path)
    weights.sleep([end.tensor])
    weights.hear()
    weights.wake()
    assert weights.take() == taken and weights.ready == (taken is not None)
