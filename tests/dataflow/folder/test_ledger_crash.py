"""The ledger under random histories, against a model; and under SIGKILL, against what was
acknowledged.
"""

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from rigs.ending import at_end
from rigs.examples import examples

from dataflow.folder.ledger import Ledger, LedgerError
from dataflow.folder.ledger.schema import STATES
from dataflow.system.forking import fork

TRAINERS = ("actor", "critic")


class Histories(RuleBasedStateMachine):
    """Random calls on a ledger beside a model of a few dicts; after each call both agree."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.ledger = Ledger.create(self.folder / "l.db", {node: ["prompts"] for node in TRAINERS})
        self.states: list[int] = []
        self.outcomes: dict[str, dict[int, tuple[str, int | None]]] = {
            node: {} for node in TRAINERS
        }
        self.steps = dict.fromkeys(TRAINERS, 0)

    def teardown(self) -> None:
        self.ledger.close()
        shutil.rmtree(self.folder)

    def some(self, data: st.DataObject, most: int = 6) -> list[int]:
        return data.draw(st.lists(st.integers(0, len(self.states) - 1), max_size=most, unique=True))

    @rule(number=st.integers(1, 5), again=st.integers(0, 2))
    def issue(self, number: int, again: int) -> None:
        first = len(self.states)
        known = range(max(0, first - again), first)
        self.ledger.issue(
            "prompts", [(group, f"t{group}") for group in [*known, *range(first, first + number)]]
        )
        self.states += [0] * number

    @precondition(lambda self: self.states)
    @rule(data=st.data(), state=st.integers(1, 3))
    def advance(self, data: st.DataObject, state: int) -> None:
        for group in (groups := self.some(data)):
            self.states[group] = max(self.states[group], state)
        self.ledger.advance("prompts", groups, STATES[state])

    @precondition(lambda self: self.states)
    @rule(data=st.data(), node=st.sampled_from(TRAINERS))
    def commit(self, data: st.DataObject, node: str) -> None:
        groups = self.some(data)
        cut = data.draw(st.integers(0, len(groups)))
        trained, dropped = groups[:cut], dict.fromkeys(groups[cut:], "stale")
        step = self.steps[node] + 1
        call = {"version": step, "source": "prompts", "trained": trained, "dropped": dropped}
        if self.outcomes[node].keys() & set(groups):
            with pytest.raises(LedgerError, match="twice"):
                self.ledger.commit_step(node, step, **call)
            return
        self.ledger.commit_step(node, step, **call)
        self.steps[node] = step
        self.outcomes[node] |= dict.fromkeys(trained, ("trained", step)) | dict.fromkeys(
            dropped, ("dropped", step)
        )
        for group in groups:
            self.states[group] = 3

    @precondition(lambda self: self.states)
    @rule(data=st.data(), node=st.sampled_from(TRAINERS))
    def drop(self, data: st.DataObject, node: str) -> None:
        groups = [group for group in self.some(data, 2) if group not in self.outcomes[node]]
        self.ledger.drop(node, "prompts", dict.fromkeys(groups, "refused"))
        self.outcomes[node] |= dict.fromkeys(groups, ("dropped", None))
        for group in groups:
            self.states[group] = 3

    @rule(data=st.data(), node=st.sampled_from(TRAINERS))
    def go_back(self, data: st.DataObject, node: str) -> None:
        step = data.draw(st.integers(0, self.steps[node]))
        plan = self.ledger.roll_back_to(step, node)
        kept = {
            g: was for g, was in self.outcomes[node].items() if was[1] is None or was[1] <= step
        }
        undone = self.outcomes[node].keys() - kept.keys()
        self.outcomes[node], last, self.steps[node] = kept, self.steps[node], step
        assert [planned.step for planned in plan[: last - step]] == list(range(step + 1, last + 1))
        repeated = {
            group
            for planned in plan[: last - step]
            for group in (*planned.trained, *planned.dropped)
        }
        assert repeated == undone

    @rule()
    def reopen(self) -> None:
        self.ledger.close()
        self.ledger = Ledger.open(self.folder / "l.db")

    @invariant()
    def the_identity_holds_and_agrees_with_the_model(self) -> None:
        for node in TRAINERS:
            counts, known = self.ledger.counts(node), self.outcomes[node]
            assert counts.missing == 0
            assert counts.issued == len(self.states)
            assert counts.trained == sum(was == "trained" for was, _ in known.values())
            assert sum(counts.dropped.values()) == sum(
                was == "dropped" for was, _ in known.values()
            )
            waiting = [
                STATES[state] for group, state in enumerate(self.states) if group not in known
            ]
            assert counts.in_flight == {
                state: waiting.count(state) for state in STATES if state in waiting
            }
            assert self.ledger.last_step(node) == self.steps[node]


Histories.TestCase.settings = examples(40, stateful_step_count=25)


test_the_identity_holds_after_every_call_of_any_history = Histories.TestCase


Say = Callable[[int], None]


def generate(path: Path, say: Say) -> None:
    """Issues groups and has them scored until it is killed; says how many were."""
    with Ledger.open(path) as ledger:
        while True:
            first = ledger.next_group_id("prompts")
            if first - 4 * ledger.last_step("trainer") > 64:
                time.sleep(0.001)
                continue
            groups = range(first, first + 8)
            ledger.issue("prompts", [(group, str(group)) for group in groups])
            for state in ("generating", "generated", "scored"):
                ledger.advance("prompts", groups, state)
            say(first + 8)


def train(path: Path, say: Say) -> None:
    """Commits steps of groups that are scored until it is killed; says which."""
    with Ledger.open(path) as ledger:
        step = ledger.last_step("trainer")
        while True:
            ready = [
                group.group_id for group in ledger.in_flight("prompts") if group.state == "scored"
            ][:4]
            if len(ready) < 4:
                time.sleep(0.001)
                continue
            step += 1
            dropped = {ready[3]: "stale"}
            ledger.commit_step(
                "trainer", step, version=step, source="prompts", trained=ready[:3], dropped=dropped
            )
            say(step)


class Child:
    """A fork of this process at work, which is spared the start of an interpreter, and what it
    says.
    """

    def __init__(self, work: Callable[[Say], None]) -> None:
        reading, writing = os.pipe()
        self.pid = fork()
        if self.pid == 0:
            status = 1
            try:
                with os.fdopen(writing, "w") as pipe:
                    work(lambda number: print(number, file=pipe, flush=True))
                status = 0
            finally:
                os._exit(status)
        os.close(writing)
        self.pipe = os.fdopen(reading)
        at_end(self.close)

    def hear(self) -> int:
        return int(self.pipe.readline())

    def kill(self) -> int:
        """Kill at once and return the last number that was acknowledged."""
        os.kill(self.pid, signal.SIGKILL)
        written = self.pipe.read()
        self.ended()
        whole = written[: written.rfind("\n") + 1].split()
        return int(whole[-1]) if whole else 0

    def ended(self) -> int:
        """How it ended, once it has."""
        pid, self.pid = self.pid, 0
        return os.waitpid(pid, 0)[1]

    def close(self) -> None:
        self.pipe.close()
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            self.ended()


def test_kills_at_any_moment_leave_the_laws_and_all_that_was_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    Ledger.create(path, {"trainer": ["prompts"]}).close()
    chance = random.Random(0)
    issued = steps = 0
    for _ in range(4):
        generator, trainer = Child(partial(generate, path)), Child(partial(train, path))
        issued = max(issued, generator.hear())
        for _ in range(chance.randrange(1, 20)):
            steps = max(steps, trainer.hear())
        acknowledged = {each: each.kill() for each in chance.sample([generator, trainer], 2)}
        issued, steps = max(issued, acknowledged[generator]), max(steps, acknowledged[trainer])
        with Ledger.open(path) as ledger:
            counts = ledger.counts("trainer")
            last = ledger.last_step("trainer")
        assert counts.missing == 0
        assert issued <= counts.issued <= issued + 8
        assert steps <= last <= steps + 1
        assert (counts.trained, counts.dropped.get("stale", 0)) == (3 * last, last)
        steps = last


def calls(ledger: Ledger) -> Iterator[object]:
    yield ledger.issue("prompts", [(4, "4"), (5, "5")])
    yield ledger.advance("prompts", range(6), "generated")
    yield ledger.commit_step(
        "trainer", 1, version=1, source="prompts", trained=[0, 1], dropped={2: "stale"}
    )
    yield ledger.drop("trainer", "prompts", {5: "refused"})
    yield ledger.commit_step("trainer", 2, version=2, source="prompts", trained=[3, 4])
    yield ledger.roll_back_to(1, "trainer")
    yield ledger.issue("prompts", [(6, "6")])


def state(ledger: Ledger) -> tuple[object, ...]:
    return ledger.counts("trainer"), ledger.last_step("trainer"), str(ledger.replay_plan("trainer"))


def begun(path: Path) -> Ledger:
    ledger = Ledger.create(path, {"trainer": ["prompts"]})
    ledger.issue("prompts", [(group, str(group)) for group in range(4)])
    return ledger


def crash_at(statement: int, path: Path) -> tuple[bool, tuple[object, ...]]:
    """Whether a process that makes all calls was killed at this statement of SQL, and the state
    that it left.
    """

    def work(say: Say) -> None:
        left = iter(range(statement))
        ledger = Ledger.open(path)
        ledger._db.set_trace_callback(
            lambda _: next(left, None) is None and os.kill(os.getpid(), signal.SIGKILL)
        )
        for _ in calls(ledger):
            pass

    begun(path).close()
    killed = os.WIFSIGNALED(Child(work).ended())
    with Ledger.open(path) as ledger:
        return killed, state(ledger)


def test_a_crash_at_any_statement_leaves_a_call_done_or_not_begun(tmp_path: Path) -> None:
    with begun(tmp_path / "ledger.db") as ledger:
        whole = [state(ledger), *(state(ledger) for _ in calls(ledger))]
    statement, reached, killed = 0, 0, True
    while killed:
        killed, found = crash_at(statement, tmp_path / f"ledger{statement}.db")
        assert found in whole, f"a crash at statement {statement} left {found}"
        assert whole.index(found) >= reached, (
            f"a crash at statement {statement} lost {whole[reached]}"
        )
        reached = whole.index(found)
        statement += 1
    assert reached == len(whole) - 1
    assert statement > 50


def test_several_processes_write_at_once_and_every_group_is_trained_by_exactly_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ledger.db"
    with Ledger.create(path, {"trainer": ["prompts"], "other": ["prompts"]}) as ledger:
        ledger.issue("prompts", [(group, str(group)) for group in range(400)])

    def write(node: str, say: Say) -> None:
        with Ledger.open(path) as ledger:
            for step in range(1, 101):
                ledger.commit_step(
                    node,
                    step,
                    version=step,
                    source="prompts",
                    trained=range(4 * step - 4, 4 * step),
                )

    nodes = ("trainer", "other")
    writers = [Child(partial(write, node)) for node in nodes]
    assert [writer.ended() for writer in writers] == [0, 0]
    with Ledger.open(path, readonly=True) as ledger:
        assert [ledger.verdict(node) for node in nodes] == [
            "clean: 400 groups issued = 400 trained + 0 dropped + 0 in flight"
        ] * 2
