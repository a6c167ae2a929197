"""Evaluation, replicas that come and go, runs that are taken up again, schedulers that are replaced: simulated, with
all laws."""

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from dataflow.folder.finished import Finished
from dataflow.folder.ledger import Ledger
from dataflow.folder.snapshot import Handover
from dataflow.scheduler.deferred_sends import Unheard
from dataflow.scheduler.failover import Successor
from dataflow.scheduler.recovery import Recovery
from dataflow.scheduler.scaling import Say, Scaling
from dataflow.scheduler.state_machine import Conductor
from dataflow.worker import ports
from operators.evaluate import EvaluateRuntime
from operators.generation.admission import Admission
from operators.sources.prompt_runtime import PromptRuntime
from transport.data.outbox import Outbox

from .running import having, hold, notice
from .shape import FEATURES

EVALUATION, SCALING, RESUME, SUCCESSOR, FILTER = [(name,) for name in FEATURES]
TOGETHER = [EVALUATION, SCALING, RESUME, EVALUATION + SCALING, SCALING + RESUME, EVALUATION + RESUME]
TOGETHER.append(EVALUATION + SCALING + RESUME)
TOGETHER += [FILTER, FILTER + SCALING + RESUME]
TOGETHER += [SUCCESSOR, *(SUCCESSOR + features for features in TOGETHER)]

Patch = pytest.MonkeyPatch


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("features", TOGETHER, ids="-".join)
def test_all_laws_hold_in_500_seeds_with(features: tuple[str, ...]) -> None:
    hold(having(*features), range(500))


# Evaluation


def what_a_sink_acknowledged_dies_with_it(patch: Patch) -> None:
    patch.setattr(EvaluateRuntime, "_find", lambda *_: None)


def a_source_does_not_hear_of_an_open_round_when_it_is_back(patch: Patch) -> None:
    def words(self: Conductor, node: str, **how: Any) -> list[Any]:
        return [word for word in words_for(self, node, **how) if "evaluate" not in word.message]

    words_for = Conductor.words_for
    patch.setattr(Conductor, "words_for", words)


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
    def start(self: Admission[Any], lane: str, *values: Any) -> bool:
        return lane == "questions" or may_start(self, lane, *values)

    may_start = Admission.may_start
    patch.setattr(Admission, "may_start", start)


def the_run_ends_before_its_last_round(patch: Patch) -> None:
    waiting = Conductor._waiting
    patch.setattr(Conductor, "_waiting", lambda self: self.phase != "last_evaluation" and waiting(self))


def a_round_that_was_recorded_is_open_to_a_sink_that_is_back(patch: Patch) -> None:
    patch.setattr(Ledger, "last_round", lambda *_: None)


# Scaling


def nobody_says_what_a_leaver_had_heard_before_it_died(patch: Patch) -> None:
    patch.setattr(ports.Ports, "over", lambda *_: None)


def a_newcomer_waits_for_what_the_dead_were_asked(patch: Patch) -> None:
    def fell(self: Scaling, name: str) -> Any:
        before = {each.name: dict(each.unconfirmed) for each in self._members.values()}
        orders = falls(self, name)
        for each in self._members.values():
            each.unconfirmed = before[each.name]
        return orders

    falls = Scaling.fell
    patch.setattr(Scaling, "fell", fell)


def a_newcomer_is_not_sent_to(patch: Patch) -> None:
    patch.setattr(ports.Ports, "add", lambda *_: None)


def a_leaver_is_not_let_go(patch: Patch) -> None:
    patch.setattr(ports.Ports, "retire", lambda *_: None)


def a_leaver_is_stopped_before_those_that_send_to_it_know(patch: Patch) -> None:
    def stop(self: Scaling) -> Any:
        for each in self._members.values():
            if each.state == "leaving":
                each.unconfirmed = {}
        return stops(self)

    stops = Scaling._stop
    patch.setattr(Scaling, "_stop", stop)


def a_leaver_that_died_is_taken_for_done(patch: Patch) -> None:
    def fell(self: Scaling, name: str) -> Any:
        drained = self._members[name].drained
        orders = falls(self, name)
        self._members[name].drained = drained or self._members[name].state == "leaving"
        return orders

    falls = Scaling.fell
    patch.setattr(Scaling, "fell", fell)


def joins_begin_while_somebody_is_away(patch: Patch) -> None:
    def advance(self: Scaling) -> Any:
        away, self._away = self._away, set()
        try:
            return advances(self)
        finally:
            self._away = away

    advances = Scaling._advance
    patch.setattr(Scaling, "_advance", advance)


# Resume


def a_run_that_goes_on_does_not_know_its_rounds(patch: Patch) -> None:
    patch.setattr(Conductor, "go_on", lambda *_: None)


def a_source_that_is_ready_late_does_not_hear_what_was_dropped(patch: Patch) -> None:
    begin = Conductor.start
    patch.setattr(Conductor, "start", lambda self: [word for word in begin(self) if "dropped" not in word.message])


def finished_rollouts_are_not_looked_for(patch: Patch) -> None:
    patch.setattr(Finished, "load", lambda *_: None)


def a_run_that_goes_on_counts_its_prompts_from_the_start(patch: Patch) -> None:
    patch.setattr(Ledger, "next_group_id", lambda *_: 0)


def a_run_that_goes_on_issues_nothing_again(patch: Patch) -> None:
    patch.setattr(PromptRuntime, "_in_flight", lambda self: deque())


# Successors


def a_scheduler_speaks_to_workers_that_have_not_found_it(patch: Patch) -> None:
    patch.setattr(Unheard, "reach", lambda self, name, send: send())


def what_the_dead_scheduler_may_not_have_said_is_not_said_again(patch: Patch) -> None:
    def take(self: Scaling, plain: Any) -> Any:
        take_up(self, plain)
        return []

    take_up = Scaling.take_up
    patch.setattr(Scaling, "take_up", take)


def a_successor_does_not_know_what_nodes_were_told(patch: Patch) -> None:
    patch.setattr(Conductor, "take_up", lambda *_: None)


def what_nodes_may_have_missed_is_not_said_to_those_that_go_on(patch: Patch) -> None:
    def words(self: Conductor, node: str, *, again: bool = True) -> list[Any]:
        return words_for(self, node) if again else []

    words_for = Conductor.words_for
    patch.setattr(Conductor, "words_for", words)


def a_successor_counts_attempts_from_the_start(patch: Patch) -> None:
    patch.setattr(Recovery, "take_up", lambda *_: None)


def decisions_are_written_once_only(patch: Patch) -> None:
    write = Handover.write
    patch.setattr(Handover, "write", lambda self: None if self._written else write(self))


def one_that_was_starting_is_taken_for_one_at_work(patch: Patch) -> None:
    adopt = Successor._adopt
    patch.setattr(Successor, "_adopt", lambda self, state, was: adopt(self, state, "ready"))


def all_are_started_again(patch: Patch) -> None:
    adopt = Successor._adopt
    patch.setattr(Successor, "_adopt", lambda self, state, was: adopt(self, state, "down"))


def a_leaver_waits_for_ends_that_an_earlier_scheduler_heard_of(patch: Patch) -> None:
    def take(self: Scaling, plain: Any) -> Any:
        orders = take_up(self, plain)
        for each in self._members.values():
            each.wired_again = False
        return [order for order in orders if not isinstance(order, Say) or order.word["kind"] != "over"]

    take_up = Scaling.take_up
    patch.setattr(Scaling, "take_up", take)


# Filters


def groups_wait_for_those_that_they_travelled_with(patch: Patch) -> None:
    patch.setattr(Outbox, "_hear_early", lambda *_: None)


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
    (a_source_that_is_ready_late_does_not_hear_what_was_dropped, RESUME, range(1700, 1800), "not over"),
    (finished_rollouts_are_not_looked_for, RESUME, range(50), "generated again"),
    (a_run_that_goes_on_counts_its_prompts_from_the_start, RESUME, range(400), "."),
    (a_run_that_goes_on_issues_nothing_again, RESUME, range(50), "not over"),
    (a_scheduler_speaks_to_workers_that_have_not_found_it, SUCCESSOR + EVALUATION, range(50), "not over"),
    (what_the_dead_scheduler_may_not_have_said_is_not_said_again, SUCCESSOR + SCALING, range(100), "not over"),
    (a_successor_does_not_know_what_nodes_were_told, SUCCESSOR + EVALUATION, range(50), "."),
    (what_nodes_may_have_missed_is_not_said_to_those_that_go_on, SUCCESSOR + EVALUATION, range(50), "not over"),
    (a_successor_counts_attempts_from_the_start, SUCCESSOR, range(100), "restarts as attempt"),
    (decisions_are_written_once_only, SUCCESSOR + SCALING, range(100), "."),
    (one_that_was_starting_is_taken_for_one_at_work, SUCCESSOR + EVALUATION + SCALING, range(100), "."),
    (all_are_started_again, SUCCESSOR, range(10), "is at work"),
    (a_leaver_waits_for_ends_that_an_earlier_scheduler_heard_of, SUCCESSOR + SCALING, range(400), "not over"),
    (groups_wait_for_those_that_they_travelled_with, FILTER, range(400), "not over"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("broken", "features", "seeds", "found"), WITHOUT, ids=[case[0].__name__ for case in WITHOUT])
def test_some_seed_breaks_a_law_where(
    broken: Callable[[Patch], None], features: tuple[str, ...], seeds: range, found: str, monkeypatch: Patch
) -> None:
    broken(monkeypatch)
    notice(having(*features), seeds, found)
