"""Limits grow with the bytes of a run's models, and a figure that somebody gives stays."""

import pytest

from dataflow.limits import COMPILE_S, Limits

GROWING = ("start_s", "exchange_s", "transfer_s")
WHOLE_405B, SHARD_405B = 811 * 10**9, 51 * 10**9


def test_a_small_model_has_the_defaults() -> None:
    assert Limits().for_models(0, 0, compiles=False) == Limits()


def test_405b_may_load_at_half_a_gigabyte_per_second_and_send_at_a_tenth() -> None:
    limits = Limits().for_models(WHOLE_405B, SHARD_405B, compiles=True)
    assert limits.start_s >= 300 + WHOLE_405B / 0.5e9
    assert limits.transfer_s >= 120 + SHARD_405B / 0.1e9
    assert limits.exchange_s >= 120 + 300
    assert limits.settle_s <= limits.exchange_s / 2


@pytest.mark.parametrize("name", GROWING)
def test_a_larger_model_never_waits_shorter(name: str) -> None:
    seconds = [
        getattr(Limits().for_models(nbytes, nbytes // 8, compiles=False), name)
        for nbytes in (0, 10**9, 10**11, 10**12)
    ]
    assert seconds == sorted(set(seconds))


def test_a_first_compile_is_waited_for_in_an_exchange_alone() -> None:
    plain = Limits().for_models(10**9, 10**9, compiles=False)
    compiled = Limits().for_models(10**9, 10**9, compiles=True)
    assert compiled.exchange_s == plain.exchange_s + COMPILE_S
    assert (compiled.start_s, compiled.transfer_s) == (plain.start_s, plain.transfer_s)


@pytest.mark.parametrize("name", GROWING)
def test_a_figure_that_is_given_stays(name: str) -> None:
    given = Limits(**{name: 7.0})
    limits = given.for_models(WHOLE_405B, SHARD_405B, compiles=True)
    assert getattr(limits, name) == 7.0
    assert all(getattr(limits, other) > getattr(given, other) for other in GROWING if other != name)
