"""Evaluation, replicas that come and go, runs that are taken up again, schedulers that are
replaced: simulated, with all laws.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from dataflow.folder.finished import Finished
from dataflow.folder.ledger import Ledger
from dataflow.folder.snapshot import SnapshotFile
from dataflow.rules import Admission
from dataflow.scheduler import recovery, scaling
from dataflow.scheduler.agents import Agents, HostMessages
from dataflow.scheduler.events import HostJoined, KeptProcess, Send
from dataflow.scheduler.state_machine import RunStateMachine
from dataflow.scheduler.table import Membership, ProcessState, Table, WorkerRecord
from dataflow.worker import ports
from dataflow.worker.host import NodeLoops
from dataflow.worker.messages import SenderEnded
from operators.evaluate import EvaluateRuntime
from operators.prompts import PromptRuntime
from transport.data.outbox import Outbox
from transport.life import Life

from .control_server import Room
from .running import having, hold, notice
from .shape import FEATURES, HOSTS, SWAPS
from .world import World

EVALUATION, SCALING, RESUME, SUCCESSOR, FILTER = [(name,) for name in FEATURES]
TOGETHER = [
    EVALUATION,
    SCALING,
    RESUME,
    EVALUATION + SCALING,
    SCALING + RESUME,
    EVALUATION + RESUME,
]
TOGETHER.append(EVALUATION + SCALING + RESUME)
TOGETHER += [FILTER, FILTER + SCALING + RESUME]
TOGETHER += [SUCCESSOR, *(SUCCESSOR + features for features in TOGETHER)]
OVER_HOSTS = (HOSTS,)
TOGETHER += [
    OVER_HOSTS,
    *(OVER_HOSTS + features for features in (EVALUATION, SCALING, RESUME, SCALING + RESUME)),
]
TOGETHER += [
    OVER_HOSTS + SUCCESSOR,
    OVER_HOSTS + SUCCESSOR + SCALING,
    OVER_HOSTS + SUCCESSOR + RESUME,
]

SWAPPED = (SWAPS,)
TOGETHER += [
    SWAPPED,
    SWAPPED + SUCCESSOR,
    SWAPPED + EVALUATION + RESUME,
    SWAPPED + SCALING + SUCCESSOR + RESUME,
]
TOGETHER += [SWAPPED + OVER_HOSTS + SUCCESSOR + RESUME]

Patch = pytest.MonkeyPatch


def test_all_laws_hold_in_20_seeds_over_hosts_that_die_and_are_cut_off() -> None:
    hold(having(HOSTS), range(20))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_laws_hold_in_200_schedules_of_links_and_kills_over_three_hosts() -> None:
    """Links come back at every moment of the restarts that they have caused."""
    three = [seed for seed in range(1000) if World(seed, having=OVER_HOSTS).shape.hosts == 3]
    hold(having(HOSTS), three[:200])


def test_all_laws_hold_in_20_seeds_over_hosts_whose_scheduler_dies_and_is_followed_by_another() -> (
    None
):
    hold(having(HOSTS, *SUCCESSOR), range(20))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("features", TOGETHER, ids="-".join)
def test_all_laws_hold_in_500_seeds_with(features: tuple[str, ...]) -> None:
    hold(having(*features), range(500))


def test_all_laws_hold_in_10_seeds_that_swap_the_scorer_while_schedulers_and_others_die() -> None:
    hold(having(SWAPS, *SUCCESSOR, *RESUME), range(10))


# Evaluation


def what_a_sink_acknowledged_dies_with_it(patch: Patch) -> None:
    patch.setattr(EvaluateRuntime, "_find", lambda *_: None)


def a_source_does_not_hear_of_an_open_round_when_it_is_back(patch: Patch) -> None:
    def commands(self: RunStateMachine, node: str, **how: Any) -> list[Any]:
        return [
            command
            for command in commands_for(self, node, **how)
            if "evaluate" not in command.message
        ]

    commands_for = RunStateMachine.commands_for
    patch.setattr(RunStateMachine, "commands_for", commands)


def a_round_that_begins_anew_gets_other_numbers(patch: Patch) -> None:
    def told(self: PromptRuntime, message: Any) -> None:
        tell(self, message)
        if "again" in message:
            self._again = deque()

    tell = PromptRuntime.tell
    patch.setattr(PromptRuntime, "tell", told)


def a_round_is_closed_before_all_is_there(patch: Patch) -> None:
    patch.setattr(EvaluateRuntime, "_is_complete", lambda *_: True)


def rounds_do_not_wait_for_their_weights(patch: Patch) -> None:
    def start(self: Admission[Any], source: str, *values: Any) -> bool:
        return source == "questions" or may_start(self, source, *values)

    may_start = Admission.may_start
    patch.setattr(Admission, "may_start", start)


def the_run_ends_before_its_last_round(patch: Patch) -> None:
    waiting = RunStateMachine._waiting
    patch.setattr(
        RunStateMachine, "_waiting", lambda self: self.phase != "last_evaluation" and waiting(self)
    )


def a_round_that_was_recorded_is_open_to_a_sink_that_is_back(patch: Patch) -> None:
    patch.setattr(Ledger, "last_round", lambda *_: None)


# Scaling


def nobody_says_what_a_leaver_had_heard_before_it_died(patch: Patch) -> None:
    patch.setattr(ports.Ports, "over", lambda *_: None)


def a_newcomer_waits_for_what_the_dead_were_asked(patch: Patch) -> None:
    def fell(table: Table, record: WorkerRecord) -> Any:
        before = {each.name: dict(each.unconfirmed) for each in table}
        commands = falls(table, record)
        for each in table:
            each.unconfirmed = before[each.name]
        return commands

    falls = scaling.fell
    patch.setattr(scaling, "fell", fell)


def a_newcomer_is_not_sent_to(patch: Patch) -> None:
    patch.setattr(ports.Ports, "add", lambda *_: None)


def a_leaver_is_not_let_go(patch: Patch) -> None:
    patch.setattr(ports.Ports, "retire", lambda *_: None)


def a_leaver_is_stopped_before_those_that_send_to_it_know(patch: Patch) -> None:
    def stop(table: Table) -> Any:
        for each in table:
            if each.membership is Membership.LEAVING:
                each.unconfirmed = {}
        return stops(table)

    stops = scaling._stop
    patch.setattr(scaling, "_stop", stop)


def a_leaver_that_died_is_taken_for_done(patch: Patch) -> None:
    def fell(table: Table, record: WorkerRecord) -> Any:
        drained = record.drained
        commands = falls(table, record)
        record.drained = drained or record.membership is Membership.LEAVING
        return commands

    falls = scaling.fell
    patch.setattr(scaling, "fell", fell)


def joins_begin_while_somebody_is_away(patch: Patch) -> None:
    patch.setattr(scaling, "anybody_away", lambda _: False)


# Resume


def a_run_that_goes_on_does_not_know_its_rounds(patch: Patch) -> None:
    patch.setattr(RunStateMachine, "go_on", lambda *_: None)


def a_source_that_is_ready_late_does_not_hear_what_was_dropped(patch: Patch) -> None:
    begin = RunStateMachine.start
    patch.setattr(
        RunStateMachine,
        "start",
        lambda self: [c for c in begin(self) if "dropped" not in c.message],
    )


def finished_rollouts_are_not_looked_for(patch: Patch) -> None:
    patch.setattr(Finished, "load", lambda *_: None)


def a_run_that_goes_on_counts_its_prompts_from_the_start(patch: Patch) -> None:
    patch.setattr(Ledger, "next_group_id", lambda *_: 0)


def a_run_that_goes_on_issues_nothing_again(patch: Patch) -> None:
    patch.setattr(PromptRuntime, "_in_flight", lambda self: deque())


# Successors


def a_scheduler_speaks_to_workers_that_have_not_found_it(patch: Patch) -> None:
    def meet(record: WorkerRecord, *values: Any) -> None:
        meets(record, *values)
        record.is_reachable = True

    meets = recovery._meet
    patch.setattr(recovery, "_meet", meet)


def what_the_dead_scheduler_may_not_have_said_is_not_said_again(patch: Patch) -> None:
    def silent(table: Table) -> Any:
        repeat(table)
        return []

    repeat = scaling.repeat
    patch.setattr(scaling, "repeat", silent)


def a_successor_does_not_know_what_nodes_were_told(patch: Patch) -> None:
    patch.setattr(RunStateMachine, "take_up", lambda *_: None)


def what_nodes_may_have_missed_is_not_said_to_those_that_go_on(patch: Patch) -> None:
    def commands(self: RunStateMachine, node: str, *, again: bool = True) -> list[Any]:
        return commands_for(self, node) if again else []

    commands_for = RunStateMachine.commands_for
    patch.setattr(RunStateMachine, "commands_for", commands)


def a_successor_counts_attempts_from_the_start(patch: Patch) -> None:
    def take_over(table: Table, *values: Any) -> Any:
        taken.append(table)
        return takes_over(table, *values)

    def restart(table: Table, now: float) -> list[WorkerRecord]:
        due = restarts(table, now)
        for record in due if any(table is each for each in taken) else ():
            record.life = Life(table.scheduler, 1)
        return due

    taken: list[Table] = []
    takes_over, restarts = recovery.take_over, recovery.restart
    patch.setattr(recovery, "take_over", take_over)
    patch.setattr(recovery, "restart", restart)


def decisions_are_written_once_only(patch: Patch) -> None:
    write = SnapshotFile.write
    patch.setattr(SnapshotFile, "write", lambda self: None if self._written else write(self))


def taken_for(patch: Patch, state: ProcessState) -> None:
    def adopted(table: Table, record: WorkerRecord, process: KeptProcess | None, now: float) -> Any:
        record.process = state
        return adopt(table, record, process, now)

    adopt = recovery._adopt
    patch.setattr(recovery, "_adopt", adopted)


def one_that_was_starting_is_taken_for_one_at_work(patch: Patch) -> None:
    taken_for(patch, ProcessState.READY)


def all_are_started_again(patch: Patch) -> None:
    taken_for(patch, ProcessState.STARTING)


def a_leaver_waits_for_ends_that_an_earlier_scheduler_heard_of(patch: Patch) -> None:
    def forgetful(table: Table) -> Any:
        commands = repeat(table)
        for each in table:
            each.may_miss_ends = False
        return [
            each
            for each in commands
            if not (isinstance(each, Send) and isinstance(each.message, SenderEnded))
        ]

    repeat = scaling.repeat
    patch.setattr(scaling, "repeat", forgetful)


# Hosts


def an_older_attempt_may_commit(patch: Patch) -> None:
    patch.setattr(Room, "may_write", lambda *_: None)


def a_host_that_is_back_keeps_what_it_has(patch: Patch) -> None:
    def anew(table: Table, event: HostJoined, now: float) -> Any:
        return joined(table, HostJoined(event.host), now)

    joined = recovery.host_joined
    patch.setattr(recovery, "host_joined", anew)


def silent_hosts_are_not_missed(patch: Patch) -> None:
    patch.setattr(recovery, "watch_hosts", lambda *_, **__: [])


def nobody_hears_where_a_worker_is_that_moved(patch: Patch) -> None:
    patch.setattr(scaling, "_tell", lambda *_: [])


def what_a_lost_host_tells_counts(patch: Patch) -> None:
    patch.setattr(recovery, "is_current", lambda *_: True)


def a_worker_is_spoken_to_where_an_agent_has_last_said_that_it_is(patch: Patch) -> None:
    where: dict[str, str] = {}

    def handed_over(self: Agents, name: str, agent: Any) -> None:
        where.update(dict.fromkeys(agent.handed, name))
        take(self, name, agent)

    def spawn(self: Agents, name: str, settings: Any, heavy: bool, keeps: bool = False) -> None:
        where[name] = settings["host"]
        fork(self, name, settings, heavy, keeps)

    take, fork, say = Agents._handed_over, Agents.spawn, HostMessages.say
    patch.setattr(Agents, "_handed_over", handed_over)
    patch.setattr(Agents, "spawn", spawn)
    patch.setattr(
        HostMessages, "say", lambda self, name, host, message: say(self, name, where[name], message)
    )


def the_next_scheduler_does_not_meet_what_hosts_have(patch: Patch) -> None:
    patch.setattr(recovery, "meet", lambda *_: [])


# Filters


def groups_wait_for_those_that_they_travelled_with(patch: Patch) -> None:
    patch.setattr(Outbox, "_hear_early", lambda *_: None)


# Swaps


def what_was_swapped_in_is_not_put_down(patch: Patch) -> None:
    patch.setattr(NodeLoops, "record_swaps", lambda self: None)


def a_successor_knows_of_no_swap(patch: Patch) -> None:
    take_up = Table.take_up
    patch.setattr(Table, "take_up", lambda self, plain: take_up(self, {**plain, "swaps": {}}))


Case = tuple[Callable[[Patch], None], tuple[str, ...], range, str]

WITHOUT: list[Case] = [
    (what_a_sink_acknowledged_dies_with_it, EVALUATION, range(400), "not over"),
    (a_source_does_not_hear_of_an_open_round_when_it_is_back, EVALUATION, range(400), "not over"),
    (a_round_that_begins_anew_gets_other_numbers, EVALUATION, range(400), "."),
    (a_round_is_closed_before_all_is_there, EVALUATION, range(50), "."),
    (rounds_do_not_wait_for_their_weights, EVALUATION, range(400), "instead of"),
    (a_round_that_was_recorded_is_open_to_a_sink_that_is_back, EVALUATION, range(400), "."),
    (the_run_ends_before_its_last_round, EVALUATION, range(50), "not finished"),
    (nobody_says_what_a_leaver_had_heard_before_it_died, SCALING, range(400), "not over"),
    (a_newcomer_waits_for_what_the_dead_were_asked, SCALING, range(400), "not over"),
    (a_newcomer_is_not_sent_to, SCALING, range(400), "."),
    (a_leaver_is_not_let_go, SCALING, range(50), "not over"),
    (a_leaver_is_stopped_before_those_that_send_to_it_know, SCALING, range(400), "."),
    (a_leaver_that_died_is_taken_for_done, SCALING, range(400), "."),
    (joins_begin_while_somebody_is_away, SCALING, range(400), "not over"),
    (a_run_that_goes_on_does_not_know_its_rounds, EVALUATION + RESUME, range(50), "."),
    (
        a_source_that_is_ready_late_does_not_hear_what_was_dropped,
        RESUME,
        range(1700, 1800),
        "not over",
    ),
    (finished_rollouts_are_not_looked_for, RESUME, range(50), "generated again"),
    (a_run_that_goes_on_counts_its_prompts_from_the_start, RESUME, range(400), "."),
    (a_run_that_goes_on_issues_nothing_again, RESUME, range(50), "not over"),
    (
        a_scheduler_speaks_to_workers_that_have_not_found_it,
        SUCCESSOR + EVALUATION,
        range(50),
        "not over",
    ),
    (
        what_the_dead_scheduler_may_not_have_said_is_not_said_again,
        SUCCESSOR + SCALING,
        range(100),
        "not over",
    ),
    (a_successor_does_not_know_what_nodes_were_told, SUCCESSOR + EVALUATION, range(50), "."),
    (
        what_nodes_may_have_missed_is_not_said_to_those_that_go_on,
        SUCCESSOR + EVALUATION,
        range(50),
        "not over",
    ),
    (a_successor_counts_attempts_from_the_start, SUCCESSOR, range(100), "restarts as attempt"),
    (decisions_are_written_once_only, SUCCESSOR + SCALING, range(100), "."),
    (
        one_that_was_starting_is_taken_for_one_at_work,
        SUCCESSOR + EVALUATION + SCALING,
        range(100),
        ".",
    ),
    (all_are_started_again, SUCCESSOR, range(10), "is at work"),
    (
        a_leaver_waits_for_ends_that_an_earlier_scheduler_heard_of,
        SUCCESSOR + SCALING,
        range(400),
        "not over",
    ),
    (an_older_attempt_may_commit, OVER_HOSTS, range(100), "is another's|other rows"),
    (a_host_that_is_back_keeps_what_it_has, OVER_HOSTS, range(100), "goes on at|beside"),
    (silent_hosts_are_not_missed, OVER_HOSTS, range(100), "not over"),
    (nobody_hears_where_a_worker_is_that_moved, OVER_HOSTS, range(100), "not over"),
    (what_a_lost_host_tells_counts, OVER_HOSTS, range(400), "."),
    (
        a_worker_is_spoken_to_where_an_agent_has_last_said_that_it_is,
        OVER_HOSTS,
        range(200),
        "not over",
    ),
    (
        the_next_scheduler_does_not_meet_what_hosts_have,
        OVER_HOSTS + SUCCESSOR,
        range(50),
        "not over",
    ),
    (what_was_swapped_in_is_not_put_down, SWAPPED, range(50), "not on record"),
    (a_successor_knows_of_no_swap, SWAPPED + SUCCESSOR, range(100), "was told to have"),
    (groups_wait_for_those_that_they_travelled_with, FILTER, range(400), "not over"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "features", "seeds", "found"), WITHOUT, ids=[case[0].__name__ for case in WITHOUT]
)
def test_some_seed_breaks_a_law_where(
    broken: Callable[[Patch], None],
    features: tuple[str, ...],
    seeds: range,
    found: str,
    monkeypatch: Patch,
) -> None:
    broken(monkeypatch)
    notice(having(*features), seeds, found)
