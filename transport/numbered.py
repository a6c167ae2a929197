"""What two processes say to each other arrives once and in order, whatever connections they lose:
it has numbers.
"""

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from transport.errors import MessageError

Frames: TypeAlias = Sequence[bytes]
"""Of one message: its numbers, and what is said."""
AGAIN_S = 2.0
"""A message that the other has not heard, though it is heard itself, is sent again after so long;
then after twice as much, as it may have too much to do."""
MOST_AGAIN_S = 16.0
ASK_S = 0.5
"""Between two answers of one that misses something, and has nothing to say by itself."""
_NUMBERS = struct.Struct("!QQQQ")


@dataclass
class _Kept:
    number: int
    message: bytes
    sent_at: float


class Numbered:
    """One end of a connection; reads no clock and has no socket.

    Each message tells which messages of the other end were heard. So whoever hears something knows
    what is missing, and sends that again; where nothing is heard, nothing is sent again. A session
    is a row of numbers, from 1; who speaks begins a new one, with a higher number, to be understood
    by another listener, or to forget what was not heard.
    """

    def __init__(self, session: int = 1) -> None:
        """session: of who listens where others did before, `Life.first_number`, as no clock tells
        the later one.
        """
        self._session, self._said, self._heard_of_ours = session, 0, 0
        self._its_session = self._its_heard = 0
        self._kept: deque[_Kept] = deque()
        self._again_s, self._is_behind = AGAIN_S, False
        self._misses, self._asked = False, float("-inf")

    def frames(self, message: bytes, now: float, *, is_kept: bool) -> Frames:
        """What is to be sent. is_kept: until it is heard; others may get lost."""
        if not is_kept:
            return [self._numbers(0), message]
        self._said += 1
        self._kept.append(_Kept(self._said, message, now))
        return [self._numbers(self._said), message]

    def take(self, frames: Frames, now: float) -> bytes | None:
        """What the other end says, where it is its turn; None: it was heard before, or one before
        it is missing. Errors: MessageError.
        """
        if len(frames) != 2 or len(frames[0]) != _NUMBERS.size:
            sizes = [len(frame) for frame in frames[:4]]
            raise MessageError(
                f"a message has its numbers and what is said; found frames of {sizes} bytes; send"
                " both"
            )
        session, number, session_heard, count = _NUMBERS.unpack(frames[0])
        if session < self._its_session:
            return None
        if session > self._its_session:
            self._its_session, self._its_heard = session, 0
        self._learn(session_heard, count, now)
        if number == 0:
            return frames[1] or None
        if number != self._its_heard + 1:
            self._misses = number > self._its_heard
            return None
        self._its_heard = number
        return frames[1]

    def missing(self, now: float) -> list[Frames]:
        """What is to be sent now: again what the other end has not heard, and that this one misses
        something.
        """
        asks: list[Frames] = []
        if self._misses and now - self._asked >= ASK_S:
            self._misses, self._asked = False, now
            asks = [[self._numbers(0), b""]]
        if not self._is_behind:
            return asks
        self._is_behind = False
        self._again_s = min(2 * self._again_s, MOST_AGAIN_S)
        for frame in self._kept:
            frame.sent_at = now
        return asks + [[self._numbers(frame.number), frame.message] for frame in self._kept]

    def begin_anew(self, *, with_another: bool = False) -> None:
        """What was not heard is not sent any more. with_another: who is there now has said nothing
        yet.
        """
        self._session, self._said, self._heard_of_ours = self._session + 1, 0, 0
        self._kept.clear()
        self._again_s, self._is_behind = AGAIN_S, False
        if with_another:
            self._its_session = self._its_heard = 0

    def _learn(self, session: int, heard: int, now: float) -> None:
        """What the other end has heard."""
        if session > self._session or (session == self._session and heard > self._said):
            # Another spoke before this end, and is told from it by a higher session alone.
            self._session = session
            self.begin_anew()
            return
        if session != self._session:
            heard = 0
        elif heard < self._heard_of_ours:
            # another one is there, which listens where the one before it did
            self.begin_anew()
            return
        if heard > self._heard_of_ours:
            self._heard_of_ours, self._again_s = heard, AGAIN_S
        while self._kept and self._kept[0].number <= heard:
            self._kept.popleft()
        self._is_behind = bool(self._kept) and now - self._kept[0].sent_at >= self._again_s

    def _numbers(self, number: int) -> bytes:
        return _NUMBERS.pack(self._session, number, self._its_session, self._its_heard)
