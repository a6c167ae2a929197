"""The laws of conversations."""

from .changes import instead, never, without
from .law import Law

CHAT = (
    Law(
        "a token that was sampled is trained once, as it was sampled",
        "test_what_was_said_before_a_fork_is_trained_in_one_branch",
        "operators:Conversation.fork",
        instead("other._parts = list(self._parts)", "given"),
        "the mask of the first branch, which the second would have too",
    ),
    Law(
        "the end of a turn is written once, by the policy or by the template",
        "test_a_stop_string_that_the_policy_wrote_is_not_written_twice",
        "operators:Conversation._behind",
        instead("return piece", "tail"),
        "the look at what the policy wrote of it",
    ),
    Law(
        "a row begins where the past is laid out otherwise",
        "test_tools_that_move_to_the_last_message_begin_a_row_each",
        "operators:Conversation._open",
        never("_stands"),
        "the comparison with what was laid out before",
    ),
    Law(
        "a turn that the template strips is kept, begins a row or is refused, as was asked for",
        "test_what_the_template_strips_from_the_past_is_kept_begins_a_row_or_is_refused",
        "operators:Conversation._open",
        never("rendered", "behind"),
        "the comparison of texts",
    ),
    Law(
        "a template whose delimiters cannot be told is refused",
        "test_a_template_without_delimiters_is_refused_by_name_with_the_reason",
        "operators:ChatFormat._closing",
        never("longer"),
        "the second probe",
    ),
    Law(
        "a broken call is text, with the reason",
        "test_what_is_broken_is_text_with_the_reason",
        "operators.chat:_value",
        without("strict_json"),
        "the refusal of what JSON does not have",
    ),
    Law(
        "a chat that goes on keeps the ids that were drawn",
        "test_a_call_is_parsed_and_its_result_goes_on_with_the_ids_that_were_drawn",
        "operators:Sessions.begin",
        instead("found, count = None, 0", "_latest"),
        "the ids of the conversation as it is known",
    ),
    Law(
        "what a call was forced to begin with is context, and what was sampled behind it is"
        " trained",
        "test_what_a_turn_was_made_to_begin_with_is_context_and_stands_in_the_past",
        "operators:Conversation.say",
        instead(
            "self._put(RolloutTokens.drawn(begun, [-1.0] * len(begun), [0] * len(begun)),"
            " self._turn)",
            "given",
        ),
        "that nobody sampled it",
    ),
    Law(
        "alternatives are those of the distribution that was drawn from",
        "test_alternatives_are_the_likeliest_of_a_full_pass",
        "operators.engine.sampler:likeliest",
        never("gone"),
        "what truncation left out",
    ),
)
