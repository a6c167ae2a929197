"""The laws of the scheduler, of staleness and of the ledger."""

from .law import Law

SCHEDULER = (
    Law(
        "no rollout and no weight ever passes through the scheduler",
        "tests/test_laws.py::test_no_rollout_and_no_weight_passes_through_the_scheduler",
        "dataflow/desk.py",
        "import msgpack\nimport zmq\n",
        "import msgpack\nimport pyarrow as pyarrow\nimport zmq\n",
        "that the scheduler cannot read rows",
    ),
    Law(
        "the plan is a value that explains itself",
        "tests/dataflow/test_graph.py::test_the_plan_is_a_pure_function_and_explains_itself",
        "dataflow/plan.py",
        "{(bound.max_staleness + 1) * bound.prompts_per_step} prompts in flight",
        "prompts",
        "the bound in the explanation",
    ),
    Law(
        "light operators in a row share one worker",
        "tests/dataflow/test_graph.py::test_light_operators_in_a_row_share_a_worker",
        "dataflow/plan.py",
        "                light.add_edge(stream.node, call.operator.name)\n",
        "                pass\n",
        "the shared worker",
    ),
    Law(
        "a worker dies with its parent",
        "tests/test_faults.py::test_a_killed_forkserver_takes_its_workers_along_and_ends_the_run",
        "dataflow/forkserver.py",
        "            die_with_parent()\n            if os.getppid() != parent:",
        "            if os.getppid() != parent:",
        "the kernel's word to the child",
    ),
    Law(
        "a worker watches its parent",
        "tests/dataflow/test_link.py::test_a_worker_learns_it_also_when_the_scheduler_falls_silent_later",
        "dataflow/link.py",
        "elif not alone and now - heard > self._patience_s:",
        "elif False:",
        "the patience",
    ),
    Law(
        "every worker heartbeats",
        "tests/dataflow/test_link.py::test_a_worker_that_computes_for_long_still_beats",
        "dataflow/link.py",
        'dealer.send(msgpack.packb({"kind": "beat", **self._beat()}))',
        "pass",
        "the beat",
    ),
    Law(
        "every second is busy, idle or back-pressured",
        "tests/dataflow/test_loop.py::test_every_second_is_busy_idle_or_blocked",
        "dataflow/loop.py",
        'self.seconds["blocked" if self._outbox else "idle"] += seconds',
        'self.seconds["idle"] += seconds',
        "the seconds of back-pressure",
    ),
    Law(
        "control messages are msgpack, and nothing else is heard",
        "tests/dataflow/test_desk_junk.py::test_whatever_is_no_word_is_refused",
        "dataflow/secure.py",
        ' or not isinstance(found.get("kind"), str)',
        "",
        "the look at the kind of a word",
    ),
    Law(
        "an operator that fails is named",
        "tests/dataflow/test_loop.py::test_an_exception_in_a_runtime_names_the_node_and_what_it_was_doing",
        "dataflow/loop.py",
        'with boundary(self.node, "working"):',
        "if True:",
        "the boundary around a slice of work",
    ),
)

STALENESS = (
    Law(
        "staleness is kept at admission",
        "tests/operators/engine/test_engine_admission.py::test_no_group_starts_further_ahead_than_the_bound",
        "operators/engine/admission.py",
        "return admit(group.group_id, dropped, version, bound.prompts_per_step, bound.max_staleness, self.in_flight)",
        "return True",
        "the bound of admission",
    ),
    Law(
        "staleness is kept at the trainer's door",
        "tests/operators/test_trainer.py::test_stale_groups_are_dropped_at_the_door",
        "operators/training/drops.py",
        "if sweep(oldest, step, self._bound.max_staleness).any():",
        "if False:",
        "the sweep",
    ),
    Law(
        "staleness is kept at the trainer's door",
        "tests/dataflow/test_staleness.py::test_the_sweep_finds_what_is_older_than_the_bound",
        "dataflow/staleness.py",
        "return oldest_versions < trainer_version - max_staleness",
        "return oldest_versions < trainer_version - max_staleness - 1",
        "one version of the bound",
    ),
    Law(
        "admission within the bound suffices where groups are consumed in order, and never deadlocks",
        "tests/dataflow/test_staleness.py::"
        "test_with_consumption_in_order_admission_alone_bounds_the_age_and_never_deadlocks",
        "dataflow/staleness.py",
        "ahead = (max_staleness + 1) * prompts_per_step",
        "ahead = (max_staleness + 2) * prompts_per_step",
        "one version of the bound",
    ),
    Law(
        "a rollout's age counts from its oldest token",
        "tests/dataflow/test_staleness.py::test_the_oldest_version_of_each_rollout_is_that_of_its_oldest_chosen_token",
        "dataflow/staleness.py",
        "np.minimum.reduceat",
        "np.maximum.reduceat",
        "the look for the oldest",
    ),
    Law(
        "groups are trained in the order of their issue",
        "tests/operators/test_trainer.py::test_groups_are_trained_in_the_order_of_their_issue_however_they_arrive",
        "operators/training/buffer.py",
        "group = self._held.pop(self.following, None)",
        "group = self._held.pop(next(iter(self._held), -1), None)",
        "the wait for the next number",
    ),
    Law(
        "a group that is issued again starts before later ones",
        "tests/operators/engine/test_engine_admission.py::test_a_group_that_is_issued_again_starts_before_later_ones",
        "operators/engine/admission.py",
        "while at and queue[at - 1].group_id > group.group_id:",
        "while False:",
        "the place in the queue",
    ),
)

LEDGER = (
    Law(
        "issued = trained + dropped + in flight",
        "tests/dataflow/test_ledger.py::test_every_issued_group_is_trained_or_dropped_or_in_flight",
        "dataflow/ledger/reads.py",
        '            " WHERE o.source = g.source AND o.group_id = g.group_id AND o.node = :node) GROUP BY state",',
        "            \" WHERE o.source = g.source AND o.group_id = g.group_id AND o.outcome = 'trained'"
        ' AND o.node = :node) GROUP BY state",',
        "that a dropped group is not in flight",
    ),
    Law(
        "issued = trained + dropped + in flight, recomputed from the folder",
        "tests/dataflow/test_verify.py::test_a_group_whose_row_vanished_breaks_the_identity",
        "dataflow/verify/verdict.py",
        "    if counts.missing:\n",
        "    if False:\n",
        "the sum",
    ),
    Law(
        "no group is trained twice",
        "tests/dataflow/test_ledger.py::test_no_group_is_trained_twice",
        "dataflow/ledger/writes.py",
        '_OUTCOME = "INSERT INTO',
        '_OUTCOME = "INSERT OR REPLACE INTO',
        "the refusal of a second outcome",
    ),
    Law(
        "no group is trained twice, though it comes twice",
        "tests/operators/test_trainer.py::test_a_group_that_comes_twice_is_trained_once",
        "operators/training/buffer.py",
        "if group_id < self.following or group_id in self._held or group_id in self._holes:",
        "if False:",
        "the look at what was here before",
    ),
    Law(
        "no group is done twice by a node, though it comes twice",
        "tests/dataflow/test_loop.py::test_a_group_that_comes_again_is_done_once",
        "dataflow/holding.py",
        "            if not any(node == origin for node, _ in known):\n",
        "            if True:\n",
        "the look at what was here before",
    ),
    Law(
        "none is lost without a reason, at the end of the rows neither",
        "tests/operators/test_trainer.py::"
        "test_at_the_end_of_the_rows_what_is_too_little_for_a_step_is_dropped_with_a_reason",
        "operators/training/runtime.py",
        "            self._drops.add(rest, TOO_FEW, None)\n",
        "",
        "the drops at the end",
    ),
    Law(
        "a drop has a reason",
        "tests/dataflow/test_verify.py::test_a_drop_has_a_reason",
        "dataflow/verify/verdict.py",
        'was == "dropped" and not reason]',
        'was == "dropped" and False]',
        "the look for reasons",
    ),
    Law(
        "a step and the entries of its groups commit together",
        "tests/dataflow/test_ledger.py::test_a_refused_step_leaves_no_trace",
        "dataflow/ledger/ledger.py",
        "            writes.add_step(self._db, row)\n            writes.end(self._db, node, source, outcomes)\n",
        "            writes.add_step(self._db, row)\n"
        '        with self._transaction(f"end groups of step {step}"):\n'
        "            writes.end(self._db, node, source, outcomes)\n",
        "the one transaction",
    ),
    Law(
        "a crash leaves a call of the ledger done or not begun",
        "tests/dataflow/test_ledger_crash.py::test_a_crash_at_any_statement_leaves_a_call_done_or_not_begun",
        "dataflow/ledger/ledger.py",
        "            writes.add_step(self._db, row)\n            writes.end(self._db, node, source, outcomes)\n",
        "            writes.add_step(self._db, row)\n"
        '        with self._transaction(f"end groups of step {step}"):\n'
        "            writes.end(self._db, node, source, outcomes)\n",
        "the one transaction, seen by a crash",
    ),
    Law(
        "a group moves forward only",
        "tests/dataflow/test_ledger.py::test_a_late_word_of_an_earlier_state_takes_no_group_back",
        "dataflow/ledger/writes.py",
        "for earlier in STATES[:rank]",
        "for earlier in STATES",
        "the order of states",
    ),
    Law(
        "a group is in the ledger before it leaves",
        "tests/operators/test_prompts.py::test_the_ledger_knows_of_a_group_before_it_leaves",
        "operators/issuing.py",
        "            self._ledger.issue(self._lane, list(",
        "            list(list(",
        "the entry",
    ),
    Law(
        "a group's state is in the ledger before it is sent",
        "tests/dataflow/test_loop.py::test_groups_are_marked_in_the_ledger_before_they_are_sent",
        "dataflow/loop.py",
        "            self._mark(lane, groups)\n",
        "            pass\n",
        "the mark",
    ),
    Law(
        "a step is recorded, then published, and only then acknowledged",
        "tests/operators/test_trainer.py::test_a_step_is_recorded_then_published_and_only_then_acknowledged",
        "operators/training/runtime.py",
        "        journal.commit(step, groups, self._drops.reasons, metrics)\n",
        "        if self._writer is not None:\n            self._writer.publish(step, self._weights)\n"
        "        journal.commit(step, groups, self._drops.reasons, metrics)\n",
        "the order of record and weights",
    ),
    Law(
        "a step is recorded, then published, and only then acknowledged",
        "tests/operators/test_trainer.py::test_a_step_is_recorded_then_published_and_only_then_acknowledged",
        "operators/training/runtime.py",
        "        journal.commit(step, groups, self._drops.reasons, metrics)\n",
        "        for group in groups:\n            group.release()\n"
        "        journal.commit(step, groups, self._drops.reasons, metrics)\n",
        "the order of record and acknowledgement",
    ),
    Law(
        "what the ledger refuses is never published",
        "tests/operators/test_trainer_catch_up.py::test_what_the_ledger_refuses_was_never_published",
        "operators/training/runtime.py",
        "        journal.commit(step, groups, self._drops.reasons, metrics)\n",
        "        if self._writer is not None:\n            self._writer.publish(step, self._weights)\n"
        "        journal.commit(step, groups, self._drops.reasons, metrics)\n",
        "the order of record and weights, where the record is refused",
    ),
    Law(
        "a resume replays the ledger, never a position: what has no outcome is issued again",
        "tests/operators/test_prompts.py::test_groups_without_an_outcome_are_issued_again_first_under_their_numbers",
        "operators/issuing.py",
        "            self._again = self._in_flight()\n        if self._on_demand:",
        "            self._again = deque()\n        if self._on_demand:",
        "the look at what is in flight",
    ),
    Law(
        "what got an outcome while nodes were built is not issued again",
        "tests/operators/test_prompts.py::"
        "test_what_got_an_outcome_while_the_other_nodes_were_built_is_not_issued_again",
        "operators/issuing.py",
        "self._again: deque[int] | None = None",
        "self._again: deque[int] | None = self._in_flight()",
        "the wait until the first work",
    ),
    Law(
        "finished rollouts are kept, before they are sent",
        "tests/dataflow/test_loop.py::test_what_a_node_finished_is_kept_before_it_is_sent",
        "dataflow/loop.py",
        "            if batch.lane in self._finished and groups:\n"
        "                self._finished[batch.lane].append(batch.records)\n"
        "            self._put(batch.lane, batch.records, groups)\n",
        "            self._put(batch.lane, batch.records, groups)\n"
        "            self._flush()\n"
        "            if batch.lane in self._finished and groups:\n"
        "                self._finished[batch.lane].append(batch.records)\n",
        "the order of keeping and sending",
    ),
    Law(
        "finished rollouts are kept, and not made again",
        "tests/dataflow/test_loop.py::test_what_was_finished_before_a_restart_leaves_without_being_made_again",
        "dataflow/loop.py",
        "found = self._found(lane, [group for group in new if group not in settled])",
        "found: dict[int, pa.RecordBatch] = {}",
        "the look at what was finished",
    ),
    Law(
        "what has an outcome is acknowledged and not made again",
        "tests/dataflow/test_loop.py::test_what_has_an_outcome_is_acknowledged_and_not_made_again",
        "dataflow/loop.py",
        "settled = set(self._settled(lane, new))",
        "settled: set[int] = set()",
        "the look at the ledger",
    ),
    Law(
        "trained counts only on the surviving line: the groups of steps taken back are in flight again",
        "tests/dataflow/test_ledger.py::"
        "test_going_back_to_a_checkpoint_puts_later_groups_in_flight_and_plans_their_repetition",
        "dataflow/ledger/writes.py",
        '        db.execute(f"DELETE {later}", (node, step))\n',
        "        pass\n",
        "the removal from the line",
    ),
    Law(
        "what was trained after the checkpoint is trained again in the same order",
        "tests/dataflow/test_ledger.py::"
        "test_going_back_to_a_checkpoint_puts_later_groups_in_flight_and_plans_their_repetition",
        "dataflow/ledger/writes.py",
        "        db.execute(copied, (line, node, step))\n",
        "",
        "the memory of the abandoned line",
    ),
    Law(
        "the losses repeat",
        "tests/operators/test_trainer_catch_up.py::"
        "test_a_trainer_catches_up_to_the_very_bits_of_the_dead_one_and_goes_on_as_it_would_have",
        "operators/training/runtime.py",
        "        if start.folder is not None:\n",
        "        if False:\n",
        "the optimiser's state of the checkpoint",
    ),
    Law(
        "a half-written or damaged checkpoint is never chosen",
        "tests/dataflow/test_checkpoints.py::test_an_unmarked_or_damaged_checkpoint_is_never_chosen",
        "dataflow/checkpoints.py",
        "(at_most is None or step <= at_most) and self.damage(step) is None",
        "at_most is None or step <= at_most",
        "the look for damage",
    ),
    Law(
        "a failed save leaves the checkpoint before it good",
        "tests/dataflow/test_checkpoints.py::test_a_failed_save_leaves_the_checkpoint_of_the_same_step_good",
        "dataflow/checkpoints.py",
        "            if partial.exists():\n                shutil.rmtree(partial)\n",
        "            shutil.rmtree(self.folder(step), ignore_errors=True)\n"
        "            if partial.exists():\n                shutil.rmtree(partial)\n",
        "that the one before stays until the new one is whole",
    ),
)
