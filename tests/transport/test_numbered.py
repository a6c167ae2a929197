"""Messages between a scheduler and an agent: each arrives once and in order, whatever a connection
loses.
"""

import random

import pytest

from transport.errors import MessageError
from transport.numbered import AGAIN_S, MOST_AGAIN_S, Frames, Numbered


def heard(end: Numbered, *frames: Frames, now: float = 0.0) -> list[bytes]:
    found = [end.take(each, now) for each in frames]
    return [each for each in found if each is not None]


def alive(end: Numbered, now: float = 0.0) -> Frames:
    return end.frames(b"alive", now, is_kept=False)


def test_a_message_that_a_connection_lost_is_sent_again_as_soon_as_the_other_is_heard() -> None:
    one, other = Numbered(), Numbered()
    said = [one.frames(b"%d" % number, 0.0, is_kept=True) for number in range(3)]
    # the second was lost: what comes after it waits
    assert heard(other, said[0], said[2]) == [b"0"]
    heard(one, alive(other), now=AGAIN_S / 2)
    assert one.missing(AGAIN_S / 2) == []  # perhaps it is on its way
    heard(one, alive(other), now=AGAIN_S)
    again = one.missing(AGAIN_S)
    assert heard(other, *again) == [b"1", b"2"]
    assert heard(other, *again, *said) == []  # each once
    heard(one, alive(other), now=100.0)
    assert one.missing(100.0) == []


def test_what_is_not_heard_is_sent_again_less_and_less_often() -> None:
    one, other = Numbered(), Numbered()
    one.frames(b"x", 0.0, is_kept=True)
    times: list[float] = []
    for tenth in range(1000):
        heard(one, alive(other), now=tenth / 10)
        times += [tenth / 10] * len(one.missing(tenth / 10))
    waits = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert (
        waits[:3] == pytest.approx([AGAIN_S, 2 * AGAIN_S, 4 * AGAIN_S])
        and max(waits) <= MOST_AGAIN_S + 0.1
    )


def test_what_is_said_again_by_itself_is_heard_out_of_turn_and_not_kept() -> None:
    one, other = Numbered(), Numbered()
    one.frames(b"lost", 0.0, is_kept=True)
    assert heard(other, alive(one)) == [b"alive"]


def test_one_that_has_nothing_to_say_asks_for_what_it_misses() -> None:
    one, other = Numbered(), Numbered()
    said = [one.frames(b"%d" % number, 0.0, is_kept=True) for number in range(3)]
    assert heard(other, said[2]) == []
    (ask,) = other.missing(0.0)
    assert heard(other, said[1], now=0.1) == [] and other.missing(0.1) == []  # not each time
    assert heard(one, ask, now=AGAIN_S) == []  # it is no message
    assert heard(other, *one.missing(AGAIN_S)) == [b"0", b"1", b"2"]


def test_what_was_forgotten_never_arrives_and_what_comes_after_it_does() -> None:
    one, other = Numbered(), Numbered()
    late = [one.frames(each, 0.0, is_kept=True) for each in (b"a", b"b")]
    assert heard(other, late[0]) == [b"a"]
    one.begin_anew()
    assert heard(other, one.frames(b"c", 1.0, is_kept=True), late[1]) == [b"c"]
    heard(one, alive(other), now=9.0)
    assert one.missing(9.0) == []


@pytest.mark.parametrize("is_known", [False, True])
def test_another_scheduler_is_understood_and_hears_nothing_that_was_said_to_the_one_before_it(
    is_known: bool,
) -> None:
    """is_known: whether the agent turns to it; it may also listen where the one before it did."""
    agent, before, after = Numbered(), Numbered(1), Numbered(1 << 32)
    assert heard(before, agent.frames(b"a", 0.0, is_kept=True)) == [b"a"]
    assert heard(agent, before.frames(b"b", 0.0, is_kept=True)) == [b"b"]
    agent.frames(b"c", 0.0, is_kept=True)
    if is_known:
        agent.begin_anew(with_another=True)
    assert heard(after, alive(agent)) == [b"alive"]
    assert heard(agent, after.frames(b"d", 5.0, is_kept=True), now=5.0) == [b"d"]
    assert heard(after, *agent.missing(5.0), agent.frames(b"e", 5.0, is_kept=True)) == [b"e"]


@pytest.mark.parametrize("frames", [[], [b"x"], [b"short", b"x"], [b"0" * 32, b"x", b"y"]])
def test_what_has_no_numbers_is_no_message(frames: Frames) -> None:
    with pytest.raises(MessageError, match="its numbers and what is said; found frames of"):
        Numbered().take(frames, 0.0)


@pytest.mark.parametrize("seed", range(50))
def test_whatever_connections_lose_each_message_arrives_once_and_in_order(seed: int) -> None:
    """A connection keeps the order, and loses at any moment all that is on its way."""
    rng, ends = random.Random(seed), (Numbered(), Numbered(7))
    ways: list[list[Frames]] = [[], []]
    said, came = [0, 0], [[], []]  # type: ignore[var-annotated]
    for turn in range(600):
        now, is_quiet = turn * 0.1, turn > 450
        for at in (0, 1):
            other = 1 - at
            if not is_quiet and rng.random() < 0.3:
                ways[at].append(ends[at].frames(b"%d" % said[at], now, is_kept=True))
                said[at] += 1
            if turn % 5 == at:
                ways[at].append(alive(ends[at], now))
            while ways[at] and rng.random() < 0.7:
                message = ends[other].take(ways[at].pop(0), now)
                if message not in (None, b"alive"):
                    came[other].append(message)
            ways[other] += ends[other].missing(now)
        if not is_quiet and rng.random() < 0.05:
            ways = [[], []]
    for at in (0, 1):
        assert came[1 - at] == [b"%d" % number for number in range(said[at])]


def test_one_that_follows_another_in_the_same_session_is_heard_from_its_first_message_on() -> None:
    """As two trainers that a program opens at one address, with no scheduler that numbers them."""
    reader, found = Numbered(), []
    for writer in (Numbered(), Numbered(), Numbered()):
        heard(writer, reader.frames(b"join", 0.0, is_kept=True))
        found += heard(
            reader, *[writer.frames(b"%d" % number, 0.0, is_kept=True) for number in range(3)]
        )
        heard(writer, alive(reader))
    assert found == [b"0", b"1", b"2"] * 3
