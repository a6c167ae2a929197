"""The pure handshake under any order of events: messages lost, readers frozen, killed and late,
writers restarted.
"""

import copy

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)
from msgspec.structs import replace
from rigs.examples import examples

from transport.weights.protocol.membership import Timing
from transport.weights.protocol.messages import Fenced, Welcome
from transport.weights.protocol.segments import SegmentOffers, SegmentReader

PACE = Timing(heartbeat_s=1.0, silent_s=3.0, release_s=5.0, gone_s=50.0)


class Reader:
    """A reader, the messages on their way to it, and the segments it is inside."""

    def __init__(self, name: str, peer: bytes, incarnation: int) -> None:
        self.membership = SegmentReader(name, PACE, incarnation=incarnation)
        self.peer = peer
        self.inbox = []
        self.taking = None
        self.inside = None
        self.adopted = []
        """(writer, version) of each."""
        self.refused = None


class World(RuleBasedStateMachine):
    """Writers, one after the other, some readers, segments with gates, and a network that may lose
    what it carries.
    """

    readers = Bundle("readers")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.lines = 1
        self.writer = SegmentOffers({}, writer=1, pace=PACE)
        self.inbox = []
        self.alive: dict[bytes, Reader] = {}
        self.content: dict[str, int] = {}
        self.left: dict[str, int] = {}
        """What readers are inside of that dead writers wrote."""
        self.made = 0
        self.published = 0
        self.pending = None

    # What an executor does

    def to_readers(self, out) -> None:
        for peer, message in out:
            if peer in self.alive:
                self.alive[peer].inbox.append(message)

    def seal(self, key: str) -> bool:
        return all(
            key not in (r.inside, r.taking and r.taking.segment) for r in self.alive.values()
        )

    def new_segment(self) -> str:
        self.made += 1
        key = f"{self.lines}.{self.made}"
        self.content[key] = -1
        return key

    def free_segment(self) -> str | None:
        for key in self.writer.order():
            if key is None:
                return self.new_segment()
            if self.seal(key):
                return key
        stuck = self.writer.blocked(self.now)
        if stuck is None:
            return None
        self.to_readers(self.writer.abandon(stuck))
        return self.new_segment()

    def poll_writer(self) -> None:
        inbox, self.inbox = self.inbox, []
        for peer, message in inbox:
            self.to_readers(self.writer.receive(peer, message, self.now))
        if self.pending is not None and (key := self.free_segment()):
            assert self.seal(key)
            assert key not in self.writer.abandoned
            self.writer.writing(key)
            self.to_readers(self.writer.upcoming(key, self.pending))
            self.content[key], self.pending = self.pending, None
            self.to_readers(self.writer.written(key, self.content[key], b"", b"", self.now))
        for key in [key for key in self.writer.abandoned if self.seal(key)]:
            self.writer.freed(key)
            del self.content[key]
        assert len(self.writer.abandoned) <= 2 * len(self.alive)
        self.to_readers(self.writer.tick(self.now))

    def poll_reader(self, reader: Reader) -> None:
        inbox, reader.inbox = reader.inbox, []
        for message in inbox:
            self.send(reader, reader.membership.receive(message, self.now))
        self.send(reader, reader.membership.tick(self.now))
        upcoming, offer = reader.membership.upcoming, reader.membership.offer
        assert upcoming is None or upcoming.version > max(
            self.own(reader), offer.version if offer else -1
        )

    def own(self, reader: Reader) -> int:
        """The newest version that it has of the writer that it thinks it is with."""
        return max(
            (version for line, version in reader.adopted if line == reader.membership._writer),
            default=-1,
        )

    def send(self, reader: Reader, messages) -> None:
        self.inbox += [(reader.peer, message) for message in messages]

    def enter(self, reader: Reader) -> None:
        offer = reader.membership.offer
        if self.found(offer.segment) != offer.version:
            reader.membership.withdrawn(offer)
            return
        reader.taking = offer
        self.send(reader, [reader.membership.entered(offer)])

    def commit(self, reader: Reader) -> None:
        offer, reader.taking = reader.taking, None
        line = int(offer.segment.split(".")[0])
        assert not reader.adopted or (line, offer.version) > reader.adopted[-1], (
            "a reader went back"
        )
        reader.inside = offer.segment
        reader.adopted.append((line, offer.version))
        self.send(reader, [reader.membership.committed(offer)])

    def found(self, segment: str) -> int | None:
        return self.content.get(segment, self.left.get(segment))

    # What may happen

    @rule(target=readers, name=st.integers(0, 2))
    def join(self, name):
        self.made += 1
        reader = Reader(f"r{name}-{self.made}", str(self.made).encode(), self.made)
        self.alive[reader.peer] = reader
        return reader

    @rule(reader=consumes(readers))
    def die(self, reader):
        del self.alive[reader.peer]

    @rule()
    def publish(self):
        self.published += 1
        self.pending = self.published
        self.poll_writer()

    @rule(back=st.integers(0, 2), lost=st.booleans())
    def the_writer_dies_and_is_restarted(self, back, lost):
        """In the midst of anything; the next one begins with a version that the dead one may have
        been beyond.
        """
        if self.published:
            self.left |= self.content
            self.content, self.pending = {}, None
            self.inbox = [] if lost else self.inbox
            self.lines += 1
            self.writer = SegmentOffers({}, writer=self.lines, pace=PACE)
            self.published = self.pending = max(1, self.published - back)
            self.poll_writer()

    @rule()
    def writer_polls(self):
        self.poll_writer()

    @rule(reader=readers)
    def reader_polls(self, reader):
        self.poll_reader(reader)

    @rule(reader=readers)
    def reader_steps(self, reader):
        if reader.taking:
            self.commit(reader)
        elif reader.membership.offer:
            self.enter(reader)

    @rule(reader=readers)
    def reader_finds_damage(self, reader):
        if reader.taking:
            offer, reader.taking = reader.taking, None
            reader.refused = offer.segment, offer.version
            self.send(reader, [reader.membership.refused(offer, "a flipped byte")])

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 20.0]))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(reader=readers, place=st.integers(0, 5))
    def a_message_to_a_reader_is_lost(self, reader, place):
        del reader.inbox[place : place + 1]

    @rule(place=st.integers(0, 5))
    def a_message_to_the_writer_is_lost(self, place):
        del self.inbox[place : place + 1]

    @precondition(lambda self: self.published)
    @rule()
    def all_answer(self):
        """Liveness: once every live reader answers, all of them hold the newest version."""
        for _ in range(12):
            self.now += PACE.heartbeat_s
            self.poll_writer()
            for reader in self.alive.values():
                self.poll_reader(reader)
                if reader.taking:
                    self.commit(reader)
                if reader.membership.offer:
                    self.enter(reader)
                    if reader.taking:
                        self.commit(reader)
        assert self.pending is None
        front = self.writer.front
        fine = [
            reader
            for reader in self.alive.values()
            if reader.refused != (front.segment, front.version)
        ]
        assert all(reader.adopted[-1] == (self.lines, self.published) for reader in fine)
        assert all(reader.membership.version == self.published for reader in fine)
        known = [
            status for status in self.writer.status(self.now) if status.silent_s < PACE.silent_s
        ]
        assert {status.name for status in known} == {
            reader.membership.join.group for reader in self.alive.values()
        }
        assert all(
            status.version == reader.membership.version
            for status in known
            for reader in fine
            if reader.membership.join.group == status.name
        )
        assert not self.writer.abandoned

    # What always holds

    @invariant()
    def what_a_reader_computes_with_stands_still(self):
        for reader in self.alive.values():
            if reader.inside:
                assert self.found(reader.inside) == reader.adopted[-1][1]
            if reader.taking:
                assert self.found(reader.taking.segment) == reader.taking.version

    @invariant()
    def two_segments_are_in_use_at_most_and_abandoned_ones_are_not_forgotten(self):
        assert len(self.writer.segments) <= 2
        assert set(self.content) == set(self.writer.segments) | set(self.writer.abandoned)

    @invariant()
    def no_epoch_is_given_twice(self):
        epochs = [status.epoch for status in self.writer.status(self.now)]
        assert len(set(epochs)) == len(epochs)


World.TestCase.settings = examples(150, stateful_step_count=40)


test_no_order_of_events_breaks_the_handshake = World.TestCase


def pair():
    """A writer that offers version 1 from segment a, and a reader that has joined it."""
    writer, reader = offering(1, writer=1), SegmentReader("r", PACE)
    talk(writer, reader, reader.tick(0.0), 0.0)
    return writer, reader


def offering(version, writer):
    """A writer of this name that offers this version from segment a."""
    handshake = SegmentOffers({}, writer=writer, pace=PACE)
    handshake.writing("a")
    handshake.written("a", version, b"", b"", 0.0)
    return handshake


def talk(writer, reader, messages, now, peer=b"r"):
    """Carry the reader's messages to the writer and the answers back to it."""
    for message in messages:
        for to, answer in writer.receive(peer, message, now):
            if to == peer:
                talk(writer, reader, reader.receive(answer, now), now, peer)


def test_an_offer_that_was_lost_is_made_again():
    writer, reader = pair()
    assert writer.written("b", 2, b"", b"", 10.0)
    assert reader.offer.version == 1
    talk(writer, reader, reader.tick(11.0), 11.0)
    assert reader.offer.version == 2


def test_an_offer_is_not_repeated_to_a_reader_that_has_it():
    writer, reader = pair()
    writer.receive(b"r", reader.committed(reader.offer), 1.0)
    assert not [m for beat in reader.tick(20.0) for m in writer.receive(b"r", beat, 20.0)]


def test_a_repeated_hello_gets_the_same_epoch():
    writer, reader = SegmentOffers({}, writer=1, pace=PACE), SegmentReader("r", PACE)
    answers = [
        writer.receive(b"r", hello, 0.0)
        for hello in reader.tick(0.0) + reader.tick(PACE.heartbeat_s)
    ]
    assert len(answers) == 2
    assert answers[0] == answers[1]


def test_nobody_is_offered_a_segment_that_is_being_written():
    writer, _ = pair()
    writer.writing("a")
    assert writer.front is None
    late = SegmentReader("late", PACE)
    (hello,) = late.tick(0.0)
    assert [type(answer).__name__ for _, answer in writer.receive(b"l", hello, 0.0)] == ["Welcome"]


def test_every_waiting_version_gives_the_readers_their_full_time():
    writer, _ = pair()
    assert writer.blocked(0.0) is None
    writer.writing("b")
    writer.written("b", 2, b"", b"", 1.0)
    assert writer.blocked(PACE.release_s + 1.0) is None
    assert writer.blocked(2 * PACE.release_s + 1.0) == "a"


def test_a_reader_that_says_late_that_it_is_in_an_abandoned_segment_is_fenced():
    writer, reader = pair()
    ready = reader.entered(reader.offer)
    writer.abandon("a")
    epoch = reader.epoch
    talk(writer, reader, [ready], 6.0)
    assert reader.epoch
    assert reader.epoch > epoch


def test_a_silent_reader_is_sent_no_more_than_a_bounded_number_of_messages():
    writer, _ = pair()
    sent = [len(writer.written("a", version, b"", b"", 0.0)) for version in range(2, 500)]
    assert 0 < sum(sent) < 100
    assert sent[-1] == 0


def test_a_version_that_is_coming_is_known_until_it_is_offered():
    writer, reader = pair()
    writer.writing("b")
    for _, upcoming in writer.upcoming("b", 2):
        reader.receive(upcoming, 1.0)
    assert (reader.upcoming.segment, reader.upcoming.version, reader.offer.version) == ("b", 2, 1)
    for _, offer in writer.written("b", 2, b"", b"", 1.0):
        reader.receive(offer, 1.0)
    assert (reader.upcoming, reader.offer.version) == (None, 2)


def test_word_of_a_version_that_is_coming_dies_with_the_epoch_and_with_the_writer():
    writer, reader = pair()
    for end in (
        Fenced(epoch=reader.epoch, replaced=False),
        Welcome(attempt=1, epoch=7, writer=9, layout={}),
    ):
        late = copy.deepcopy(reader)
        for _, upcoming in writer.upcoming("b", 2):
            late.receive(upcoming, 1.0)
        late.receive(end, 1.0)
        assert late.upcoming is None


def test_a_restarted_writers_version_is_taken_though_its_number_is_lower_or_the_same():
    for version in (5, 9, 12):
        before, reader = offering(9, writer=1), SegmentReader("r", PACE)
        talk(before, reader, reader.tick(0.0), 0.0)
        talk(before, reader, [reader.committed(reader.offer)], 1.0)
        after = offering(version, writer=2)
        talk(after, reader, reader.tick(2.0), 2.0)
        assert reader.offer.version == version
        assert after.status(2.0)[0].version == -1
        talk(after, reader, [reader.committed(reader.offer)], 2.0)
        assert after.status(2.0)[0].version == version


def test_what_a_dead_writer_offered_is_forgotten_when_the_next_one_lets_the_reader_in():
    before, reader = offering(9, writer=1), SegmentReader("r", PACE)
    hellos = reader.tick(0.0) + reader.tick(PACE.heartbeat_s)
    assert len(hellos) == 2
    talk(before, reader, hellos[:1], 1.0)
    assert reader.offer.version == 9
    talk(offering(5, writer=2), reader, hellos[1:], 2.0)
    assert reader.offer.version == 5


def test_an_offer_of_the_version_that_a_dead_writer_had_too_is_made_again_until_it_is_taken():
    before, reader = offering(9, writer=1), SegmentReader("r", PACE)
    talk(before, reader, reader.tick(0.0), 0.0)
    talk(before, reader, [reader.committed(reader.offer)], 1.0)
    after = offering(9, writer=2)
    talk(after, reader, reader.tick(2.0), 2.0)
    reader.withdrawn(reader.offer)
    talk(after, reader, reader.tick(3.0), 3.0)
    assert reader.offer.version == 9


def test_a_reader_that_was_killed_says_nothing_that_fences_its_successor():
    writer, victim = offering(1, writer=1), SegmentReader("r", PACE, incarnation=1)
    left = victim.tick(0.0) + victim.tick(PACE.heartbeat_s)
    successor = SegmentReader("r", PACE, incarnation=2)
    assert len(left) == 2
    talk(writer, victim, left[:1], 2.0, b"victim")
    talk(writer, successor, successor.tick(2.0), 2.0)
    assert not [to for to, _ in writer.receive(b"victim", left[1], 2.0) if to == b"r"]
    assert [status.epoch for status in writer.status(2.0)] == [successor.epoch]


def test_a_reader_that_wakes_after_its_successor_has_come_stays_out_for_good():
    writer, frozen = offering(1, writer=1), SegmentReader("r", PACE, incarnation=1)
    talk(writer, frozen, frozen.tick(0.0), 0.0, b"frozen")
    writer.tick(PACE.gone_s)
    successor = SegmentReader("r", PACE, incarnation=2)
    talk(writer, successor, successor.tick(60.0), 60.0)
    talk(writer, frozen, frozen.tick(61.0), 61.0, b"frozen")
    assert frozen.replaced
    assert not frozen.tick(70.0)
    assert successor.epoch
    assert not successor.replaced


def test_a_rank_of_several_is_denied_and_holds_nobody_else_up():
    writer, _ = pair()
    stranger = replace(SegmentReader("group", PACE).join, rank=1, ranks=2)
    [(to, denied)] = writer.receive(b"s", stranger, 0.0)
    assert to == b"s" and "rank 1 of 2" in denied.reason
    assert [status.name for status in writer.status(0.0)] == ["r"]
    assert [to for to, _ in writer.written("b", 2, b"", b"", 1.0)] == [b"r"]
    late = SegmentReader("late", PACE)
    late.receive(denied, 1.0)
    assert late.denied and not late.tick(9.0)


def test_two_versions_are_in_memory_at_most():
    writer = SegmentOffers({}, writer=1, pace=PACE)
    assert writer.order() == [None]
    writer.writing("a")
    writer.written("a", 1, b"", b"", 0.0)
    assert writer.order() == [None, "a"], (
        "the newest version stays as long as there is another place"
    )
    writer.writing("b")
    writer.written("b", 2, b"", b"", 0.0)
    assert writer.order() == ["a", "b"], "no third"
    assert writer.blocked(0.0) is None, "whoever publishes waits for the readers"


def test_an_offer_of_another_epoch_counts_for_nothing():
    _, reader = pair()
    offer = reader.offer
    reader.receive(replace(offer, epoch=offer.epoch + 1, version=2), 0.0)
    assert reader.offer == offer
    reader.receive(replace(offer, version=2), 0.0)
    assert reader.offer.version == 2
