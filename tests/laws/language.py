"""The laws of the language, and of what a graph may import."""

import ast

from .changes import (
    always,
    assigned,
    default,
    expression,
    imports,
    instead,
    lacking,
    lengthened,
    never,
    undecorated,
    without,
)
from .law import Law


def refused(name: str) -> str:
    """The test of one graph that is to be refused."""
    return f"test_a_graph_that_cannot_work_is_refused_and_the_message_says_what_to_do[{name}]"


STRUCTURE = (
    Law(
        "graphs -> operators -> dataflow -> transport, never back",
        "test_a_room_imports_only_what_lies_below_it",
        "transport:Credit",
        imports("dataflow.records"),
        "transport without columns",
    ),
    Law(
        "nothing imports tests or bench",
        "test_nobody_sees_the_tests_or_the_benchmarks",
        "dataflow:sweep",
        imports("bench"),
        "staleness without benchmarks",
    ),
    Law(
        "only the worker's ports open transports",
        "test_only_the_ports_open_transports",
        "dataflow.planning:Edge",
        imports("transport.data"),
        "wiring without transports",
    ),
    Law(
        "building, checking, drawing and planning import no torch",
        "test_the_language_and_the_data_plane_never_import_torch_at_their_top",
        "dataflow:sweep",
        imports("torch"),
        "staleness without tensors",
    ),
    Law(
        "building, checking, drawing and planning import no torch",
        "test_building_and_planning_a_graph_leaves_torch_unimported",
        "operators.credit:advantage",
        imports("torch"),
        "credit without tensors, over a graph",
    ),
    Law(
        "decisions read no clock",
        "test_decisions_read_no_clock_draw_no_lots_and_touch_nothing",
        "dataflow.planning:plan",
        imports("time"),
        "planning without time",
    ),
    Law(
        "an operator's declaration is a light, frozen dataclass",
        "test_an_operator_is_a_frozen_declaration",
        "operators:Evaluate",
        undecorated("dataclass"),
        "Evaluate's decorator",
    ),
    Law(
        "the exported names are pinned",
        "test_the_exported_names_are_these",
        "dataflow.__init__:__all__",
        lacking("scorer"),
        "one name",
    ),
    Law(
        "a graph file stays under 60 lines",
        "test_graphs_stay_under_sixty_lines",
        "graphs.grpo:build",
        lengthened(60),
        "brevity",
    ),
)

LANGUAGE = (
    Law(
        "data and weights are separate kinds of edge",
        refused("feedback_without_weights"),
        "dataflow:Graph.feedback",
        never("isinstance", "weights"),
        "refusing a stream as weights",
    ),
    Law(
        "data and weights are separate kinds of edge",
        "test_a_scorer_takes_one_stream_and_no_weights",
        "dataflow:Scorer.__call__",
        never("isinstance", "Weights"),
        "refusing weights as a stream",
    ),
    Law(
        "each edge of g.nx names its plane",
        "test_the_networkx_graph_tells_the_planes_apart_and_its_algorithms_work_on_it",
        "dataflow:Structure.nx",
        lacking("plane", "weights"),
        "the other plane's name",
    ),
    Law(
        "a function's parameters are the columns it reads",
        refused("missing_column"),
        "dataflow:Graph._check_columns",
        instead("continue", "GraphError", "missing_column"),
        "refusing an unknown column",
    ),
    Law(
        "a function's name is the column it writes",
        "test_a_scorer_applied_to_a_stream_adds_its_column",
        "dataflow.scorer:Scorer.writes",
        lacking("output"),
        "the column",
    ),
    Law(
        "a function's defaults are its only knobs",
        refused("unknown_scorer_knob"),
        "dataflow.scorer:Scorer.configured",
        never("defaults"),
        "refusing a scorer's unknown knob",
    ),
    Law(
        "an unknown knob is refused",
        refused("unknown_knob"),
        "dataflow:_refuse_unknown",
        never("knob", "fields"),
        "the refusal",
    ),
    Law(
        "a column of another type is refused",
        refused("wrong_type"),
        "dataflow:Graph._check_columns",
        never("fits"),
        "comparing types",
    ),
    Law(
        "two operators of one name are refused",
        refused("duplicate_names"),
        "dataflow:Graph._add",
        never("identity"),
        "comparing operators",
    ),
    Law(
        "one model has one trainer",
        refused("two_trainers"),
        "dataflow:two_trainers",
        never("first_trainer"),
        "comparing trainers",
    ),
    Law(
        "a group scorer needs groups of at least two",
        refused("group_of_one"),
        "dataflow:lonely_groups",
        never("size"),
        "the group's size",
    ),
    Law(
        "chats are read as chats, texts as texts",
        refused("chats_for_a_generator_of_texts"),
        "dataflow:unlike_prompts",
        always("issues", "takes"),
        "comparing source and reader",
    ),
    Law(
        "feedback is the only cycle of a graph",
        refused("data_cycle"),
        "dataflow:Graph.apply",
        never("_inputs", "!="),
        "the check for other inputs",
    ),
    Law(
        "a stream without readers is refused",
        refused("nobody_reads"),
        "dataflow:unread_streams",
        never("sink"),
        "the check for readers",
    ),
    Law(
        "readers of a trained model get its updates",
        refused("no_feedback"),
        "dataflow:missing_feedback",
        never("fed"),
        "the check for feedback",
    ),
    Law(
        "a graph that would deadlock is refused",
        refused("too_little_in_flight"),
        "dataflow:too_little_in_flight",
        assigned("limit", "None", "generator"),
        "the generator's limit",
    ),
    Law(
        "max_staleness has no default",
        "test_the_bound_of_a_feedback_edge_has_no_default",
        "dataflow:Graph.feedback",
        default("max_staleness", "1"),
        "its being required",
    ),
    Law(
        "a negative staleness is refused",
        refused("negative_staleness"),
        "dataflow:Graph.feedback",
        expression("False", "max_staleness", "<", kind=ast.Compare),
        "comparing with 0",
    ),
    Law(
        "a swapped graph is checked again",
        "test_a_swapped_graph_is_checked_anew_as_a_whole",
        "dataflow:Graph._anew",
        without("check"),
        "the check",
    ),
    Law(
        "an operator whose column is read is not removed",
        "test_what_no_longer_fits_is_refused_by_name",
        "dataflow:Graph.remove",
        never("needed"),
        "the check for readers",
    ),
    Law(
        "a refusal says what is wrong, what was found, what to do",
        refused("missing_column"),
        "dataflow:missing_column",
        expression("''", "do", kind=ast.FormattedValue),
        "what to do",
    ),
)
