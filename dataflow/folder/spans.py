"""Spans of time in arrays of bounded size: where they become too many, neighbours are joined over
longer pauses.
"""

from array import array
from collections.abc import Iterator

FIRST_JOIN_S = 0.0005


class Spans:
    """When each node was at work: the more there was, the coarser, and always from the first span
    to the last.
    """

    def __init__(self, most: int) -> None:
        """most: spans that are held."""
        self._most = most
        self._join_s = FIRST_JOIN_S
        """Spans of a node with a shorter pause between them become one."""
        self._names: dict[str, int] = {}
        self._last: dict[int, int] = {}
        """Index of a node's newest span."""
        self._nodes, self._begins, self._ends = array("H"), array("d"), array("d")

    def __len__(self) -> int:
        return len(self._begins)

    def __iter__(self) -> Iterator[tuple[str, float, float]]:
        names = list(self._names)
        return ((names[node], begin, end) for node, begin, end in zip(*self._columns, strict=True))

    def add(self, node: str, begin_s: float, end_s: float) -> None:
        """Add a span that begins after all others of its node have ended."""
        number = self._names.setdefault(node, len(self._names))
        last = self._last.get(number)
        self._put(
            number, begin_s, end_s, last is not None and begin_s - self._ends[last] < self._join_s
        )
        if len(self) > self._most:
            self._halve()

    def _halve(self) -> None:
        """Join the spans with the shorter half of the pauses, and such ones from now on; of equal
        ones every other.
        """
        last: dict[int, tuple[int, float]] = {}
        pauses = []
        for place, (node, begin_s, end_s) in enumerate(zip(*self._columns, strict=True)):
            ordinal, before_s = last.get(node, (0, begin_s))
            if ordinal:
                pauses.append((begin_s - before_s, ordinal % 2 == 0, place))
            last[node] = ordinal + 1, end_s
        joined = sorted(pauses)[: (len(pauses) + 1) // 2]
        self._join_s = max([self._join_s, *(pause_s for pause_s, _, _ in joined)])
        places, old = {place for _, _, place in joined}, self._columns
        self._last, self._nodes, self._begins, self._ends = {}, array("H"), array("d"), array("d")
        for place, span in enumerate(zip(*old, strict=True)):
            self._put(*span, place in places)

    @property
    def _columns(self) -> tuple["array[int]", "array[float]", "array[float]"]:
        return self._nodes, self._begins, self._ends

    def _put(self, node: int, begin_s: float, end_s: float, is_joined: bool) -> None:
        if is_joined:
            self._ends[self._last[node]] = end_s
            return
        self._last[node] = len(self)
        self._nodes.append(node)
        self._begins.append(begin_s)
        self._ends.append(end_s)
