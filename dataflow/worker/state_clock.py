"""What a node's time goes into: a clock that is always in one of four states, and counts each of
them for itself.
"""

from typing import Literal, NamedTuple, TypeAlias, get_args

State: TypeAlias = Literal["busy", "blocked", "waiting", "starved"]
"""busy: at work. blocked: what it has made finds no room further on. waiting: for rows, or for its
turn at a worker or at devices that others share. starved: it has rows, and may begin none of them
before newer weights have come."""
STATES: tuple[str, ...] = get_args(State)
BESIDE = "beside"
"""The part of busy in which an operator's own processes work, while its loop does not."""
LONG_TURN_S = 0.05
"""A longer turn of a node's loop counts as work, whatever its result, and already while it
lasts."""


class _Mark(NamedTuple):
    """The state at the last transition; replaced as a whole, so that another thread may read it at
    any time.
    """

    since: float
    state: State
    beside: float
    """Share of the operator's own processes that are at work while its loop is not."""
    turn: float | None
    """When the turn under way began."""
    sums: dict[str, float]
    """Never changed: each mark that counts on has its own."""


class StateClock:
    """Seconds of a node by state, read in any thread.

    They add up to the time since it was made: a state lasts until the next one, and none is what
    the others leave.

    >>> clock = StateClock(0.0)
    >>> clock.begin(2.0)
    >>> clock.end(3.0, "blocked", is_work=True)
    >>> clock.read(7.0)
    {'busy': 1.0, 'blocked': 4.0, 'waiting': 2.0, 'starved': 0.0, 'beside': 0.0}
    """

    def __init__(self, now: float) -> None:
        self._mark = _Mark(now, "waiting", 0.0, None, dict.fromkeys((*STATES, BESIDE), 0.0))

    @property
    def state(self) -> State:
        """The state between two turns."""
        return self._mark.state

    def begin(self, now: float) -> None:
        """A turn of the node's loop begins."""
        since, state, beside, _, sums = self._mark
        self._mark = _Mark(since, state, beside, now, sums)

    def end(self, now: float, state: State, *, is_work: bool, beside: float = 0.0) -> None:
        """A turn ends. is_work: it did something; else it was part of the state before it. state:
        that until the next turn. beside: the share of the operator's processes that are at work
        until then; they are busy, not the rest.
        """
        mark = self._mark
        if (
            not is_work
            and state == mark.state
            and beside == mark.beside
            and not _is_long(mark, now)
        ):
            self._mark = _Mark(mark.since, state, beside, None, mark.sums)
        else:
            self._mark = _Mark(now, state, beside, None, _counted(mark, now, is_work=is_work))

    def read(self, now: float) -> dict[str, float]:
        """Seconds by state, and of those that are busy the part beside the loop."""
        mark = self._mark
        return _counted(mark, max(now, mark.since), is_work=False)


def _is_long(mark: _Mark, now: float) -> bool:
    return mark.turn is not None and now - mark.turn > LONG_TURN_S


def _counted(mark: _Mark, now: float, *, is_work: bool) -> dict[str, float]:
    """The sums with what has passed since the mark."""
    sums = mark.sums.copy()
    rested = now - mark.since
    if mark.turn is not None and (is_work or _is_long(mark, now)):
        sums["busy"] += now - mark.turn
        rested = mark.turn - mark.since
    sums[mark.state] += rested * (1.0 - mark.beside)
    sums["busy"] += rested * mark.beside
    sums[BESIDE] += rested * mark.beside
    return sums
