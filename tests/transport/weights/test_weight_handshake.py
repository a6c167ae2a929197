"""The pure handshake under any order of events: messages lost, readers frozen, killed and late."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from transport.weights.handshake import Pace, ReaderHandshake, WriterHandshake

PACE = Pace(beat_s=1.0, silent_s=3.0, fence_s=5.0, forget_s=50.0)


class Reader:
    """A reader, the messages on their way to it, and the segments it is inside."""

    def __init__(self, name: str, peer: bytes) -> None:
        self.handshake = ReaderHandshake(name, PACE)
        self.peer = peer
        self.inbox = []
        self.taking = None
        self.inside = None
        self.adopted = []
        self.refused = -1


class World(RuleBasedStateMachine):
    """One writer, some readers, segments with gates, and a network that may lose what it carries."""

    readers = Bundle("readers")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.writer = WriterHandshake({}, writer=1, pace=PACE)
        self.inbox = []
        self.alive: dict[bytes, Reader] = {}
        self.content: dict[str, int] = {}
        self.made = 0
        self.published = 0
        self.pending = None

    # What an executor does

    def to_readers(self, out) -> None:
        for peer, message in out:
            if peer in self.alive:
                self.alive[peer].inbox.append(message)

    def seal(self, key: str) -> bool:
        return all(key not in (r.inside, r.taking and r.taking.segment) for r in self.alive.values())

    def new_segment(self) -> str:
        self.made += 1
        self.content[f"s{self.made}"] = -1
        return f"s{self.made}"

    def free_segment(self) -> str | None:
        for key in self.writer.order():
            if key is None:
                return self.new_segment()
            if self.seal(key):
                return key
        stuck = self.writer.blocked(self.now)
        if stuck is None:
            return None
        self.to_readers(self.writer.abandon(stuck, self.now))
        return self.new_segment()

    def poll_writer(self) -> None:
        inbox, self.inbox = self.inbox, []
        for peer, message in inbox:
            self.to_readers(self.writer.receive(peer, message, self.now))
        if self.pending is not None and (key := self.free_segment()):
            assert self.seal(key)
            assert key not in self.writer.abandoned
            self.writer.writing(key)
            self.content[key], self.pending = self.pending, None
            self.to_readers(self.writer.written(key, self.content[key], 0, [], self.now))
        for key in [key for key in self.writer.abandoned if self.seal(key)]:
            self.writer.freed(key)
            del self.content[key]
        assert len(self.writer.abandoned) <= 2 * len(self.alive)
        self.to_readers(self.writer.tick(self.now))

    def poll_reader(self, reader: Reader) -> None:
        inbox, reader.inbox = reader.inbox, []
        for message in inbox:
            self.send(reader, reader.handshake.receive(message, self.now))
        self.send(reader, reader.handshake.tick(self.now))

    def send(self, reader: Reader, messages) -> None:
        self.inbox += [(reader.peer, message) for message in messages]

    def enter(self, reader: Reader) -> None:
        offer = reader.handshake.offer
        if self.content.get(offer.segment) != offer.version:
            reader.handshake.withdrawn(offer)
            return
        reader.taking = offer
        self.send(reader, [reader.handshake.entered(offer)])

    def commit(self, reader: Reader) -> None:
        offer, reader.taking = reader.taking, None
        assert not reader.adopted or offer.version > reader.adopted[-1]
        reader.inside = offer.segment
        reader.adopted.append(offer.version)
        self.send(reader, [reader.handshake.committed(offer)])

    # What may happen

    @rule(target=readers, name=st.integers(0, 2))
    def join(self, name):
        self.made += 1
        reader = Reader(f"r{name}-{self.made}", str(self.made).encode())
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
        elif reader.handshake.offer:
            self.enter(reader)

    @rule(reader=readers)
    def reader_finds_damage(self, reader):
        if reader.taking:
            offer, reader.taking = reader.taking, None
            reader.refused = offer.version
            self.send(reader, [reader.handshake.refused(offer, "a flipped byte")])

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
            self.now += PACE.beat_s
            self.poll_writer()
            for reader in self.alive.values():
                self.poll_reader(reader)
                if reader.taking:
                    self.commit(reader)
                if reader.handshake.offer:
                    self.enter(reader)
                    if reader.taking:
                        self.commit(reader)
        assert self.pending is None
        fine = [reader for reader in self.alive.values() if reader.refused != self.published]
        assert all(reader.handshake.version == self.published for reader in fine)
        known = [status for status in self.writer.status(self.now) if status.silent_s < PACE.silent_s]
        assert {status.name for status in known} == {reader.handshake.name for reader in self.alive.values()}
        assert all(
            status.version == reader.handshake.version
            for status in known
            for reader in fine
            if reader.handshake.name == status.name
        )
        assert not self.writer.abandoned

    # What always holds

    @invariant()
    def what_a_reader_computes_with_stands_still(self):
        for reader in self.alive.values():
            if reader.inside:
                assert self.content[reader.inside] == reader.adopted[-1]
            if reader.taking:
                assert self.content[reader.taking.segment] == reader.taking.version

    @invariant()
    def two_segments_are_in_use_at_most_and_abandoned_ones_are_not_forgotten(self):
        assert len(self.writer.segments) <= 2
        assert set(self.content) == set(self.writer.segments) | set(self.writer.abandoned)

    @invariant()
    def no_epoch_is_given_twice(self):
        epochs = [status.epoch for status in self.writer.status(self.now)]
        assert len(set(epochs)) == len(epochs)


World.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_no_order_of_events_breaks_the_handshake = World.TestCase
