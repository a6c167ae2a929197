"""Laws of the design that no single part keeps: they are looked up in the syntax trees, or at the
seams.
"""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import operators
from dataflow import Graph, GraphError, Model, scorer
from dataflow.folder.run_folder import RunFolder
from dataflow.node import Operator
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer

ROOT = Path(__file__).parent.parent
ROOMS = ("graphs", "operators", "dataflow", "transport")

DECISIONS = (
    "dataflow/check.py",
    "dataflow/staleness.py",
    "dataflow/planning/plan.py",
    "dataflow/planning/wiring.py",
    "dataflow/planning/executors.py",
    "dataflow/scheduler/state_machine.py",
    "dataflow/scheduler/table.py",
    "dataflow/scheduler/events.py",
    "dataflow/scheduler/reducer.py",
    "dataflow/scheduler/recovery.py",
    "dataflow/scheduler/live_changes.py",
    "dataflow/scheduler/seating.py",
    "dataflow/scheduler/scaling.py",
    "dataflow/planning/placing.py",
    "dataflow/planning/seats.py",
    "dataflow/worker/acknowledgements.py",
    "dataflow/rules.py",
    "transport/data/credit.py",
    "transport/data/inbox.py",
    "transport/data/outbox.py",
    "transport/weights/layout/layout.py",
    "transport/weights/layout/reshard.py",
    "transport/weights/layout/plan.py",
    "transport/weights/protocol/roster.py",
    "transport/weights/protocol/membership.py",
    "transport/weights/protocol/segments.py",
    "transport/weights/protocol/rounds.py",
    "transport/weights/protocol/ranks.py",
)
"""Decisions that stand apart from the doing."""
DOING = {
    "time",
    "datetime",
    "random",
    "secrets",
    "os",
    "socket",
    "select",
    "threading",
    "subprocess",
    "zmq",
    "sqlite3",
}
"""What a decision has no use for: clocks, chance, and the world outside."""
SCHEDULER = (
    "control",
    "control_server",
    "reducer",
    "table",
    "events",
    "state_machine",
    "scaling",
    "recovery",
    "live_changes",
)
"""What the scheduler consists of at run time."""
WAITS = {"wait", "acquire", "result", "communicate", "get", "join"}
"""Methods that wait for ever when they are called with nothing."""
MAY_WAIT = rf"\.({'|'.join(sorted(WAITS))})\(\)|select\.select|subprocess\."
ENDLESS = {
    (
        "dataflow/scoring/server.py",
        "todo.get()",
    ): "a pool's process: its owner has the deadline, and kills it",
    (
        "transport/weights/sharded/control.py",
        "self._jobs.get()",
    ): "a daemon for one epoch: its owner's to end",
    (
        "transport/weights/sharded/process_group.py",
        "work.wait()",
    ): "behind a loop with a deadline: it is completed",
    ("dataflow/live/server.py", "connection.lost.wait()"): "below an asyncio.timeout",
    (
        "operators/engine/parallel/lockstep.py",
        "work.wait()",
    ): "has the time-out of its process group",
    (
        "dataflow/foresight/choice/ways_out.py",
        "FLAGS.get()",
    ): "a context variable, which never waits",
    ("dataflow/launchers/named.py", "HOSTED.get()"): "a context variable, which never waits",
    (
        "dataflow/launchers/ray_agent.py",
        "self._agent.wait()",
    ): "an actor's one task; its agent ends with it",
    (
        "dataflow/scoring/server.py",
        "process.wait()",
    ): "of a process that was sent SIGKILL in the line before",
    (
        "operators/sandbox/runner.py",
        "process.communicate()",
    ): "of a process that was sent SIGKILL before",
    (
        "operators/sandbox/session.py",
        "self._process.wait()",
    ): "of a process that was sent SIGKILL in the line before",
    (
        "operators/session_pool.py",
        "asyncio.Event().wait()",
    ): "a task, which its event loop cancels at its end",
    ("operators/session_pool.py", "waiting.result()"): "of a future that is done",
    (
        "operators/tools/toolbox.py",
        "asyncio.Event().wait()",
    ): "a task, which its event loop cancels at its end",
    ("operators/tools/toolbox.py", "task.result()"): "of a task that is done",
    (
        "operators/tools/mcp_server.py",
        "self._begun.wait()",
    ): "a task, which is waited for with a time-out",
    (
        "operators/tools/mcp_server.py",
        "self._over.wait()",
    ): "a task, which ends with its session, or is cancelled",
    ("operators/tools/mcp_server.py", "answer.result()"): "of a task that is done",
    (
        "operators/serving/app.py",
        "call.news.wait()",
    ): "a task, which the next line waits for with a time-out",
    ("operators/serving/serve.py", "done.result()"): "of a call that is done",
    (
        "operators/warm_start/launch.py",
        "process.wait()",
    ): "a timer kills the process at its deadline",
    (
        "transport/data/sender.py",
        "self.connection.get()",
    ): "takes what is there, and never waits",
}
"""(file, call): why it may stand there."""


def trees(pattern: str, *rooms: str) -> Iterator[tuple[str, ast.Module]]:
    """Name and syntax tree of every file of some rooms in which something looks like the
    pattern.
    """
    for room in rooms:
        for path in sorted((ROOT / room).rglob("*.py")):
            if re.search(pattern, text := path.read_text()):
                yield str(path.relative_to(ROOT)), ast.parse(text)


def imported(tree: ast.AST) -> set[str]:
    """First names of all that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def roots(tree: ast.AST) -> set[str]:
    return {name.split(".")[0] for name in imported(tree)}


def calls(tree: ast.AST) -> Iterator[tuple[str, str, ast.Call]]:
    """Of every call of a method: what it is called on, its name, the call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield ast.unparse(node.func.value), node.func.attr, node


def endless(tree: ast.AST) -> Iterator[str]:
    """Calls that wait and say not for how long."""
    for on, name, call in calls(tree):
        said = len(call.args) + len(call.keywords)
        if (
            (name in WAITS and not said)
            or (name == "select" and on == "select" and len(call.args) == 3)
            or (
                on == "subprocess"
                and name in ("run", "check_output", "check_call", "call")
                and not any(keyword.arg == "timeout" for keyword in call.keywords)
            )
        ):
            yield f"{on}.{name}()"


def test_nobody_sees_the_tests_or_the_benchmarks() -> None:
    for name, tree in trees(r"\b(tests|bench)\b", *ROOMS):
        assert not roots(tree) & {"tests", "bench"}, name


@pytest.mark.parametrize("file", DECISIONS)
def test_decisions_read_no_clock_draw_no_lots_and_touch_nothing(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    assert not roots(tree) & DOING
    assert not {name for _, name, _ in calls(tree)} & {
        "now",
        "monotonic",
        "perf_counter",
        "default_rng",
    }


def test_no_rollout_and_no_weight_passes_through_the_scheduler() -> None:
    for part in SCHEDULER:
        found = imported(ast.parse((ROOT / "dataflow" / "scheduler" / f"{part}.py").read_text()))
        heavy = {
            name
            for name in found
            if name.split(".")[0] in ("pyarrow", "torch", "transport", "numpy")
        }
        assert not heavy, f"'{part}' could read rows or weights by {heavy}"
        assert not found & {
            "dataflow.worker.ports",
            "dataflow.worker.loop",
        }, f"'{part}' could open an edge"


def test_every_wait_has_a_deadline() -> None:
    found = {(name, call) for name, tree in trees(MAY_WAIT, *ROOMS) for call in endless(tree)}
    assert found <= ENDLESS.keys(), found - ENDLESS.keys()


@pytest.mark.parametrize(
    "text",
    [
        "thread.join()",
        "done.result()",
        "lock.acquire()",
        "queue.get()",
        "select.select(a, b, c)",
        "subprocess.run(command, check=True)",
        "process.communicate()",
        "event.wait()",
    ],
)
def test_a_wait_without_a_deadline_is_found(text: str) -> None:
    assert list(endless(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "thread.join(2.0)",
        "', '.join(names)",
        "found.get(key)",
        "subprocess.run(c, timeout=5)",
        "event.wait(timeout=1)",
    ],
)
def test_a_wait_with_a_deadline_is_not(text: str) -> None:
    assert not list(endless(ast.parse(text)))


def test_no_full_tensor_is_gathered_on_the_weight_plane() -> None:
    gathers = (
        r"full_tensor|(all_)?gather(_into_tensor|_object)?|broadcast(_object_list)?|redistribute"
    )
    for name, tree in trees(gathers, "transport", "dataflow"):
        found = {f"{on}.{method}" for on, method, _ in calls(tree) if re.fullmatch(gathers, method)}
        assert not found, f"{name} calls {found}"


def test_an_operator_is_a_frozen_declaration() -> None:
    declared = set()
    for module in pkgutil.iter_modules(operators.__path__):
        if module.name in (
            "prompts",
            "generator",
            "trainer",
            "evaluate",
            "forward",
            "demonstrations",
            "filters",
        ):
            for _, kind in inspect.getmembers(
                importlib.import_module(f"operators.{module.name}"), inspect.isclass
            ):
                if issubclass(kind, Operator) and kind.__module__.startswith("operators."):
                    declared.add(kind)
    assert {"Prompts", "Generator", "Trainer", "Evaluate", "Logprobs"} <= {
        kind.__name__ for kind in declared
    }
    for kind in declared:
        its_own = vars(kind).get("__dataclass_params__")
        assert its_own is not None and its_own.frozen, f"{kind.__name__} is no frozen dataclass"


@scorer
def reward(completion: str) -> float:
    return float(len(completion))


def graph_of(
    prompts_per_step: int, in_flight: int | None = None
) -> tuple[Graph, FakeGenerator, FakeTrainer]:
    policy = Model("policy")
    graph, generator = Graph("test"), FakeGenerator(model=policy, in_flight=in_flight)
    trainer = FakeTrainer(model=policy, prompts_per_step=prompts_per_step)
    trainer(reward(generator(graph.source(FakePrompts()))))
    return graph, generator, trainer


def test_the_bound_of_a_feedback_edge_has_no_default() -> None:
    graph, generator, trainer = graph_of(prompts_per_step=2)
    with pytest.raises(GraphError, match="one number, but got neither; give max_staleness="):
        graph.feedback(trainer.weights, generator)
    with pytest.raises(
        GraphError,
        match=r"too many positional arguments; write feedback\(weights, reader, \.\.\.\)",
    ):
        graph.feedback(trainer.weights, generator, 3)  # type: ignore[misc]
    graph.feedback(trainer.weights, generator, max_staleness=3)
    graph.check()


def test_a_swapped_graph_is_checked_anew_as_a_whole() -> None:
    graph, generator, trainer = graph_of(prompts_per_step=2, in_flight=4)
    graph.feedback(trainer.weights, generator, max_staleness=1)
    graph.check()
    with pytest.raises(GraphError, match="deadlock"):
        graph.swap("trainer", FakeTrainer(model=Model("policy"), prompts_per_step=5))


def test_a_rollouts_file_is_read_by_sql_without_this_project(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    rows = pa.RecordBatch.from_pydict(
        {"group_id": [0, 0, 1], "reward": [1.0, 0.0, 0.5], "tokens": [[1, 2], [3], []]}
    )
    path = RunFolder.create(tmp_path, "test").rollouts_of().write(1, [rows])
    program = (
        "import sys, duckdb, pyarrow as pa; rollouts ="
        " pa.ipc.open_file(pa.memory_map(sys.argv[1])).read_all();print(duckdb.sql('select"
        " group_id, avg(reward), sum(len(tokens)) from rollouts group by 1 order by 1').fetchall(),"
        " [name for name in sys.modules if name.split('.')[0] in ('dataflow', 'transport',"
        " 'operators')])"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert done.stdout.strip() == "[(0, 0.5, 3), (1, 0.5, 0)] []", done.stderr
