"""One receiver and all its senders: who may send how much, what is new, what came twice, what is
missing.

Pure: messages in, replies out; no socket, no clock. A `ConnectionId` is whatever names a
connection.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import reduce
from typing import Literal

from msgspec.structs import replace

from transport.data.credit import NONE, Credit, Holding, allot, cost, may_send
from transport.data.messages import Ack, Data, Hello, Message, Welcome
from transport.life import Life, Refused, replaced

ConnectionId = Hashable
Replies = list[tuple[ConnectionId, Message]]
Verdict = Literal["new", "part", "duplicate", "ahead", "stray", "overrun"]
"""new: take it. part: keep it, the rest of its batch follows. duplicate: had it. ahead: something
before it is missing. stray: no Hello came over this connection for this sender and life. overrun:
sent without credit."""

UNSAID_SHARE = 4
"""While more has arrived, acknowledgements are gathered up to this part (1/4) of a window."""
MOST_EARLY = 1 << 15
"""Most slices of rows that one message tells of."""
MAX_FAULTS = 3
"""Times that one batch may arrive unreadable before its sender is refused."""


@dataclass(kw_only=True, slots=True)
class _Peer:
    connection: ConnectionId
    life: Life
    expected: int
    gone: frozenset[int]
    number: int = 0
    end: int | None = None
    begun: Data | None = None
    """The newest part of the batch `expected`, while others are missing."""
    held: dict[int, Credit] = field(default_factory=dict)
    used: Credit = NONE
    windows: list[tuple[int, Credit]] = field(default_factory=lambda: [(0, NONE)])
    resend_from: int | None = None
    faults: int = 0
    unsaid: list[int] = field(default_factory=list)
    unsaid_cost: Credit = NONE
    early: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """By batch that is held: first row and number of the rows that the consumer is done with."""
    unsaid_early: deque[tuple[int, int, int]] = field(default_factory=deque)
    """Sequence number, first row, number of rows."""

    def skip(self) -> None:
        while self.expected in self.gone:
            self.expected += 1

    @property
    def ended(self) -> bool:
        return self.end is not None and self.expected >= self.end

    @property
    def announced(self) -> Credit:
        """The last window that it was sent."""
        return self.windows[-1][1]

    @property
    def promised(self) -> Credit:
        """The most of all windows that it may be going by: it has not confirmed a later one."""
        return reduce(Credit.most, (window for _, window in self.windows))

    def goes_on(self, message: Data) -> bool:
        """Whether it is the next part of the batch that has begun, or the first of one where none
        has.
        """
        begun = self.begun
        if begun is None:
            return message.offset == 0
        return message == replace(begun, offset=begun.bytes - begun.left, left=message.left)

    def let_go(self, sequence: int) -> Credit:
        """Forget a batch that is held; its cost."""
        freed = self.held.pop(sequence)
        self.early.pop(sequence, None)
        self.used -= freed
        return freed

    def say_early(self) -> tuple[int, ...]:
        """Rows of batches that are still held, for one message."""
        early: list[int] = []
        while self.unsaid_early and len(early) < 3 * MOST_EARLY:
            sequence, first, count = self.unsaid_early.popleft()
            if sequence in self.held:
                early += (sequence, first, count)
        return tuple(early)

    def announce(self, number: int, window: Credit) -> None:
        """Tell it another window; an earlier one that is no larger makes no difference any more."""
        self.windows = [
            *(numbered for numbered in self.windows if not numbered[1].within(window)),
            (number, window),
        ]


class Inbox:
    """The state of one receiver towards all its senders."""

    def __init__(
        self, *, edge: str, life: Life, capacity: Credit, senders: int = 1, max_message_bytes: int
    ) -> None:
        self._edge, self._life, self.capacity = edge, life, capacity
        self._senders, self._max_message_bytes = senders, max_message_bytes
        self._peers: dict[str, _Peer] = {}
        self._over: set[str] = set()
        self._earlier: dict[str, dict[tuple[Life, int], Credit]] = {}
        self._settled = True
        self._first = self._said = life.first_number
        """Number of the window that was announced last, to whomever."""

    @property
    def depth(self) -> Credit:
        """Received and not acknowledged."""
        earlier = sum(
            (credit for of_life in self._earlier.values() for credit in of_life.values()), NONE
        )
        return sum((peer.used for peer in self._peers.values()), earlier)

    @property
    def early_rows(self) -> int:
        """Of these, rows that the consumer is done with."""
        return sum(
            count
            for peer in self._peers.values()
            for rows in peer.early.values()
            for _, count in rows
        )

    @property
    def ended(self) -> bool:
        """Whether as many senders as were expected came, and all of them ended."""
        come = len(self._peers.keys() | self._over)
        return come >= self._senders and all(peer.ended for peer in self._peers.values())

    def awaited(self, senders: int) -> int:
        """How many may still send when so many are expected: not come yet, or come and not
        ended.
        """
        return max(senders, len(self._peers)) - sum(peer.ended for peer in self._peers.values())

    def over(self, sender: str) -> None:
        """A sender that ended its stream towards an earlier life of this receiver need not come."""
        self._over.add(sender)

    def expect(self, senders: int) -> Replies:
        """So many senders in all, ended and forgotten ones included."""
        self._senders = senders
        return self._announce()

    def grow(self, rows: int) -> Replies:
        """Hold so many rows, where that is more."""
        self.capacity = self.capacity.most(Credit(rows=rows, bytes=1))
        return self._announce()

    def hello(self, connection: ConnectionId, message: Hello) -> Replies:
        """A sender reports its state: it gets its window, and what has arrived of its stream."""
        peer = self._peers.get(message.sender)
        if peer is not None and (reason := self._outdated(peer, message)):
            return [(connection, Refused(reason))]
        if peer is not None and message.life == peer.life and message.number < peer.number:
            return []  # read late from a connection that broke: what came after it counts
        if peer is None or message.life > peer.life:
            if peer is not None and peer.held:
                earlier = self._earlier.setdefault(message.sender, {})
                earlier |= {(peer.life, number): credit for number, credit in peer.held.items()}
            peer = _Peer(
                connection=connection,
                life=message.life,
                expected=message.base,
                gone=frozenset(message.gone),
            )
            self._peers[message.sender] = peer
        self._go_by(peer, connection, message)
        peer.connection, peer.number, peer.begun = connection, message.number, None
        peer.end = message.next if message.ended else None
        announcements = self._announce(but=message.sender)
        return [*announcements, (connection, self._welcome(peer))]

    def judge(self, connection: ConnectionId, message: Data) -> tuple[Verdict, Replies]:
        """What to do with a batch whose header arrived."""
        peer = self._peers.get(message.sender)
        if peer is None or peer.connection != connection or peer.life != message.life:
            return "stray", []
        if message.sequence < peer.expected:
            waits = message.sequence in peer.held or message.sequence in peer.unsaid
            return "duplicate", (
                [] if waits else [(connection, self._ack(peer, (message.sequence,)))]
            )
        if message.sequence > peer.expected or not peer.goes_on(message):
            if peer.resend_from == peer.expected:
                return "ahead", []
            return "ahead", self._ask_again(peer)
        if not may_send(cost(message.rows, message.bytes), peer.used, peer.promised):
            reason = (
                f"'{message.sender}' sent without credit on edge '{self._edge}'; got {message.rows}"
                f" rows and {message.bytes} bytes; run the same version of this project on both"
                " sides"
            )
            return "overrun", [(connection, Refused(reason))]
        return "part" if message.left else "new", []

    def begin(self, message: Data) -> None:
        """Count a part in, after `judge` called it a part and it proved sound."""
        peer = self._peers[message.sender]
        peer.begun, peer.resend_from = message, None

    def take(self, message: Data) -> None:
        """Count a batch in, after `judge` called it new and it proved sound."""
        peer = self._peers[message.sender]
        peer.held[message.sequence] = cost(message.rows, message.bytes)
        peer.used += peer.held[message.sequence]
        peer.expected += 1
        peer.skip()
        peer.faults, peer.resend_from, peer.begun = 0, None, None

    def fault(self, message: Data, reason: str) -> Replies:
        """A new batch was not sound: ask for it again, and give up on its sender when that does not
        help.
        """
        peer = self._peers[message.sender]
        peer.faults, peer.begun = peer.faults + 1, None
        if peer.faults < MAX_FAULTS:
            return self._ask_again(peer)
        return [(peer.connection, Refused(reason))]

    def acknowledge(self, sender: str, life: Life, sequence: int) -> Replies:
        """The consumer is done with a batch: its credit goes back, at once or with the next
        `flush`.

        A second time, or unknown: nothing.
        """
        peer = self._peers.get(sender)
        if peer is not None and peer.life == life and sequence in peer.held:
            freed = peer.let_go(sequence)
            peer.unsaid.append(sequence)
            peer.unsaid_cost += freed
            if not self._settled or peer.ended:
                return [*self._announce(), *self.flush()]
            much = peer.unsaid_cost.rows * UNSAID_SHARE >= peer.announced.rows
            much = much or peer.unsaid_cost.bytes * UNSAID_SHARE >= peer.announced.bytes
            return [(peer.connection, self._ack(peer))] if much else []
        if self._earlier.get(sender, {}).pop((life, sequence), None) is None:
            return []
        if not self._earlier[sender]:
            del self._earlier[sender]
        return self._announce()

    def acknowledge_rows(
        self, sender: str, life: Life, sequence: int, first: int, count: int
    ) -> None:
        """The consumer is done with rows of a batch that it holds: the next `flush` tells its
        sender.
        """
        peer = self._peers.get(sender)
        if peer is not None and peer.life == life and sequence in peer.held:
            peer.early.setdefault(sequence, []).append((first, count))
            peer.unsaid_early.append((sequence, first, count))

    def flush(self) -> Replies:
        """Acknowledgements that were held back, to be sent when nothing more has arrived."""
        return [
            (peer.connection, self._ack(peer))
            for peer in self._peers.values()
            if peer.unsaid or peer.unsaid_early
        ]

    def forget(self, sender: str) -> Replies:
        """A sender that will not come back: it counts as ended, and its share goes to the
        others.
        """
        peer = self._peers.get(sender)
        if peer is None:
            return []
        peer.end = peer.expected
        return self._announce()

    def _outdated(self, peer: _Peer, message: Hello) -> str | None:
        if message.life < peer.life:
            return replaced(message.sender, message.life, peer.life)
        if message.life == peer.life and message.next < peer.expected:
            return (
                f"'{message.sender}' came again on edge '{self._edge}' as {message.life}; its"
                f" next batch is {message.next}, {peer.expected} had arrived; give it a larger life"
                " after each restart"
            )
        return None

    def _go_by(self, peer: _Peer, connection: ConnectionId, message: Hello) -> None:
        """What a sender says of itself: the window it uses, and what it will not send (again).

        It uses none that it was not told: by a claim beyond that, a liar would take the room of all
        others.

        What it says will not come, although it lies here, it took back: nobody waits for its
        acknowledgement, and until the consumer is done with it, it takes room like a batch of an
        earlier life.
        """
        is_known = self._first < message.window_number <= self._said
        unheard = [
            numbered
            for numbered in peer.windows[:-1]
            if not is_known or numbered[0] > message.window_number
        ]
        if connection != peer.connection or (peer.end is not None and not message.ended):
            # whatever was said over another connection, or before it began again, it does not go by
            unheard = []
        stated = Credit(rows=message.window_rows, bytes=message.window_bytes).least(peer.promised)
        peer.windows = [(message.window_number, stated), *unheard, peer.windows[-1]]
        peer.gone, peer.expected = frozenset(message.gone), max(peer.expected, message.base)
        peer.skip()
        for number in [
            number for number in peer.held if number < message.base or number in peer.gone
        ]:
            freed = peer.let_go(number)
            self._earlier.setdefault(message.sender, {})[peer.life, number] = freed

    def _windows(self) -> dict[str, Credit]:
        live = {
            name: peer
            for name, peer in self._peers.items()
            if not peer.ended or peer.held or name in self._earlier
        }
        holdings = {
            name: Holding(
                promised=peer.promised,
                held=peer.used,
                earlier=sum(self._earlier.get(name, {}).values(), NONE),
            )
            for name, peer in live.items()
        }
        return allot(self.capacity, self._senders - (len(self._peers) - len(live)), holdings)

    def _announce(self, but: str | None = None) -> Replies:
        """Compute every window again, and tell the senders whose window changed."""
        replies: Replies = []
        windows = self._windows()
        self._settled = not self._earlier and len(set(windows.values())) <= 1
        for name, peer in self._peers.items():
            window = windows.get(name, NONE)
            self._settled = self._settled and (name not in windows or peer.promised.within(window))
            if window == peer.announced:
                continue
            self._said += 1
            peer.announce(self._said, window)
            if name in windows and name != but:
                replies.append((peer.connection, self._ack(peer)))
        return replies

    def _ask_again(self, peer: _Peer) -> Replies:
        peer.resend_from, peer.begun = peer.expected, None
        return [(peer.connection, self._welcome(peer))]

    def _ack(self, peer: _Peer, again: tuple[int, ...] = ()) -> Ack:
        sequences = (*peer.unsaid, *again)
        peer.unsaid, peer.unsaid_cost = [], NONE
        return Ack(
            edge=self._edge,
            life=self._life,
            sequences=sequences,
            window_rows=peer.announced.rows,
            window_bytes=peer.announced.bytes,
            window_number=peer.windows[-1][0],
            early=peer.say_early(),
        )

    def _welcome(self, peer: _Peer) -> Welcome:
        """All that it has; of early rows what no longer fits follows with acknowledgements."""
        peer.unsaid, peer.unsaid_cost = [], NONE
        peer.unsaid_early = deque(
            (number, *rows) for number, early in peer.early.items() for rows in early
        )
        return Welcome(
            edge=self._edge,
            life=self._life,
            window_rows=peer.announced.rows,
            window_bytes=peer.announced.bytes,
            window_number=peer.windows[-1][0],
            capacity_rows=self.capacity.rows,
            capacity_bytes=self.capacity.bytes,
            max_message_bytes=self._max_message_bytes,
            expected=peer.expected,
            held=tuple(peer.held),
            ended=peer.end is not None,
            answers=peer.number,
            early=peer.say_early(),
        )
