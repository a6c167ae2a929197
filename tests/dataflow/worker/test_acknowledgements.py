"""The groups that a node answers for: acknowledged when nobody needs them, done once whatever comes
again.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial

from hypothesis import given
from hypothesis import strategies as st
from rigs.examples import examples

from dataflow.worker.acknowledgements import Acknowledgements


class Acks(list[str]):
    """Groups and names of the deliveries with which they were acknowledged, in order."""

    def of(self, name: str, *groups: int) -> dict[int, Callable[[], None]]:
        """What acknowledges each of some groups of a delivery."""
        return {group: partial(self.append, f"{group} {name}") for group in groups}


def test_a_group_is_acknowledged_when_the_next_nodes_are_done_with_it_whatever_it_came_with() -> (
    None
):
    held, acks = Acknowledgements(), Acks()
    assert held.arrive("a", "source", acks.of("first", 1, 2)) == [1, 2]
    held.sent("a", [1, 2], 2)
    held.done("a", "source", [1, 2])
    for group in (1, 2):
        held.acknowledged("a", [group])
        assert not acks
    held.acknowledged("a", [2])
    assert acks == ["2 first"]
    held.acknowledged("a", [1])
    assert acks == ["2 first", "1 first"] and not len(held)


def test_a_group_that_leads_to_nothing_is_done_with_the_runtime() -> None:
    held, acks = Acknowledgements(), Acks()
    held.arrive("a", "source", acks.of("first", 1))
    held.sent("a", [1], 0)
    assert held.inside("a") and not held.inside("b") and held.oldest() == {"a": 1}
    held.done("a", "source", [1])
    assert acks == ["1 first"] and not held.inside("a") and held.oldest() == {}


def test_a_group_that_comes_again_is_not_new_and_its_latest_delivery_stands_for_it() -> None:
    held, acks = Acknowledgements(), Acks()
    held.arrive("a", "source", acks.of("old", 1, 2))
    assert held.arrive("a", "source", acks.of("new", 2, 3)) == [3]
    assert acks == ["2 old"]
    held.done("a", "source", [1])
    held.done("a", "source", [2, 3])
    assert acks == ["2 old", "1 old", "2 new", "3 new"]


def test_what_several_replicas_sent_is_acknowledged_to_each_of_them_when_it_has_an_outcome() -> (
    None
):
    held, acks = Acknowledgements(), Acks()
    assert held.arrive("a", "generator", acks.of("first of 0", 1), "generator-0") == [1]
    assert held.arrive("a", "generator", acks.of("of 1", 1), "generator-1") == []
    assert not acks, "the second one may be the only one that is asked for it again"
    held.arrive("a", "generator", acks.of("second of 0", 1), "generator-0")
    assert acks == ["1 first of 0"]
    held.done("a", "generator", [1])
    assert sorted(acks) == ["1 first of 0", "1 of 1", "1 second of 0"]


def test_who_keeps_a_group_hears_that_it_has_an_outcome_also_where_it_began() -> None:
    released: list[tuple[str, int]] = []
    held = Acknowledgements(released=released.append)
    held.sent("a", [4], 1)
    assert len(held) == 1
    held.acknowledged("a", [4])
    assert released == [("a", 4)]


@examples(150)
@given(st.data())
def test_every_group_of_a_delivery_is_acknowledged_once_and_not_while_it_is_needed(
    data: st.DataObject,
) -> None:
    held = Acknowledgements()
    acked: Counter[tuple[int, int]] = Counter()
    """By delivery and group."""
    inside: set[int] = set()
    under_way: Counter[int] = Counter()
    newest: dict[int, int] = {}
    """By group that has no outcome: the delivery that stands for it."""
    deliveries: dict[int, set[int]] = {}
    for number in range(data.draw(st.integers(1, 25))):
        act = data.draw(st.sampled_from(["arrive", "done", "acknowledged"]))
        if act == "arrive":
            groups = data.draw(st.sets(st.integers(0, 5), max_size=3))
            new = held.arrive(
                "a",
                "source",
                {group: partial(acked.update, [(number, group)]) for group in sorted(groups)},
            )
            assert set(new) == groups - newest.keys()
            deliveries[number] = groups
            inside |= set(new)
            newest |= dict.fromkeys(groups, number)
        elif act == "done" and inside:
            group = data.draw(st.sampled_from(sorted(inside)))
            inside.discard(group)
            receivers = data.draw(st.integers(0, 2))
            held.sent("a", [group], receivers)
            under_way[group] += receivers
            held.done("a", "source", [group])
        elif act == "acknowledged" and +under_way:
            group = data.draw(st.sampled_from(sorted(+under_way)))
            under_way[group] -= 1
            held.acknowledged("a", [group])
        newest = {group: of for group, of in newest.items() if group in inside or under_way[group]}
        for number_of, groups in deliveries.items():
            assert all(
                acked[number_of, group] == (newest.get(group) != number_of) for group in groups
            )


def test_who_has_sent_rows_of_a_group_is_known_as_long_as_it_is_held() -> None:
    held = Acknowledgements()
    for sender in ("talk-1", "talk-0", "talk-1"):
        held.arrive("talk", "talk", {7: lambda: None}, sender)
    assert held.askers("talk", 7) == ["talk-1", "talk-0"]


def test_a_group_that_comes_again_after_it_has_left_is_told_of() -> None:
    """Its answer goes to the new sender; before it has left, that is among the askers anyway."""
    repeated: list[tuple[int, str]] = []
    held = Acknowledgements(
        repeated={"talk": lambda number, sender: repeated.append((number, sender))}
    )
    for sender in ("talk-0", "talk-1"):
        held.arrive("talk", "talk", {7: lambda: None}, sender)
    assert not repeated
    held.sent("talk", [7], 1)
    held.done("talk", "talk", [7])
    assert held.arrive("talk", "talk", {7: lambda: None}, "talk-2") == []
    assert repeated == [(7, "talk-2")]


def test_branches_and_sources_are_told_apart() -> None:
    held, acks = Acknowledgements(), Acks()
    for origin in ("left", "right"):
        assert held.arrive("a", origin, acks.of(origin, 1)) == [1]
    assert held.arrive("b", "left", acks.of("other", 1)) == [1]
    held.sent("a", [1], 1)
    held.done("a", "left", [1])
    held.acknowledged("a", [1])
    assert not acks
    held.done("a", "right", [1])
    assert sorted(acks) == ["1 left", "1 right"] and len(held) == 1
