"""One law of the architecture per test."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from import_graph import circles, crowded, merged, modules, parsed, statements
from import_graph import imports as import_graph
from packaging.requirements import Requirement

import dataflow

ROOT = Path(__file__).parent.parent
ROOMS = ("graphs", "operators", "dataflow", "transport")
MAY_IMPORT = {
    "transport": {"transport"},
    "dataflow": {"dataflow", "transport"},
    "operators": {"operators", "dataflow"},
    "graphs": {"graphs", "operators", "dataflow"},
}
TRANSPORT_USERS = {
    "dataflow/worker/ports.py",
    "dataflow/worker/weight_ports.py",
    "dataflow/system/native.py",
    "dataflow/system/security.py",
    "dataflow/system/messages.py",
    "dataflow/worker/kept_counts.py",  # what the data plane counts, and keeps nowhere
    "dataflow/planning/model_size.py",  # tensors of a model whose config alone is there
    # dimensions of a model, which the costs of the weight plane have
    "dataflow/foresight/counts.py",
    # the data plane's rules of credit, which open nothing
    "dataflow/foresight/simulation/simulate.py",
}
"""Those outside transport/ that import it: the ports open one, for worker and inline; those in
`system` do not."""


MOST_MODULES = 25
"""In one folder."""

A_LIMIT_S = 60.0
"""Who waits for so long may wait for a model, a disk or a network, which differ from user to
user."""
OWN_LIMITS = {
    "dataflow/limits.py",
    # the ports hand over what a run says
    "transport/weights/protocol/membership.py",
    "transport/compile.py",  # without a kernel all goes on, slower
    "operators/engine/vllm/server.py",  # runs where nothing of this project can be imported
    "operators/rewards/judge_model.py",  # a judge elsewhere, which is the user's to know
    "operators/environments/declaration.py",  # a server of environments elsewhere, the same
    # the same
    "operators/environments/verifiers_form.py",
    "operators/environments/beside/verifiers_rollout.py",
    "operators/tools/toolbox.py",  # rollouts that wait for the policy hold what others wait for
    "operators/trainer.py",  # recover_within_s is no wait
    "dataflow/live/server.py",  # a browser waits for it, no run
    # no run
    "operators/serving/errors.py",
    "operators/serving/serve.py",
    "operators/warm_start/launch.py",  # before a run
    # seconds by a simulation's clock, which nobody waits
    "dataflow/foresight/simulation/scenario.py",
}


def files(*rooms: str) -> list[Path]:
    return sorted(path for room in rooms for path in (ROOT / room).rglob("*.py"))


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """The modules that a file imports anywhere."""
    return frozenset(
        module
        for node in statements(parsed(path).body)
        if not (isinstance(node, ast.ImportFrom) and node.level)
        for module in imports_of(node)
    )


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_lies_below_it(room: str) -> None:
    for path in files(room):
        rooms = {module.split(".")[0] for module in imports(path)} & set(ROOMS)
        assert rooms <= MAY_IMPORT[room], f"{name(path)} imports {rooms - MAY_IMPORT[room]}"


def test_no_file_imports_another_in_a_circle() -> None:
    found = circles(import_graph(modules(*ROOMS, "bench")))
    assert not found, (
        "these import each other; let both import what they share from a module below them"
    )


def test_the_rooms_of_the_engine_stand_above_each_other() -> None:
    """Each folder below dataflow/ is one room, and each module at its face another."""
    rooms = {path.name for path in (ROOT / "dataflow").iterdir() if path.is_dir()}

    def room(module: str) -> str:
        below = module.split(".")[1:2]
        return f"{below[0]}/" if below and below[0] in rooms else module

    assert not circles(merged(import_graph(modules("dataflow")), room))


def test_no_folder_holds_more_modules_than_one_can_overlook() -> None:
    assert not crowded((*ROOMS, "bench", "tests"), MOST_MODULES)


def test_only_the_ports_open_transports() -> None:
    users = {
        name(p)
        for p in files("dataflow")
        if any(m.split(".")[0] == "transport" for m in imports(p))
    }
    assert users <= TRANSPORT_USERS


def test_the_language_and_the_data_plane_never_import_torch_at_their_top() -> None:
    heavy = {"torch", "transformers"}
    for path in [*files("dataflow", "graphs"), *files("transport/data")]:
        top = {module.split(".")[0] for node in parsed(path).body for module in imports_of(node)}
        assert not top & heavy, f"{name(path)} imports {top & heavy}"


def imports_of(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []


def test_building_and_planning_a_graph_leaves_torch_unimported() -> None:
    program = (
        "import sys; import dataflow, graphs.aipo, graphs.grpo, graphs.rloo, graphs.dapo,"
        " graphs.ppo, graphs.distill;import graphs.sft, graphs.sorting, graphs.calculator,"
        " dataflow.foresight.command;from dataflow.testing import FakePrompts, FakeGenerator,"
        " FakeTrainer;from dataflow import *;g, m = Graph('t'), Model('m'); gen, t ="
        " FakeGenerator(model=m), FakeTrainer(model=m);t(gen(g.source(FakePrompts())));"
        " g.feedback(t.weights, gen, max_staleness=1);plan(g, Devices(cpus=2)).explain();"
        " g._repr_mimebundle_();print([name for name in ('torch', 'transformers') if name in"
        " sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("command", ["dataflow --help", "graphs.aipo --no-such-flag"])
def test_help_and_a_wrong_flag_load_nothing_that_plans_or_runs(command: str) -> None:
    heavy = r"\b(networkx|zmq|dataflow\.(planning|runner|scheduler|worker)|transport\.data)\b"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", *command.split()],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    loaded = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert len(loaded) > 100 and not [line for line in loaded if re.search(heavy, line)]


def test_nothing_is_pickled_and_no_tensor_file_runs_code() -> None:
    banned = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
    for path in files(*ROOMS):
        found = {module.split(".")[0] for module in imports(path)} & banned
        assert not found, f"{name(path)} imports {found}"
        assert not re.search(
            r"torch\.(load|save)\(|multiprocessing\.(Queue|Pipe|Process)", path.read_text()
        ), name(path)


def test_no_publish_subscribe_socket_may_drop_rows() -> None:
    for path in files(*ROOMS):
        assert not re.search(r"zmq\.(PUB|SUB|XPUB|XSUB)\b", path.read_text()), name(path)


def test_no_name_that_tests_import_stands_for_two_files(request: pytest.FixtureRequest) -> None:
    assert request.config.getoption("importmode") == "importlib", (
        "the name of a test module is its path"
    )
    folders = [ROOT / folder for folder in request.config.getini("pythonpath")]
    places: dict[str, list[Path]] = {}
    for place in (
        each for folder in folders for each in (*folder.glob("*.py"), *folder.glob("*/__init__.py"))
    ):
        places.setdefault(place.parent.name if place.stem == "__init__" else place.stem, []).append(
            place
        )
    twice = {stem: found for stem, found in places.items() if len(found) > 1}
    for path in files("tests"):
        text = path.read_text()
        if any(stem in text for stem in twice):  # which few have; parsing all files takes seconds
            wanted = {module.split(".")[0] for module in imports(path)} & twice.keys()
            assert not wanted, f"{name(path)} imports one of {[twice[each] for each in wanted]}"


def test_only_the_ledger_opens_databases() -> None:
    users = {
        name(path) for path in files(*ROOMS) if re.search(r"\bsqlite3\.connect\b", path.read_text())
    }
    assert users == {"dataflow/folder/ledger/schema.py"}


def test_a_limit_has_one_home() -> None:
    """Elsewhere nobody writes a wait of a minute or more as a number."""
    found = {f"{name(path)}:{line}" for path in files(*ROOMS) for line in long_waits(path)}
    assert not {place for place in found if place.partition(":")[0] not in OWN_LIMITS}
    assert {place.partition(":")[0] for place in found} >= OWN_LIMITS, (
        "a home that holds no limit any more"
    )


def long_waits(path: Path) -> Iterator[int]:
    """Lines with a number of seconds, under a name that says so or handed to what waits."""
    for node in ast.walk(parsed(path)):
        for called, value in named_values(node):
            is_wait = (
                called.lower().endswith(("_s", "_ms", "timeout", "seconds"))
                or called in WAITING_CALLS
            )
            if is_wait and isinstance(value, ast.Constant) and isinstance(value.value, int | float):
                in_ms = called.lower().endswith("_ms") or called == "poll"
                if A_LIMIT_S <= value.value / (1000 if in_ms else 1) < 1e5:
                    yield value.lineno


WAITING_CALLS = {"wait", "join", "poll", "settimeout", "sleep"}


def named_values(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """What a piece of source calls a value: as a name that it is put under, a parameter, or an
    argument.
    """
    match node:
        case ast.Assign(targets=[ast.Name(id=called)], value=value):
            yield called, value
        case ast.AnnAssign(target=ast.Name(id=called), value=ast.expr() as value):
            yield called, value
        case ast.keyword(arg=str(called), value=value):
            yield called, value
        case ast.Call(func=ast.Attribute(attr=called), args=[value, *_]):
            yield called, value
        case ast.FunctionDef(args=arguments) | ast.AsyncFunctionDef(args=arguments):
            plain = [*arguments.posonlyargs, *arguments.args]
            given = plain[len(plain) - len(arguments.defaults) :]
            yield from (
                (each.arg, value) for each, value in zip(given, arguments.defaults, strict=True)
            )
            beside = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            yield from ((each.arg, value) for each, value in beside if value is not None)


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_lock_has_one_version_of_each_requirement_and_it_is_allowed(python: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    locked: dict[str, list[str]] = {}
    for each in map(Requirement, lines):
        if each.marker is None or each.marker.evaluate({"python_version": python}):
            locked.setdefault(each.name, []).append(str(each.specifier).removeprefix("=="))
    for wanted in map(
        Requirement, [*project["dependencies"], *project["optional-dependencies"]["test"]]
    ):
        assert len(locked.get(wanted.name, [])) == 1, (
            f"{wanted.name} on Python {python}: renew the lock"
        )
        assert wanted.specifier.contains(locked[wanted.name][0]), f"{wanted}: {locked[wanted.name]}"


def test_a_file_over_600_lines_says_why_and_the_median_is_small() -> None:
    sizes = {path: path.read_text().count("\n") for path in files(*ROOMS)}
    for path in (path for path, size in sizes.items() if size > 600):
        assert "Over 600 lines" in (ast.get_docstring(parsed(path)) or ""), name(path)
    assert sorted(sizes.values())[len(sizes) // 2] <= 200


def test_every_module_says_in_one_sentence_what_it_is() -> None:
    for path in files(*ROOMS, "bench"):
        said = ast.get_docstring(parsed(path))
        assert said or not path.read_text().strip(), name(path)


def test_graphs_stay_under_sixty_lines() -> None:
    for path in (ROOT / "graphs").glob("*.py"):
        assert path.read_text().count("\n") < 60, name(path)


def test_the_exported_names_are_these() -> None:
    assert dataflow.__all__ == [
        "Array",
        "DataflowError",
        "Devices",
        "Graph",
        "GraphError",
        "LoRA",
        "Model",
        "Plan",
        "Prompt",
        "Result",
        "Rollout",
        "Run",
        "RunError",
        "Stream",
        "Weights",
        "WorldFailed",
        "collect",
        "inline",
        "join",
        "keep",
        "main",
        "plan",
        "run",
        "scorer",
        "verify",
    ]
    for exported in dataflow.__all__:
        assert getattr(dataflow, exported) is not None
