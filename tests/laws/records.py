"""The laws of rollouts as records."""

import ast

from .changes import argument, expression, instead, lacking, never, returned
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
        "test_a_row_gets_a_score_or_an_error_and_never_both",
        "dataflow:Scoring._fail",
        instead("held.values[row] = 0.0", "failures"),
        "the error: such rows get reward 0",
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
