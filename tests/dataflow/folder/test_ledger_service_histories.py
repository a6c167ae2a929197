"""A ledger by way of its service under random histories, with messages that get lost, beside one
that is a file.
"""

import shutil
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rigs.examples import examples

from dataflow.errors import Replaced
from dataflow.folder.ledger import BaseLedger, Ledger, LedgerError
from dataflow.folder.ledger.schema import STATES
from dataflow.folder.ledger_service import client as clients
from dataflow.folder.ledger_service.messages import FROM_LEDGER, TO_LEDGER, Answer, ToLedger
from dataflow.folder.ledger_service.service import Deferred, RequestHandler
from transport.life import Life

WORKERS = ("prompts-0", "trainer-0")
SOME = st.lists(st.integers(0, 12), max_size=4)
CHANCE = st.lists(st.integers(0, 4), max_size=3)
"""Of one message after the other: as it should be, lost, late, twice, its answer lost."""


class Wires:
    """What is between clients and the handler: loses, repeats and keeps back what it carries, as
    `chance` has it.
    """

    def __init__(self, handler: Callable[[], RequestHandler]) -> None:
        self.handler, self.now = handler, 0.0
        self.chance: deque[int] = deque()
        self.late: deque[bytes] = deque()
        """Sent long ago, by a connection that is no more; it arrives when nobody thinks of it."""

    def carry(self, message: ToLedger) -> list[Answer]:
        """What comes back at once."""
        data = TO_LEDGER.encode(message)
        what = self.chance.popleft() if self.chance else 0
        if what == 1:
            return []
        if what == 2:
            self.late.append(data)
            return []
        answers = [self.deliver(data) for _ in range(2 if what == 3 else 1)]
        return [] if what == 4 else answers

    def deliver(self, data: bytes) -> Answer:
        """The handler's answer, as it travels."""
        answer = self.handler().hear(TO_LEDGER.decode(data))
        if isinstance(answer, Deferred):
            answer = answer.answer()
        return FROM_LEDGER.decode(FROM_LEDGER.encode(answer))


class FakeLine:
    """In the place of `ServiceSocket`: time passes while somebody listens."""

    address = "fake"

    def __init__(self, wires: Wires) -> None:
        self._wires = wires
        self._in: deque[Answer] = deque()

    def say(self, message: ToLedger) -> None:
        self._in.extend(self._wires.carry(message))

    def heard(self, wait_s: float) -> list[Answer]:
        if not self._in:
            self._wires.now += wait_s
        found = list(self._in)
        self._in.clear()
        return found

    def look(self) -> None:
        self._in.clear()

    def close(self) -> None:
        pass


class Histories(RuleBasedStateMachine):
    """Each call is made on the file beside it, too; what both say, and what stands in both, is the
    same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.ledgers: list[Ledger] = []
        self.attempts = dict.fromkeys(WORKERS, 0)
        self.old: list[clients.LedgerClient] = []

    @initialize()
    def begin(self) -> None:
        Ledger.create(self.folder / "served.db", {"trainer": ["prompts"]}).close()
        self.file = Ledger.create(self.folder / "file.db", {"trainer": ["prompts"]})
        self.open()
        self.wires = Wires(lambda: self.handler)
        self.clients = {worker: self.client(worker) for worker in WORKERS}

    def open(self) -> None:
        self.ledgers.append(Ledger.open(self.folder / "served.db"))
        self.handler = RequestHandler(self.ledgers[-1])

    def client(self, worker: str) -> clients.LedgerClient:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(clients, "ServiceSocket", lambda *_: FakeLine(self.wires))
            return clients.LedgerClient(
                self.folder / "served.db",
                "fake",
                worker=worker,
                life=Life(attempt=self.attempts[worker]),
                patience_s=1e6,
                clock=lambda: self.wires.now,
            )

    def teardown(self) -> None:
        for ledger in [*self.ledgers, *([self.file] if self.ledgers else [])]:
            ledger.close()
        shutil.rmtree(self.folder)

    def both(
        self, worker: str, call: Callable[[BaseLedger], Any], chance: list[int] | None = None
    ) -> None:
        """Make a call on each, which say the same. chance: of the messages of this call."""
        found = []
        self.wires.chance = deque(chance or [])
        for ledger in (self.file, self.clients[worker]):
            try:
                found.append(call(ledger))
            except LedgerError as error:
                found.append(str(error).replace("served.db", "file.db"))
        assert found[0] == found[1]

    @rule(number=st.integers(1, 4), skipped=st.sampled_from([0, 0, 0, 2]), chance=CHANCE)
    def issue(self, number: int, skipped: int, chance: list[int]) -> None:
        first = self.file.next_group_id("prompts") + skipped
        prompts = [(group, f"task-{group}") for group in range(first, first + number)]
        self.both("prompts-0", lambda ledger: ledger.issue("prompts", prompts), chance)

    @rule(
        groups=st.lists(st.integers(0, 12), max_size=4),
        state=st.sampled_from(STATES[1:]),
        chance=CHANCE,
    )
    def advance(self, groups: list[int], state: str, chance: list[int]) -> None:
        known = [group for group in groups if group < self.file.next_group_id("prompts")]
        self.both("prompts-0", lambda ledger: ledger.advance("prompts", known, state), chance)

    @rule(
        groups=st.lists(st.integers(0, 12), max_size=4),
        ahead=st.sampled_from([1, 1, 1, 2]),
        cut=st.integers(0, 4),
        chance=CHANCE,
    )
    def commit(self, groups: list[int], ahead: int, cut: int, chance: list[int]) -> None:
        step = self.file.last_step("trainer") + ahead
        given = {
            "version": step,
            "source": "prompts",
            "trained": groups[:cut],
            "metrics": {"loss": 0.5},
        }
        dropped = dict.fromkeys(groups[cut:], "stale")
        self.both(
            "trainer-0",
            lambda ledger: ledger.commit_step("trainer", step, dropped=dropped, **given),
            chance,
        )

    @rule(group=st.integers(0, 12), step=st.sampled_from([None, 1]), chance=CHANCE)
    def drop(self, group: int, step: int | None, chance: list[int]) -> None:
        self.both(
            "trainer-0",
            lambda ledger: ledger.drop("trainer", "prompts", {group: "failed"}, step=step),
            chance,
        )

    @rule(back=st.integers(0, 2), chance=CHANCE)
    def go_back(self, back: int, chance: list[int]) -> None:
        step = max(0, self.file.last_step("trainer") - back)
        self.both("trainer-0", lambda ledger: ledger.roll_back_to(step, "trainer"), chance)

    @rule(worker=st.sampled_from(WORKERS))
    def look(self, worker: str) -> None:
        for client in self.clients.values():
            client.next_group_id("prompts")  # what it posted is made
        self.both(
            worker,
            lambda ledger: (ledger.steps("trainer"), ledger.drops_at("trainer", 1), ledger.facts()),
        )
        self.both(
            worker,
            lambda ledger: (
                ledger.in_flight("prompts"),
                ledger.fates("prompts", 0),
                ledger.sources(),
            ),
        )

    @rule()
    def the_service_falls(self) -> None:
        self.open()

    @rule()
    def what_was_late_arrives(self) -> None:
        while self.wires.late:
            self.wires.deliver(self.wires.late.popleft())

    @rule(worker=st.sampled_from(WORKERS))
    def restart(self, worker: str) -> None:
        self.clients[worker].next_group_id("prompts")  # what it posted is made
        self.old.append(self.clients[worker])
        self.attempts[worker] += 1
        self.clients[worker] = self.client(worker)

    @precondition(lambda self: self.old)
    @rule(data=st.data())
    def an_older_attempt_goes_on(self, data: st.DataObject) -> None:
        old = data.draw(st.sampled_from(self.old))
        with pytest.raises(Replaced):
            old.issue("prompts", [(self.file.next_group_id("prompts"), "other")])

    @precondition(lambda self: self.ledgers)
    @invariant()
    def both_hold_the_same(self) -> None:
        if any(client._unheard for client in self.clients.values()):
            return
        served, file = self.ledgers[-1], self.file
        assert served.counts("trainer") == file.counts("trainer")
        assert served.steps("trainer") == file.steps("trainer")
        assert served.in_flight("prompts") == file.in_flight("prompts")


Histories.TestCase.settings = examples(30, stateful_step_count=25)
test_what_gets_lost_on_the_way_is_made_once_and_in_order = Histories.TestCase
