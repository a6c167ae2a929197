"""The laws of episodes and of their turns."""

from .changes import always, assigned, condition, expression, instead, never, returned, without
from .law import Law

EPISODES = (
    Law(
        "what was sampled is trained as it was sampled, with what was heard between",
        "test_tokens_are_those_that_were_drawn_with_what_was_heard_between_them",
        "operators.episodes:Dialogue.rows",
        instead("found[-1] += [said]", "found", "said"),
        "what the world said",
    ),
    Law(
        "what the policy said once is told again, and not drawn again",
        "test_a_function_that_begins_anew_is_told_what_was_said_and_nothing_is_drawn_twice",
        "operators.episodes:Dialogue.ask",
        never("number", "follows"),
        "the record",
    ),
    Law(
        "what was said behind something that the world says otherwise now is no part of the rollout",
        "test_from_the_first_thing_that_the_world_says_otherwise_turns_are_drawn_anew",
        "operators.episodes:Dialogue.ask",
        condition("number < len(self.turns)", "follows"),
        "the comparison",
    ),
    Law(
        "an answer that comes while the function begins anew is kept",
        "test_an_answer_that_comes_while_the_function_begins_anew_is_kept",
        "operators.episodes:Dialogue.ask",
        instead("self.waiting = None\n_", "number", "turns", "follows"),
        "what is being drawn, when the function begins anew",
    ),
    Law(
        "a conversation that was rewritten is trained as the policy saw it",
        "test_each_sampled_token_of_a_rewritten_conversation_is_chosen_once_behind_all_that_the_policy_saw",
        "operators.episodes:Dialogue.rows",
        never("begins", "!turns"),
        "that a training row begins there",
    ),
    Law(
        "a branch of a past that is another one now is drawn anew",
        "test_branches_of_what_was_drawn_anew_are_drawn_anew",
        "operators.episodes:Talks._talk",
        condition("known and is_same", "zip"),
        "the comparison of what it goes on from",
    ),
    Law(
        "all conversations of an episode have one budget",
        "test_all_conversations_have_one_budget_and_different_seeds",
        "operators.episodes:Talks.ask",
        assigned("max_turns", "self.max_turns"),
        "the turns of the others",
    ),
    Law(
        "how a caller treats its conversation, each sampled token is chosen once",
        "test_whatever_a_caller_does_to_its_conversation_each_sampled_token_is_chosen_once",
        "dataflow.tokens.training_rows:training_rows",
        always("array_equal"),
        "the comparison of what the call sees with the row",
    ),
    Law(
        "how a rollout was cut into rows changes nothing of its weight",
        "test_rows_share_their_prefixes_and_a_loss_of_whole_rollouts_sees_whole_rollouts",
        "operators.training.learner:Learner.micro",
        assigned("rollout_T", "packed.row_T"),
        "the way from a row to its rollout",
    ),
    Law(
        "the first token of a training row is not trained",
        "test_no_row_predicts_its_first_token_and_lists_of_another_length_are_refused",
        "operators.training.learner:StepRows.chosen_S",
        without("cuts_S"),
        "that rows other than the first have one, too",
    ),
    Law(
        "a run that is cut off goes on turn by turn",
        "test_a_run_that_is_cut_off_goes_on_turn_by_turn",
        "operators.episodes:EpisodesRuntime._recall",
        always("files"),
        "the turns of earlier processes",
    ),
    Law(
        "a world that fails is an error of its rollouts and no reward",
        "test_a_world_that_fails_is_an_error_of_its_rollouts_and_no_reward",
        "operators.episodes:EpisodesRuntime._end",
        never("error", "!failures"),
        "the failure",
    ),
    Law(
        "a turn starts when the group of its rollout may",
        "test_a_turn_starts_when_the_group_of_its_rollout_may",
        "operators.generation.runtime:GeneratorRuntime.__init__",
        assigned("bounds", "context.bounds"),
        "the bounds of turns",
    ),
    Law(
        "turns are taken however many wait that may not start",
        "test_turns_are_taken_however_many_wait_that_may_not_start",
        "operators.generation.turns:no_turns",
        returned("set(queues)"),
        "that they are counted apart",
    ),
    Law(
        "a call that waits for its owner is not late",
        "test_a_call_that_waits_for_its_owner_is_not_late",
        "dataflow.scoring.at_work:_Asking.rest",
        without("reschedule", "!_timeout_s"),
        "that its clock stands still",
    ),
    Law(
        "turns have room for all rollouts in flight",
        "test_turns_travel_on_two_edges_of_their_own_with_room_for_all_rollouts_in_flight",
        "dataflow.planning.wiring:_turns",
        expression("1", "rows", "_CAPACITY_ROWS"),
        "the room",
    ),
)
