"""Laws of products of bfloat16: sums of rounded factors, the same bits whatever stands beside
them.
"""

import pytest
import torch

from operators.training.learner.cpu import multiplies_bfloat16, rounded_product

pytestmark = pytest.mark.skipif(
    not multiplies_bfloat16(), reason="this processor multiplies no bfloat16"
)

SHAPES = [(1, 1, 1), (3, 5, 7), (14, 32, 32), (15, 33, 40), (29, 1100, 65), (5, 2049, 97)]


@pytest.mark.parametrize(("rows", "depth", "columns"), SHAPES)
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("added", [False, True])
def test_a_product_is_that_of_the_rounded_factors(rows, depth, columns, turned, added):
    torch.manual_seed(0)
    left = torch.randn(depth, rows).t() if turned[0] else torch.randn(rows, depth)
    right = torch.randn(columns, depth).t() if turned[1] else torch.randn(depth, columns)
    wanted = left.bfloat16().double() @ right.bfloat16().double()
    out = torch.full((rows, columns + 3), 2.0 if added else float("nan"))
    rounded_product(left, right, out=out[:, :columns], added=added)
    assert torch.allclose(
        out[:, :columns].double() - 2.0 * added, wanted, rtol=0, atol=1e-5 * depth**0.5
    )
    assert out[:, columns:].eq(2.0).all() if added else out[:, columns:].isnan().all()


def test_a_row_has_the_same_bits_beside_others_and_on_two_threads():
    torch.manual_seed(0)
    left, right = torch.randn(40, 70), torch.randn(90, 70).t()
    whole, part = torch.empty(40, 90), torch.empty(3, 90)
    rounded_product(left, right, out=whole)
    rounded_product(left[11:14], right, out=part)
    assert part.equal(whole[11:14])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        again = torch.empty(40, 90)
        rounded_product(left, right, out=again)
    finally:
        torch.set_num_threads(threads)
    assert again.equal(whole)


def test_what_is_no_number_stays_none():
    left = torch.ones(2, 4)
    left[1, 2] = float("nan")
    out = torch.empty(2, 3)
    rounded_product(left, torch.ones(4, 3), out=out)
    assert out[0].eq(4.0).all()
    assert out[1].isnan().all()
