"""The laws of tools that policies call in episodes."""

from .changes import always, condition, instead, never, without
from .law import Law

TOOLS = (
    Law(
        "a tool's exception is told to the policy",
        "test_what_goes_wrong_in_a_call_is_told_to_the_policy[[fetch('raise')]-error: KeyError:"
        " 'nothing there']",
        "operators.tools.toolbox:RolloutTools._result",
        instead("raise", "ValueError"),
        "telling it",
    ),
    Law(
        "a dead tool gives no reward, whatever the episode does",
        "test_what_a_tool_fails_in_is_told_and_a_tool_that_dies_is_no_reward",
        "operators.episodes.worlds:_prepare",
        never("tools", "failure"),
        "remembering it",
    ),
    Law(
        "a result is cut at its limit",
        "test_a_long_answer_is_cut",
        "operators.tools.toolbox:shown",
        always("len"),
        "the limit",
    ),
    Law(
        "sessions of tools are bounded",
        "test_no_more_sessions_are_alive_than_there_may_be_and_the_clock_rests_meanwhile",
        "operators.session_pool:to_start",
        instead("return waiting", "waiting", "most"),
        "the bound",
    ),
    Law(
        "calls that never return disable their tool",
        "test_calls_that_never_come_back_are_no_tool_any_more",
        "operators.tools.toolbox:ToolThreads.call",
        never("_lost", "_most"),
        "counting them",
    ),
    Law(
        "a sandbox is stopped between commands",
        "test_nothing_runs_between_two_commands",
        "operators.sandbox.inside.first:serve_commands",
        without("SIGSTOP"),
        "the stop signal",
    ),
    Law(
        "exceeding memory ends the sandbox and is told",
        "test_too_much_memory_ends_the_sandbox_and_the_model_is_told",
        "operators.sandbox.session:KeptSandbox._watched",
        condition("False", "limit", "count"),
        "measuring memory",
    ),
)
