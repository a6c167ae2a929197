"""What a trainer hears of readers that take its versions from another reader's memory, and when it
heard it first.
"""

from transport.weights.protocol.messages import Join, ReaderHeartbeat, Welcome
from transport.weights.protocol.pace import Deadlines
from transport.weights.protocol.ranks import ReaderRank
from transport.weights.protocol.roster import KEPT, Group, HandedOn

PACE = Deadlines(heartbeat_s=1.0)
WRITER, OTHER = 5, 6


def joined() -> ReaderRank:
    """A rank that hands versions on, under the epoch of a writer."""
    rank = ReaderRank(Join(group="a", incarnation=0, attempt=1, writer=0, version=-1), PACE)
    rank.tick(0.0)
    rank.receive(Welcome(attempt=1, epoch=3, writer=WRITER, layout={}), 0.0)
    rank.tick(1.0)
    return rank


def test_news_of_readers_is_said_at_once_and_once():
    rank = joined()
    assert rank.tick(1.1) == [], "a sign of life is not due yet"
    assert rank.serves({"a": 7, "b": 6}, {"a": 0.5}, WRITER)
    (beat,) = rank.tick(1.1)
    assert (beat.behind, beat.taken_s) == ({"a": 7, "b": 6}, {"a": 0.5})
    assert not rank.serves({"a": 7, "b": 6}, {"a": 0.5}, WRITER) and rank.tick(1.2) == []
    assert rank.tick(2.2) == [beat], "as ever"


def test_versions_of_another_trainer_are_none_of_this_one():
    rank = joined()
    assert rank.serves({"a": 7}, {"a": 0.5}, OTHER)
    (beat,) = rank.tick(1.1)
    assert (beat.behind, beat.taken_s) == ({"a": -1}, {})


def test_who_is_not_in_says_so_no_sooner_for_having_readers():
    rank = ReaderRank(Join(group="a", incarnation=0, attempt=1, writer=0, version=-1), PACE)
    assert rank.tick(0.0) == [rank.join]
    assert rank.serves({"a": 7}, {}, WRITER) and rank.tick(0.5) == []


def test_an_exchange_is_as_long_as_it_was_when_it_was_heard_first():
    group = Group(name="a", order=1)

    def hears(now: float, **behind: int) -> dict[str, HandedOn]:
        taken_s = dict.fromkeys(behind, 0.25)
        group.hand_on(ReaderHeartbeat(epoch=1, version=1, behind=behind, taken_s=taken_s), now)
        return group.behind

    group.began = 10.0
    group.arrived(1)
    assert hears(10.5, b=-1, c=1) == {"b": HandedOn(-1, 0.0, 0.25), "c": HandedOn(1, 0.5, 0.25)}
    group.began = 12.0
    group.arrived(2)
    assert hears(13.0, b=1, c=2) == {"b": HandedOn(1, 3.0, 0.25), "c": HandedOn(2, 1.0, 0.25)}
    assert hears(20.0, c=2) == {"c": HandedOn(2, 1.0, 0.25)}, "and of who is gone nothing is said"
    for version in range(3, 3 + KEPT):
        group.arrived(version)
    assert hears(21.0, c=1) == {"c": HandedOn(1, 0.0, 0.25)}, (
        "nobody knows any more when that began"
    )
