"""The laws of rollouts as records."""

import ast

from .changes import always, argument, expression, instead, lacking, never, returned
from .law import Law

RECORDS = (
    Law(
        "a failed rollout is a record, never an exception",
        "test_prompts_that_cannot_be_served_become_error_rows_beside_the_others",
        "operators.generation.groups:of_prompts",
        instead("raise ValueError(prompt)", "fail"),
        "the error rows of a prompt",
    ),
    Law(
        "what a scorer does wrong is the row's error",
        "test_a_row_gets_a_score_or_an_error_and_never_both_and_none_is_neither",
        "dataflow:Scoring._fail",
        instead("held.values[row] = 0.0", "failures"),
        "the error: such rows get reward 0",
    ),
    Law(
        "that a scorer does not apply is neither a score nor a failure",
        "test_a_row_gets_a_score_or_an_error_and_never_both_and_none_is_neither",
        "dataflow.scoring:applying",
        instead("return check", "may_not_apply"),
        "that None is an answer",
    ),
    Law(
        "what does not apply changes no mean",
        "test_what_does_not_apply_changes_no_mean",
        "dataflow.scoring.runtime:_has_values",
        never("null_count"),
        "the look at rows without a value",
    ),
    Law(
        "one bad row of a batch fails alone",
        "test_a_batch_function_gets_all_rows_at_once_and_a_bad_one_fails_alone",
        "dataflow:Scoring._take",
        never("startswith"),
        "the calls row by row after one that failed",
    ),
    Law(
        "a call is made again where the world failed, and only there",
        "test_a_call_is_made_again_where_the_world_failed_and_only_there",
        "dataflow.scoring.values:prepare",
        always("retries"),
        "the calls made again",
    ),
    Law(
        "a judge that fails is asked again, and what fails for good is no reward",
        "test_a_busy_or_broken_judge_is_asked_again_and_what_fails_for_good_is_no_reward",
        "operators.rewards.judge_model:_said",
        never("status_code", "_BUSY"),
        "that it may answer later",
    ),
    Law(
        "the key of a judge is written nowhere",
        "test_the_key_comes_from_the_environment_and_is_written_nowhere",
        "operators.rewards.judge_model:_said",
        instead("text = reply.text", "text", "replace"),
        "the key taken out of what the judge says",
    ),
    Law(
        "no key of a row is left out of a nested column",
        "test_a_key_that_the_first_rows_did_not_have_is_refused_and_never_left_out",
        "operators.sources.prompt_rows:_is_kind",
        never("is_struct", "!value_type"),
        "the look at the keys",
    ),
    Law(
        "what failed is counted by its cause, and what does not apply apart from it",
        "test_failures_are_counted_by_node_and_cause_and_what_does_not_apply_by_scorer",
        "operators:Outcomes.add",
        expression("missing", "missing", "good", kind=ast.BinOp),
        "that a failed row has no value for another reason",
    ),
    Law(
        "a failure is never reward 0: it is not trained",
        "test_a_row_that_failed_after_it_had_its_reward_is_not_trained",
        "operators:usable",
        never("errors", "null_count"),
        "the look at the rows' errors",
    ),
    Law(
        "a failure is never averaged in",
        "test_a_row_that_failed_after_it_had_its_score_is_not_averaged_in",
        "operators:round_metrics",
        expression("pc.is_valid(table.column(of))", "and_", kind=ast.Call),
        "the look at the rows' errors in an evaluation",
    ),
    Law(
        "logprobs are those of the distribution that was really sampled",
        "test_a_draw_reports_the_logprob_of_its_token_and_the_tokens_that_were_left",
        "operators.engine.sampler:_pick",
        expression("part.gather(-1, place)", "total", "gather", kind=ast.BinOp),
        "what truncation left out, in the denominator",
    ),
    Law(
        "each token names the weights that produced it",
        "test_a_rollout_over_two_updates_names_the_weights_of_every_token",
        "operators.engine.decode:Engine.step",
        argument("drew", 2, "0"),
        "the version of the newest token",
    ),
    Law(
        "the same seed gives the same rollouts",
        "test_the_same_seed_gives_the_same_rollouts_in_other_slots_and_another_does_not",
        "operators:GeneratorRuntime._start",
        expression("self._next_ticket", "_context", "seed"),
        "that a seed is a function of the rollout",
    ),
    Law(
        "the mask is 1 where the policy chose the token",
        "test_groups_leave_whole_with_the_promised_columns",
        "operators.engine:Rows.rollouts",
        expression("np.arange(length) >= 0", "length", ">=", kind=ast.Compare),
        "the prompt's share of it",
    ),
    Law(
        "optional columns travel with no change to the engine",
        "test_groups_leave_whole_with_the_promised_columns",
        "operators.generation:rollouts",
        expression("_.drop_columns(['answer'])", "_prompt_rows", kind=ast.Call),
        "the prompts' own columns",
    ),
    Law(
        "a rollout opens without this project",
        "test_a_rollouts_file_is_read_by_sql_without_this_project",
        "dataflow:_put_table",
        expression("pa.ipc.new_stream", "new_file"),
        "Arrow's own file format",
    ),
    Law(
        "a step's line has every figure of the design",
        "test_a_step_writes_every_figure_of_the_design",
        "operators:step_metrics",
        lacking("grad_norm"),
        "one figure",
    ),
    Law(
        "a run folder has the layout of the design",
        "test_the_layout_is_that_of_the_design",
        "dataflow:RunFolder.ledger",
        returned("self.path / 'ledger.sqlite'"),
        "the ledger's name",
    ),
)
