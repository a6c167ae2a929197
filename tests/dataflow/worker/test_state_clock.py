"""What a node's time goes into, by a virtual clock: each state is what a loop saw, and all of them
add up.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.records import GROUP_ID
from dataflow.runtime import Batch, Runtime
from dataflow.worker.loop import NodeLoop
from dataflow.worker.state_clock import LONG_TURN_S, STATES, StateClock


@dataclass
class Clock:
    """Goes on when somebody spends time."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Edge:
    """Both ends of an edge, without credit, acknowledgement or end."""

    credit: int = 1_000_000
    rows: deque[pa.RecordBatch] = field(default_factory=deque)
    finished = False

    def poll(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def send(self, batch: pa.RecordBatch, acked: Callable[[Iterable[int]], None]) -> bool:
        if len(self.rows) >= self.credit:
            return False
        self.rows.append(batch)
        return True

    def receive(self, timeout_s: float = 0.0) -> Any:
        if not self.rows:
            return None
        return type(
            "Delivery",
            (),
            {
                "batch": self.rows.popleft(),
                "sender": "s",
                "ack_rows": lambda *_: None,
                "ack": lambda *_: None,
            },
        )


class Worked(Runtime):
    """Takes so many seconds for each batch; `allowed` is how many it may begin, as by weights."""

    def __init__(
        self, clock: Clock, seconds: float, allowed: float = float("inf"), helpers: float = 0.0
    ) -> None:
        self.clock, self.seconds, self.allowed, self.helpers = clock, seconds, allowed, helpers
        self.inside: deque[Batch] = deque()

    def room(self) -> int:
        return 2 - len(self.inside)

    def push(self, batch: Batch) -> None:
        self.inside.append(batch)

    def work(self) -> list[Batch] | None:
        if not self.inside or self.starved():
            return None
        self.clock.now += self.seconds
        self.allowed -= 1
        return [self.inside.popleft()]

    def pending(self) -> int:
        return len(self.inside)

    def starved(self) -> bool:
        return bool(self.inside) and self.allowed < 1

    def beside(self) -> float:
        return self.helpers


class Issued(Worked):
    """A source: gives a group each time."""

    given = 0

    def work(self) -> list[Batch] | None:
        self.clock.now += self.seconds
        self.given += 1
        return [Batch("s", pa.RecordBatch.from_pydict({GROUP_ID: [self.given]}))]


class Line:
    """Operators in a row in one worker, or each in its own: then they work beside each other, by
    one clock each.
    """

    def __init__(self, clock: Clock, runtimes: Sequence[Runtime], credit: int = 2) -> None:
        edges = [Edge(credit) for _ in runtimes[1:]]
        self.clock = clock
        self.loops = [
            NodeLoop(
                f"n{at}",
                runtime,
                [("s", "before", edges[at - 1])] if at else [],
                {"s": [edges[at]] if at < len(edges) else []},
                clock=clock,
            )
            for at, runtime in enumerate(runtimes)
        ]

    def run(self, until: float, nap_s: float = 0.01) -> None:
        while self.clock.now < until:
            moved = [loop.turn() for loop in self.loops]
            if not any(moved):
                self.clock.now += nap_s

    def shares(self) -> list[dict[str, float]]:
        found = []
        for loop in self.loops:
            seconds, measured = loop.spent().values()
            assert sum(seconds[state] for state in STATES) == pytest.approx(measured)
            found.append({state: seconds[state] / measured for state in STATES})
        return found


def test_one_that_spins_and_one_that_waits_for_it_come_out_as_what_they_are() -> None:
    clock = Clock()
    line = Line(clock, [Issued(clock, 0.03), Worked(clock, 0.01)])
    line.run(120.0)
    first, second = line.shares()
    assert first["busy"] == pytest.approx(0.75, abs=0.02) and second["busy"] == pytest.approx(
        0.25, abs=0.02
    )
    assert (
        second["waiting"] == pytest.approx(0.75, abs=0.02)
        and second["starved"] == second["blocked"] == 0
    )


def test_one_whose_rows_find_no_room_is_blocked_and_not_waiting() -> None:
    clock = Clock()
    line = Line(clock, [Issued(clock, 0.01), Worked(clock, 0.01, allowed=10)])
    line.run(300.0)
    first, second = line.shares()
    assert first["blocked"] > 0.99 and second["starved"] > 0.99
    assert first["waiting"] < 0.01 > second["waiting"] and first["starved"] == 0


def test_one_with_rows_and_no_weights_is_starved_until_they_come_and_one_without_rows_waits() -> (
    None
):
    clock = Clock()
    withheld, idle = Worked(clock, 0.01, allowed=0), Worked(clock, 0.01, allowed=0)
    line = Line(clock, [Issued(clock, 0.0), withheld])
    alone = Line(clock, [idle])
    line.run(110.0)
    withheld.allowed = float("inf")
    line.run(120.0)
    alone.run(120.0)
    assert line.shares()[1]["starved"] == pytest.approx(0.5, abs=0.02) == line.shares()[1]["busy"]
    assert alone.shares()[0]["waiting"] > 0.99


def test_a_pool_counts_as_busy_with_the_share_of_it_that_has_calls() -> None:
    clock = Clock()
    scored = Worked(clock, 0.0, helpers=0.25)
    line = Line(clock, [scored])
    line.run(101.0)
    before = line.loops[0].spent()["seconds"]
    line.run(201.0)
    spent = line.loops[0].spent()["seconds"]
    assert spent["busy"] - before["busy"] == pytest.approx(25.0, rel=0.01)
    assert spent["waiting"] - before["waiting"] == pytest.approx(75.0, rel=0.01)


def test_who_looks_on_from_another_thread_sees_a_long_slice_as_work_while_it_lasts() -> None:
    clock = StateClock(0.0)
    clock.begin(10.0)
    assert clock.read(10.0 + LONG_TURN_S / 2)["busy"] == 0, "it may yet come to nothing"
    assert clock.read(15.0) == {
        "busy": 5.0,
        "blocked": 0.0,
        "waiting": 10.0,
        "starved": 0.0,
        "beside": 0.0,
    }
    clock.end(16.0, "starved", is_work=True)
    assert clock.read(17.0) == {
        "busy": 6.0,
        "blocked": 0.0,
        "waiting": 10.0,
        "starved": 1.0,
        "beside": 0.0,
    }


def test_a_look_that_finds_nothing_is_no_work() -> None:
    clock = StateClock(0.0)
    for at in range(100):
        clock.begin(float(at))
        clock.end(at + 0.01, "waiting", is_work=False)
    assert clock.read(100.0) == {
        "busy": 0.0,
        "blocked": 0.0,
        "waiting": 100.0,
        "starved": 0.0,
        "beside": 0.0,
    }


TURNS = st.lists(
    st.tuples(
        st.floats(0, 0.2),
        st.floats(0, 0.2),
        st.sampled_from(STATES[1:]),
        st.booleans(),
        st.sampled_from([0.0, 0.5, 1.0]),
    )
)


@given(TURNS, st.floats(0, 5))
def test_the_states_add_up_to_the_time_whatever_happens(turns: list[Any], last: float) -> None:
    now, clock, before = 7.0, StateClock(7.0), dict.fromkeys(STATES, 0.0)
    for rest, turn, state, is_work, beside in turns:
        clock.begin(now := now + rest)
        clock.end(now := now + turn, state, is_work=is_work, beside=beside)
        seconds = clock.read(now)
        assert all(seconds[each] >= before[each] - 1e-9 for each in STATES), (
            "what was counted stays"
        )
        before = seconds
    seconds = clock.read(now + last)
    assert sum(seconds[state] for state in STATES) == pytest.approx(now + last - 7.0)
    assert 0 <= seconds["beside"] <= seconds["busy"] + 1e-9
