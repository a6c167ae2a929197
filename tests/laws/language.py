"""The laws of the language, and of what a graph may import."""

from .law import Law

GRAPH, CHECK = "dataflow/graph.py", "dataflow/check.py"
ARCHITECTURE, LAWS, SECURITY = "tests/test_architecture.py", "tests/test_laws.py", "tests/test_security.py"


def refused(name: str) -> str:
    """The test of one graph that is to be refused."""
    file = "tests/dataflow/test_refused_graphs.py"
    return f"{file}::test_a_graph_that_cannot_work_is_refused_and_the_message_says_what_to_do[{name}]"


STRUCTURE = (
    Law(
        "graphs -> operators -> dataflow -> transport, never back",
        f"{ARCHITECTURE}::test_a_room_imports_only_what_lies_below_it",
        "transport/data/credit.py",
        "from dataclasses import dataclass\n",
        "from dataclasses import dataclass\n\nfrom dataflow.records import GROUP_ID as GROUP_ID\n",
        "that the data plane knows no column",
    ),
    Law(
        "nobody sees tests and bench",
        f"{LAWS}::test_nobody_sees_the_tests_or_the_benchmarks",
        "dataflow/staleness.py",
        "import numpy as np\n",
        "import numpy as np\n\nimport bench as bench\n",
        "that staleness knows no benchmark",
    ),
    Law(
        "only the worker's ports open transports",
        f"{ARCHITECTURE}::test_only_the_ports_open_transports",
        "dataflow/planning/wiring.py",
        "from dataclasses import dataclass\n",
        "from dataclasses import dataclass\n\nfrom transport.data import Receiver as Receiver\n",
        "that the wiring knows no transport",
    ),
    Law(
        "building, checking, drawing and planning never import torch",
        f"{ARCHITECTURE}::test_the_language_and_the_data_plane_never_import_torch_at_their_top",
        "dataflow/staleness.py",
        "import numpy as np\n",
        "import numpy as np\nimport torch as torch\n",
        "that staleness has no tensors",
    ),
    Law(
        "building, checking, drawing and planning never import torch",
        f"{ARCHITECTURE}::test_building_and_planning_a_graph_leaves_torch_unimported",
        "operators/credit.py",
        "import numpy as np\n",
        "import numpy as np\nimport torch as torch\n",
        "that credit has no tensors, seen from a whole graph",
    ),
    Law(
        "decisions are pure: they read no clock",
        f"{LAWS}::test_decisions_read_no_clock_draw_no_lots_and_touch_nothing",
        "dataflow/planning/plan.py",
        "from dataclasses import dataclass",
        "import time as time\nfrom dataclasses import dataclass",
        "that planning knows no time",
    ),
    Law(
        "an operator is declared by a light, frozen dataclass",
        f"{LAWS}::test_an_operator_is_a_frozen_declaration",
        "operators/evaluate.py",
        "@dataclass(frozen=True, eq=False)\nclass Evaluate",
        "class Evaluate",
        "the decorator of Evaluate",
    ),
    Law(
        "the exported names are these",
        f"{ARCHITECTURE}::test_the_exported_names_are_these",
        "dataflow/__init__.py",
        '"scorer",',
        "",
        "one name of the language",
    ),
    Law(
        "a graph file stays under 60 lines",
        f"{ARCHITECTURE}::test_graphs_stay_under_sixty_lines",
        "graphs/grpo.py",
        "from functools import partial\n",
        "from functools import partial\n" + "\n" * 60,
        "brevity",
    ),
)

LANGUAGE = (
    Law(
        "data and parameters are two kinds of edge that do not mix",
        refused("feedback_without_weights"),
        GRAPH,
        "if not isinstance(weights, Weights):",
        "if False:",
        "the refusal of a stream as weights",
    ),
    Law(
        "data and parameters are two kinds of edge that do not mix",
        "tests/dataflow/test_scorer.py::test_a_scorer_takes_one_stream_and_no_weights",
        "dataflow/scorer.py",
        "if isinstance(stream, Weights):",
        "if False:",
        "the refusal of weights as a stream",
    ),
    Law(
        "the plane stands on each edge of g.nx",
        "tests/dataflow/test_graph.py::test_the_networkx_graph_tells_the_planes_apart_and_its_algorithms_work_on_it",
        "dataflow/structure.py",
        'plane="weights",',
        'plane="data",',
        "the other plane's name",
    ),
    Law(
        "a function's parameters are the columns it reads",
        refused("missing_column"),
        GRAPH,
        "            if column not in stream.columns:\n"
        "                raise GraphError(missing_column(self, operator, column, stream))\n",
        "            if column not in stream.columns:\n                continue\n",
        "the refusal of a column that nobody provides",
    ),
    Law(
        "a function's name is the column it writes",
        "tests/dataflow/test_scorer.py::test_a_scorer_applied_to_a_stream_adds_its_column",
        "dataflow/scoring/declaration.py",
        "return {**columns, ERROR: pa.string(), self.name: self.output}",
        "return {**columns, ERROR: pa.string()}",
        "the column",
    ),
    Law(
        "a function's defaults are knobs, and there are no others",
        refused("unknown_scorer_knob"),
        "dataflow/scorer.py",
        "if knob not in self.signature.defaults:",
        "if False:",
        "the refusal of an unknown knob of a scorer",
    ),
    Law(
        "an unknown knob is refused",
        refused("unknown_knob"),
        "dataflow/node.py",
        "            if knob not in known:\n",
        "            if False:\n",
        "the refusal of an unknown knob of an operator",
    ),
    Law(
        "a column of another type is refused",
        refused("wrong_type"),
        GRAPH,
        "if not fits(stream.columns[column], annotation):",
        "if False:",
        "the comparison of types",
    ),
    Law(
        "two operators of one name are refused",
        refused("duplicate_names"),
        GRAPH,
        "if known is not None and known.identity() != operator.identity():",
        "if False:",
        "the comparison of operators",
    ),
    Law(
        "one model has one trainer",
        refused("two_trainers"),
        CHECK,
        "            if other != name:\n",
        "            if False:\n",
        "the comparison of trainers",
    ),
    Law(
        "a group scorer needs groups of two or more",
        refused("group_of_one"),
        CHECK,
        "if size == 1:",
        "if False:",
        "the look at the group's size",
    ),
    Law(
        "the data edges are a DAG: the only cycle is the feedback",
        refused("data_cycle"),
        GRAPH,
        "if key in self._inputs and self._inputs[key] != (stream,):",
        "if False:",
        "the look for other inputs",
    ),
    Law(
        "a stream that nobody reads is refused",
        refused("nobody_reads"),
        CHECK,
        'if call.operator.kind != "sink" and (call.output.node, call.output.lane) not in read:',
        "if False:",
        "the look for readers",
    ),
    Law(
        "a reader of a trained model sees what is learned",
        refused("no_feedback"),
        CHECK,
        "if operator.uses in trained and not operator.trains and name not in fed:",
        "if False:",
        "the look for a feedback",
    ),
    Law(
        "a graph that would deadlock is refused",
        refused("too_little_in_flight"),
        CHECK,
        "limit = generator.traits.in_flight",
        "limit = None",
        "the look at the generator's limit",
    ),
    Law(
        "max_staleness is written down: it has no default",
        f"{LAWS}::test_the_bound_of_a_feedback_edge_has_no_default",
        GRAPH,
        "reader: Operator, *, max_staleness: int) -> None:",
        "reader: Operator, *, max_staleness: int = 1) -> None:",
        "the need to say it",
    ),
    Law(
        "a staleness below 0 is refused",
        refused("negative_staleness"),
        GRAPH,
        " or max_staleness < 0:",
        ":",
        "the comparison with 0",
    ),
    Law(
        "a swapped graph is checked anew",
        f"{LAWS}::test_a_swapped_graph_is_checked_anew_as_a_whole",
        GRAPH,
        "        graph.check()\n        return graph\n",
        "        return graph\n",
        "the check",
    ),
    Law(
        "a refusal says what is wrong, what was found, what to do",
        refused("missing_column"),
        CHECK,
        "do = f'add it to Prompts(columns=...), or apply a @scorer called \"{column}\" first'",
        'do = ""',
        "what to do",
    ),
)
