"""What the weight plane does when something is wrong, the same for every executor."""

import pytest
import torch

from transport.errors import PeerGone, WaitTimeout
from transport.weights import (
    AddressTaken,
    ChecksumMismatch,
    FlatLayout,
    LayoutMismatch,
    WeightError,
)

from ..conftest import PACE, parameters, values

pytestmark = pytest.mark.usefixtures("clean_shm")


LAYOUT = FlatLayout.of(parameters())


def state(writer, name="generator-0"):
    return next(status for status in writer.readers if status.name == name)


def test_untied_tensors_are_refused_by_a_reader_that_ties_them(place):
    shared = torch.nn.Parameter(torch.zeros(5, 4))
    writer = place.writer(FlatLayout.build([("a", (5, 4), "float32"), ("b", (5, 4), "float32")]))
    reader = place.reader(attach={"a": shared, "b": shared})
    with pytest.raises(LayoutMismatch, match="'a' and 'b' in the same memory; tie them"):
        place.settle(writer, reader)


def test_a_publish_waits_no_longer_than_it_may(place):
    writer = place.writer(LAYOUT, wait_s=2.0)
    one, two = place.reader("slow", attach=parameters()), place.reader("fast", attach=parameters())
    writer.publish(1, parameters(1))
    place.settle(writer, one, two)
    writer.publish(2, parameters(2))
    place.settle(writer, two)
    begun = place.clock.now
    ticking = place.clock.now

    def tick():
        nonlocal ticking
        ticking += 0.25
        return ticking

    writer._clock = tick
    assert not writer.publish(3, parameters(3))
    assert ticking - begun < 2.0 + 5 * 0.25
    writer._clock = place.clock


def test_a_frozen_reader_is_fenced_and_never_sees_its_memory_overwritten(place):
    frozen, live = parameters(), parameters()
    writer = place.writer(LAYOUT)
    one, two = place.reader("frozen", attach=frozen), place.reader("live", attach=live)
    writer.publish(1, parameters(1))
    place.settle(writer, one, two)
    epoch = one.epoch
    writer.publish(2, parameters(2))
    place.settle(writer, two)
    assert not writer.publish(3, parameters(3))
    place.clock.now += PACE.release_s / 2
    place.settle(writer, two)
    assert (two.version, writer.segments) == (2, (2, 0))
    place.clock.now += PACE.release_s / 2
    place.settle(writer, two)
    assert (two.version, writer.segments) == (3, (2, 1))
    for version in range(4, 10):
        assert writer.publish(version, parameters(version))
        place.settle(writer, two)
        assert values(frozen) == {1}
    assert [status.name for status in writer.readers] == ["live"]
    place.settle(writer, one, two)
    assert one.epoch > epoch
    assert values(frozen) == values(live) == {9}
    assert writer.segments == (2, 0)


@pytest.mark.parametrize("checksum", ["buffer", "tensors"])
def test_a_flipped_byte_is_found_at_that_sync_and_the_old_version_stays(place, checksum):
    mine = parameters()
    writer, reader = place.writer(LAYOUT, checksum=checksum), place.reader(attach=mine)
    writer.publish(1, parameters(1))
    place.settle(writer, reader)
    writer.publish(2, parameters(2))
    place.flip(writer._offers.front.segment, LAYOUT.tensors[1].offset + 5)
    with pytest.raises(ChecksumMismatch, match="keeps version 1; found other bytes in tensor 'up'"):
        place.settle(writer, reader)
    assert reader.version == 1
    assert values(mine) == {1}
    place.clock.now += 10 * PACE.heartbeat_s
    place.settle(reader, writer)
    assert reader.version == 1
    assert state(writer).state == "refused"
    writer.publish(3, parameters(3))
    place.settle(writer, reader)
    assert values(mine) == {3}


def test_a_run_goes_on_with_the_version_before_a_damaged_one_and_says_so_in_the_log(place, caplog):
    mine = parameters()
    writer, reader = place.writer(LAYOUT), place.reader(attach=mine, on_damage="keep")
    writer.publish(1, parameters(1))
    place.settle(writer, reader)
    writer.publish(2, parameters(2))
    place.flip(writer._offers.front.segment, LAYOUT.tensors[1].offset + 5)
    place.settle(writer, reader)
    assert (reader.version, values(mine)) == (1, {1})
    assert "keeps version 1; found other bytes in tensor 'up'" in caplog.text
    writer.publish(3, parameters(3))
    place.settle(writer, reader)
    assert (reader.version, values(mine)) == (3, {3})


def test_a_second_writer_of_one_address_is_refused(place):
    place.writer(LAYOUT)
    with pytest.raises(AddressTaken, match="writer"):
        place.writer(LAYOUT)


def test_the_address_is_free_again_after_close(place):
    place.writer(LAYOUT).close()
    assert place.writer(LAYOUT).version == -1


def test_a_second_reader_of_one_name_replaces_the_first(place):
    writer = place.writer(LAYOUT)
    one = place.reader("same", attach=parameters())
    place.settle(writer, one)
    two = place.reader("same", attach=parameters())
    place.settle(writer, two)
    with pytest.raises(AddressTaken, match="'same'"):
        place.settle(writer, one)
    assert len(writer.readers) == 1


def test_a_reader_follows_a_restarted_writer_even_to_an_older_version(place):
    mine = parameters()
    writer, reader = place.writer(LAYOUT), place.reader(attach=mine)
    writer.publish(9, parameters(9))
    place.settle(writer, reader)
    writer.close()
    assert values(mine) == {9}
    again = place.writer(LAYOUT)
    again.publish(5, parameters(5))
    for _ in range(100):
        place.clock.now += PACE.heartbeat_s
        place.settle(reader, again)
        if reader.version == 5:
            break
    assert values(mine) == {5}


def test_without_a_writer_the_last_version_stays_and_only_a_wait_fails(place):
    mine = parameters()
    writer, reader = place.writer(LAYOUT), place.reader(attach=mine)
    writer.publish(1, parameters(1))
    place.settle(writer, reader)
    writer.close()
    for _ in range(5):
        place.clock.now += PACE.silent_s
        assert reader.poll() is None
    assert reader.silent_s >= PACE.silent_s
    reader._clock = iter(range(200, 300)).__next__
    with pytest.raises(PeerGone, match="version 2; found no word"):
        reader.wait(2, timeout_s=3)
    assert (reader.version, values(mine)) == (1, {1})


def test_a_wait_for_a_version_that_does_not_come_names_what_is_there(place):
    mine = parameters()
    writer, reader = place.writer(LAYOUT), place.reader(attach=mine)
    writer.publish(1, parameters(1))
    place.settle(writer, reader, adopt=False)
    place.clock.now += PACE.heartbeat_s
    writer.poll()
    begun = place.clock.now
    reader._clock = iter([begun + n for n in range(100)]).__next__
    with pytest.raises(WaitTimeout, match="version 2; found version 1"):
        reader.wait(2, timeout_s=6)


def test_adopting_with_nothing_on_offer_changes_nothing(place):
    reader = place.reader(attach=parameters(4))
    assert reader.adopt() == -1


def test_adopting_without_attached_tensors_is_refused(place):
    writer, reader = place.writer(LAYOUT), place.reader()
    writer.publish(1, parameters(1))
    with pytest.raises(WeightError, match="nothing attached; call attach"):
        place.settle(writer, reader)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("up"), "no tensor for 'up'"),
        (lambda t: t.update(up=torch.zeros(3)), r"another shape for 'up'; found \[3\]"),
        (lambda t: t.update(more=torch.zeros(3)), "found 'more' outside the layout"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_on_both_sides(place, change, message):
    tensors = dict(parameters())
    change(tensors)
    writer, reader = place.writer(LAYOUT), place.reader(attach=tensors)
    with pytest.raises(LayoutMismatch, match=f"the writer has .*{message}"):
        writer.publish(1, tensors)
    with pytest.raises(LayoutMismatch, match=f"reader 'generator-0' has .*{message}"):
        place.settle(writer, reader)


def test_versions_must_rise(place):
    writer = place.writer(LAYOUT)
    writer.publish(3, parameters())
    with pytest.raises(WeightError, match="found 3 after 3"):
        writer.publish(3, parameters())


def test_a_failed_write_offers_nothing_and_the_next_one_works(place, monkeypatch):
    mine = parameters()
    writer, reader = place.writer(LAYOUT), place.reader(attach=mine)
    writer.publish(1, parameters(1))
    place.settle(writer, reader)

    def torn(filler, sources):
        filler._destinations[0].fill_(8)
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr("transport.weights.writer.fill", torn)
        writer.publish(2, parameters(2))
    place.settle(writer, reader)
    assert (reader.version, values(mine)) == (1, {1})
    writer.publish(3, parameters(3))
    place.settle(writer, reader)
    assert values(mine) == {3}


def test_readers_join_and_leave_without_a_version_lost(place):
    writer = place.writer(LAYOUT)
    stays = parameters()
    reader = place.reader("stays", attach=stays)
    for version in range(1, 51):
        mine = parameters()
        guest = place.reader(f"guest-{version}", attach=mine)
        writer.publish(version, parameters(version))
        place.settle(writer, reader, guest)
        assert values(mine) == values(stays) == {version}
        guest.close()
        place.opened.remove(guest)
    place.settle(writer, reader)
    assert [status.name for status in writer.readers] == ["stays"]
    assert writer.segments == (2, 0)


def test_a_reader_unheard_for_long_is_struck_off_and_may_come_back(place):
    writer, reader = place.writer(LAYOUT), place.reader(attach=parameters())
    place.settle(writer, reader)
    place.clock.now += PACE.silent_s
    writer.poll()
    assert state(writer).state == "silent"
    place.clock.now += PACE.gone_s
    writer.poll()
    assert writer.readers == ()
    writer.publish(1, parameters(1))
    place.settle(reader, writer)
    assert reader.version == 1


def test_a_restarted_writer_of_another_model_is_refused(place):
    writer, reader = place.writer(LAYOUT), place.reader(attach=parameters())
    writer.publish(1, parameters(1))
    place.settle(writer, reader)
    writer.close()
    again = place.writer(FlatLayout.build([("other", (3,), "float32")]))
    with pytest.raises(LayoutMismatch, match="'embed' outside the layout"):
        for _ in range(100):
            place.clock.now += PACE.heartbeat_s
            place.settle(reader, again)


def test_using_a_closed_end_is_refused(place):
    writer, reader = place.writer(LAYOUT), place.reader()
    writer.close()
    reader.close()
    writer.close()
    reader.close()
    for call in (writer.poll, reader.poll, reader.adopt, lambda: writer.tell({})):
        with pytest.raises(WeightError, match="closed"):
            call()
