"""Every refusal that the code can make, read from its source."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PARTS = {
    "Graphs": ("dataflow/check.py", "dataflow/graph.py", "dataflow/records.py"),
    "Devices, hosts, ranks and replicas": (
        "dataflow/planning/*.py",
        "dataflow/launchers/hosted_run.py",
        "dataflow/agent/digest.py",
    ),
    "Models": (
        "dataflow/model.py",
        "dataflow/model_files.py",
        "dataflow/gguf/*.py",
        "operators/models/*.py",
    ),
    "Generators": (
        "operators/generator.py",
        "operators/engine/build.py",
        "operators/engine/budget.py",
        "operators/engine/attention.py",
        "operators/engine/parallel/*.py",
        "operators/engine/precision/*.py",
        "operators/engine/vllm/*.py",
    ),
    "Trainers": (
        "operators/trainer.py",
        "operators/training/steps.py",
        "operators/training/parallel/*.py",
        "operators/training/learner/*.py",
    ),
    "Operators in a live run": (
        "dataflow/worker/swapped.py",
        "dataflow/scheduler/live_changes.py",
        "dataflow/scheduler/swap_requests.py",
    ),
    "Episodes": ("operators/episodes/declaration.py",),
    "Environments": (
        "operators/environments/declaration.py",
        "operators/environments/session.py",
    ),
    "References, judges and values": (
        "operators/forward.py",
        "operators/forward_pass/build.py",
    ),
}
"""Where graphs, plans, knobs and models are refused, by heading of the page."""
RAISED = ("GraphError", "DoesNotFit", "GGUFError", "ModelError")
BLANK = "…"
"""What stands where a message names something."""


def refusals() -> dict[str, dict[str, str]]:
    """By heading, by what is wrong and was found: the file that says so."""
    parts: dict[str, dict[str, str]] = {}
    seen: set[str] = set()
    for heading, places in PARTS.items():
        files = parts.setdefault(heading, {})
        for path in dict.fromkeys(path for place in places for path in sorted(ROOT.glob(place))):
            for message in messages(ast.parse(path.read_text("utf-8"))):
                what = _tidy(message.partition("; ")[0])
                if what not in seen:
                    files[what] = str(path.relative_to(ROOT))
                seen.add(what)
    return parts


def messages(tree: ast.AST) -> Iterator[str]:
    """What a program's GraphErrors, GGUFErrors and ModelErrors say, and all else in three parts: in
    these faults are told.

    What an `explain` tells, docstrings, constants and other errors are none.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "explain":
            continue
        if isinstance(node, ast.Assign) and isinstance(tree, ast.Module):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        error = (
            node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        )
        if isinstance(node, ast.Call) and error in RAISED and node.args:
            if _says(message := template(node.args[0])):
                yield message
        elif error.endswith(("Error", "Died")):
            continue
        elif isinstance(node, ast.expr) and (message := template(node)):
            if _says(message) and "; " in message:
                yield message
        else:
            yield from messages(node)


def template(node: ast.AST) -> str:
    """The text of a string expression, with a blank for what is filled in; empty where it is
    none.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) or BLANK for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = template(node.left), template(node.right)
        return f"{left or BLANK}{right or BLANK}" if left or right else ""
    return ""


def _says(message: str) -> bool:
    """Whether there is a sentence between its blanks, and not only at its end."""
    return len(message.partition("; ")[0].replace(BLANK, "").strip()) > 3


def _tidy(text: str) -> str:
    return re.sub(f"{BLANK}+", BLANK, " ".join(text.split()))
