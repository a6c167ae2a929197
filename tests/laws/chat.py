"""The laws of conversations."""

from .changes import instead, never, without
from .law import Law

CHAT = (
    Law(
        "a sampled token is trained once, unchanged",
        "test_what_was_said_before_a_fork_is_trained_in_one_branch",
        "operators:Conversation.fork",
        instead("other._parts = list(self._parts)", "given"),
        "the first branch's mask",
    ),
    Law(
        "the end of a turn is written once",
        "test_a_stop_string_that_the_policy_wrote_is_not_written_twice",
        "operators:Conversation._behind",
        instead("return piece", "tail"),
        "what the policy wrote of it",
    ),
    Law(
        "a row begins where the past is rendered differently",
        "test_tools_that_move_to_the_last_message_begin_a_row_each",
        "operators:Conversation._open",
        never("_stands"),
        "comparing renderings",
    ),
    Law(
        "`past` decides about turns that the template strips",
        "test_what_the_template_strips_from_the_past_is_kept_begins_a_row_or_is_refused",
        "operators:Conversation._open",
        never("rendered", "behind"),
        "comparing texts",
    ),
    Law(
        "a template without clear delimiters is refused",
        "test_a_template_without_delimiters_is_refused_by_name_with_the_reason",
        "operators:ChatFormat._closing",
        never("longer"),
        "the second probe",
    ),
    Law(
        "a broken call is text, with a reason",
        "test_what_is_broken_is_text_with_the_reason",
        "operators.chat:_value",
        without("strict_json"),
        "refusing non-JSON values",
    ),
    Law(
        "a continued chat keeps the sampled ids",
        "test_a_call_is_parsed_and_its_result_goes_on_with_the_ids_that_were_drawn",
        "operators.serving:chat_prompt",
        without("turns", "get"),
        "the known conversation's ids",
    ),
    Law(
        "a forced beginning is context; the rest is trained",
        "test_what_a_turn_was_made_to_begin_with_is_context_and_stands_in_the_past",
        "operators:Conversation.say",
        instead(
            "self._put(RolloutTokens.drawn(begun, [-1.0] * len(begun), [0] * len(begun)),"
            " self._turn)",
            "given",
        ),
        "its being unsampled",
    ),
    Law(
        "alternatives are of the distribution sampled from",
        "test_alternatives_are_the_likeliest_of_a_full_pass",
        "operators.engine.sampler:likeliest",
        never("gone"),
        "truncation",
    ),
)
