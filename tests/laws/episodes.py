"""The laws of episodes and of their turns."""

from .changes import always, assigned, expression, instead, never, returned, without
from .law import Law

EPISODES = (
    Law(
        "what was sampled is trained as it was sampled, with what was heard between",
        "test_tokens_are_those_that_were_drawn_with_what_was_heard_between_them",
        "operators.episodes:Dialogue.tokens",
        expression("turn.tokens", "given", "tokens", "turn"),
        "what the world said",
    ),
    Law(
        "what the policy said once is told again, and not drawn again",
        "test_a_function_that_begins_anew_is_told_what_was_said_and_nothing_is_drawn_twice",
        "operators.episodes:Dialogue.ask",
        never("number", "turns", "!follows"),
        "the record",
    ),
    Law(
        "what was said behind something that the world says otherwise now is no part of the rollout",
        "test_from_the_first_thing_that_the_world_says_otherwise_turns_are_drawn_anew",
        "operators.episodes:Dialogue.ask",
        always("follows"),
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
        "dataflow.scoring.at_work:_Questions.awaited",
        without("reschedule", "!timeout_s"),
        "that its clock stands still",
    ),
    Law(
        "nothing is left of a program that has ended",
        "test_nothing_is_left_of_a_program_that_has_ended",
        "operators.agents.program_host:ProgramHost._reap",
        without("_end_strays"),
        "the search for what it left behind",
    ),
    Law(
        "what a program was answered is trained to the id",
        "test_what_a_program_was_answered_is_trained_to_the_id",
        "operators.agents.programs:_tell",
        expression("turn.tokens[1:]", "turn.tokens"),
        "a token of the answer",
    ),
    Law(
        "a program that goes wrong is an error of its rollouts and no reward",
        "test_a_program_that_goes_wrong_is_an_error_of_its_rollouts_and_no_reward",
        "operators.agents.programs:Programs._failed",
        never("status", "is_over"),
        "the exit status",
    ),
    Law(
        "turns have room for all rollouts in flight",
        "test_turns_travel_on_two_edges_of_their_own_with_room_for_all_rollouts_in_flight",
        "dataflow.planning.wiring:_turns",
        expression("1", "rows", "_CAPACITY_ROWS"),
        "the room",
    ),
)
