"""The laws of rollouts as records."""

from .law import Law

RECORDS = (
    Law(
        "a failed rollout is a record, never an exception",
        "tests/operators/engine/test_runtime.py::"
        "test_prompts_that_cannot_be_served_become_error_rows_beside_the_others",
        "operators/generation/runtime.py",
        "group.fail(prompt)\n",
        "raise ValueError(prompt)\n",
        "the error rows of a prompt",
    ),
    Law(
        "what a scorer does wrong is the row's error",
        "tests/dataflow/scoring/test_scoring.py::test_a_row_gets_a_score_or_an_error_and_never_both",
        "dataflow/scoring/runtime.py",
        'held.failures[row] = f"{self._scorer.name}: {text}"',
        "held.values[row] = 0.0",
        "the error: such rows get reward 0",
    ),
    Law(
        "a failure is never reward 0: it is not trained",
        "tests/operators/training/test_trainer_learning.py::test_a_row_that_failed_after_it_had_its_reward_is_not_trained",
        "operators/training/learner/rows.py",
        "        if errors.null_count < len(errors):\n"
        "            good &= errors.is_null().to_numpy(zero_copy_only=False)\n",
        "",
        "the look at the rows' errors",
    ),
    Law(
        "a failure is never averaged in",
        "tests/operators/test_evaluate.py::test_a_row_that_failed_after_it_had_its_score_is_not_averaged_in",
        "operators/evaluate.py",
        "pc.and_(pc.is_null(table.column(ERROR)), pc.is_valid(table.column(of)))",
        "pc.is_valid(table.column(of))",
        "the look at the rows' errors in an evaluation",
    ),
    Law(
        "logprobs are those of the distribution that was really sampled",
        "tests/operators/engine/test_sampler.py::"
        "test_a_draw_reports_the_logprob_of_its_token_and_the_tokens_that_were_left",
        "operators/engine/sampler.py",
        "logprobs = (part.gather(-1, place) / total).log().float()",
        "logprobs = part.gather(-1, place).log().float()",
        "what truncation left out, in the denominator",
    ),
    Law(
        "each token names the weights that produced it",
        "tests/operators/engine/test_engine_laws.py::test_a_rollout_over_two_updates_names_the_weights_of_every_token",
        "operators/engine/decode.py",
        "self.rows.drew(tokens, logprobs, self.version)",
        "self.rows.drew(tokens, logprobs, 0)",
        "the version of the newest token",
    ),
    Law(
        "the same seed gives the same rollouts",
        "tests/operators/engine/test_runtime.py::"
        "test_the_same_seed_gives_the_same_rollouts_in_other_slots_and_another_does_not",
        "operators/generation/runtime.py",
        'key = f"{self._context.seed}/{group.lane}/{group.group_id}"',
        'key = f"{self._next_ticket}/{group.lane}/{group.group_id}"',
        "that a seed is a function of the rollout",
    ),
    Law(
        "the mask is 1 where the policy chose the token",
        "tests/operators/engine/test_runtime.py::test_groups_leave_whole_with_the_promised_columns",
        "operators/generation/groups.py",
        "pa.array(place >= np.repeat(starts, lengths))",
        "pa.array(place >= 0)",
        "the prompt's share of it",
    ),
    Law(
        "optional columns travel with no change to the engine",
        "tests/operators/engine/test_runtime.py::test_groups_leave_whole_with_the_promised_columns",
        "operators/generation/groups.py",
        "batch = _prompt_rows(groups, sizes)\n",
        'batch = _prompt_rows(groups, sizes).drop_columns(["answer"])\n',
        "the prompts' own columns",
    ),
    Law(
        "a rollout opens without this project",
        "tests/test_laws.py::test_a_rollouts_file_is_read_by_sql_without_this_project",
        "dataflow/folder/run_folder.py",
        "with pa.ipc.new_file(file, table.schema, options=options) as writer:",
        "with pa.ipc.new_stream(file, table.schema, options=options) as writer:",
        "Arrow's own file format",
    ),
    Law(
        "a step's line has every figure of the design",
        "tests/operators/training/test_trainer.py::test_a_step_writes_every_figure_of_the_design",
        "operators/training/metrics.py",
        '        "grad_norm": outcome.grad_norm,\n',
        "",
        "one figure",
    ),
    Law(
        "a run folder has the layout of the design",
        "tests/dataflow/folder/test_run_folder.py::test_the_layout_is_that_of_the_design",
        "dataflow/folder/run_folder.py",
        'return self.path / "ledger.db"',
        'return self.path / "ledger.sqlite"',
        "the ledger's name",
    ),
)
