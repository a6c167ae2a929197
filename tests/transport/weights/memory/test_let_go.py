"""A reader that lets go of its version holds no memory of it, and has it again, or a newer one,
before it is read.
"""

import pytest

from dataflow.weight_ends import leave
from transport.weights import FlatLayout

from ..conftest import parameters, values

pytestmark = pytest.mark.usefixtures("clean_shm")


LAYOUT = FlatLayout.of(parameters())


ADOPTS = pytest.mark.parametrize("adopt", ["view", "copy"])


def held(place, adopt, version=1):
    """A writer, and a reader that has let go of this version of its tensors."""
    mine = parameters()
    writer, reader = place.writer(LAYOUT), place.reader(attach=mine, adopt=adopt)
    writer.publish(version, parameters(version))
    place.settle(writer, reader)
    assert reader.let_go()
    if adopt == "view":
        assert all(tensor.untyped_storage().nbytes() <= 4 for tensor in mine.values())
    assert [tuple(tensor.shape) for tensor in mine.values()] == [
        spec.shape for spec in LAYOUT.tensors
    ]
    return writer, reader, mine


@ADOPTS
def test_the_version_that_was_let_go_of_comes_back(place, adopt):
    writer, reader, mine = held(place, adopt)
    place.settle(writer, reader)
    assert reader.poll() is None and reader.version == 1
    assert reader.again() and values(mine) == {1}
    writer.publish(2, parameters(2))
    place.settle(writer, reader)
    assert values(mine) == {2}


@ADOPTS
def test_a_newer_version_is_heard_of_meanwhile_and_adopted_later(place, adopt):
    writer, reader, mine = held(place, adopt)
    for version in (2, 3, 4):
        assert writer.publish(version, parameters(version)), (
            "nobody is in a segment, so each of them is free"
        )
        place.settle(writer, reader, adopt=False)
        assert reader.poll().version == version
    assert reader.version == 1 and writer.segments == (2, 0)
    assert reader.adopt() == 4 and values(mine) == {4}


@ADOPTS
def test_a_version_that_was_written_over_does_not_come_back(place, adopt):
    writer, reader, mine = held(place, adopt)
    writer.publish(2, parameters(2))
    writer.publish(3, parameters(3))
    assert not reader.again(), "its segment holds version 3"
    place.settle(writer, reader)
    assert values(mine) == {3} and reader.version == 3


@ADOPTS
def test_what_a_reader_lets_go_of_before_its_first_version_does_not_come_back(place, adopt):
    mine = parameters()
    writer, reader = place.writer(LAYOUT), place.reader(attach=mine, adopt=adopt)
    assert not reader.let_go() and not reader.again()
    assert values(mine) == {0} and not reader.let_go(), "they are of no writer"
    writer.publish(1, parameters(1))
    place.settle(writer, reader)
    assert values(mine) == {1}


@ADOPTS
def test_one_that_has_let_go_may_close(place, adopt):
    _, reader, _ = held(place, adopt)
    reader.close()


def test_who_leaves_for_good_copies_no_version(place):
    mine = parameters()
    writer, reader = place.writer(LAYOUT), place.reader(attach=mine, adopt="view")
    writer.publish(1, parameters(1))
    place.settle(writer, reader)
    assert values(mine) == {1}
    leave(reader)
    assert all(tensor.untyped_storage().nbytes() <= 4 for tensor in mine.values())
