"""What ranks put where they meet, and ask for: values by key, and who waits for which; without
sockets."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from dataflow.worker.rank_messages import Delete, Get, Set, StoredValues


@dataclass
class RankValues:
    """Of one worker's ranks; each message gives who is to be told what.

    >>> values = RankValues()
    >>> values.take("a", Get(1, ["x"], waits=True))
    []
    >>> values.take("b", Set(1, "x", b"5"))
    [('b', StoredValues(ticket=1, values={})), ('a', StoredValues(ticket=1, values={'x': b'5'}))]
    >>> values.take("b", Set(2, "x", b"", adds=2))
    [('b', StoredValues(ticket=2, values={'x': b'7'}))]
    """

    _values: dict[str, bytes] = field(default_factory=dict)
    _waiting: list[tuple[Hashable, Get]] = field(default_factory=list)

    def take(
        self, who: Hashable, message: Set | Get | Delete
    ) -> list[tuple[Hashable, StoredValues]]:
        """A rank puts, asks for or deletes values."""
        match message:
            case Set(adds=None):
                self._values[message.key] = message.value
                return [(who, StoredValues(message.ticket, {})), *self._served()]
            case Set():
                total = int(self._values.get(message.key, b"0")) + (message.adds or 0)
                self._values[message.key] = found = str(total).encode()
                return [(who, StoredValues(message.ticket, {message.key: found})), *self._served()]
            case Delete():
                gone = self._values.pop(message.key, None)
                return [
                    (who, StoredValues(message.ticket, {} if gone is None else {message.key: gone}))
                ]
            case Get():
                self._waiting.append((who, message))
                return self._served()

    def _served(self) -> list[tuple[Hashable, StoredValues]]:
        """Those who need not wait any more."""
        found: list[tuple[Hashable, StoredValues]] = []
        waiting, self._waiting = self._waiting, []
        for who, asked in waiting:
            known = {key: self._values[key] for key in asked.keys if key in self._values}
            if asked.waits and len(known) < len(set(asked.keys)):
                self._waiting.append((who, asked))
            else:
                found.append((who, StoredValues(asked.ticket, known)))
        return found
