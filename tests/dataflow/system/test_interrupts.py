"""Ctrl-C, SIGTERM and SIGHUP: asked once, insisted upon, passed over; and what they mean before
anybody has said.
"""

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from dataflow.system import interrupts
from dataflow.system.child import fork
from dataflow.system.interrupts import (
    ENDINGS,
    asked_to_end,
    end_as_others_do,
    interrupted,
    leave_to_leader,
    status_of,
)


@pytest.fixture(autouse=True)
def as_at_the_start() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ENDINGS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDINGS)
def test_the_first_signal_asks_and_its_echo_says_nothing_more(number: int) -> None:
    asked: list[int] = []
    with asked_to_end(asked.append):
        for each in (number, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(each)
        assert asked == [number]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(each) for each in ENDINGS] == [signal.SIG_DFL] * 3


def test_a_sigterm_some_time_after_the_first_insists(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: now[0])
    with asked_to_end(lambda number: None):
        signal.raise_signal(signal.SIGTERM)
        now[0] += interrupts.ECHO_S + 0.1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_where_nothing_could_end_in_order_they_interrupt_as_control_c_does(
    number: int, status: int
) -> None:
    with interrupted(), pytest.raises(KeyboardInterrupt) as told:
        signal.raise_signal(number)
    assert status_of(told.value) == status and status_of(KeyboardInterrupt()) == 130


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interrupted(), asked_to_end(lambda number: pytest.fail("it was told to live on")):
        signal.raise_signal(signal.SIGHUP)


def test_who_is_led_passes_them_over_and_what_it_starts_does_not() -> None:
    def led() -> int:
        leave_to_leader()
        for number in ENDINGS:
            signal.raise_signal(number)
        forked = fork(lambda: signal.raise_signal(signal.SIGTERM) or signal.pause() or 0)
        program = subprocess.run(["sh", "-c", "kill -HUP $$; sleep 60"], check=False)
        assert (forked.wait(20), program.returncode) == (-signal.SIGTERM, -signal.SIGHUP)
        return 7

    assert fork(led).wait(30) == 7


def test_the_first_process_of_a_container_ends_before_it_has_said_what_signals_mean() -> None:
    def first() -> int:
        os.getpid = lambda: 1  # type: ignore[method-assign]
        end_as_others_do()
        signal.raise_signal(signal.SIGTERM)
        return 0

    def later() -> int:
        os.getpid = lambda: 1  # type: ignore[method-assign]
        end_as_others_do()
        with interrupted():
            try:
                signal.raise_signal(signal.SIGTERM)
            except KeyboardInterrupt:
                return 7
        return 0

    assert fork(first).wait(30) == 143 and fork(later).wait(30) == 7
