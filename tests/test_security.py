"""The tree holds nothing by which data could become code: each law is looked up in the syntax trees
of all files.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from import_graph import parse

from dataflow import Model

ROOT = Path(__file__).parent.parent
ROOMS = ("graphs", "operators", "dataflow", "transport", "bench")

UNPICKLERS = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "shelve",
    "marshal",
    "yaml",
    "copyreg",
    "jsonpickle",
    "hickle",
}
"""Modules that make code or objects of bytes."""
OBJECT_CALLS = {
    "torch.load",
    "torch.save",
    "np.save",
    "pd.read_pickle",
    "pandas.read_pickle",
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "multiprocessing.Queue",
    "multiprocessing.Pipe",
    "multiprocessing.Process",
    "multiprocessing.Pool",
    "multiprocessing.Manager",
    "mp.Queue",
    "mp.Pipe",
    "mp.Process",
    "mp.Pool",
    "eval",
    "exec",
    "execfile",
    "__import__",
}
OBJECT_METHODS = {
    "recv_pyobj",
    "send_pyobj",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "ProcessPoolExecutor",
}
"""Whoever they are called on: they pickle what they are given, or run what they get."""
FORBIDDEN_KEYWORDS = {
    "shell": True,
    "allow_pickle": True,
    "trust_remote_code": True,
    "weights_only": False,
}
UNSAFE_FILES = (".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz")
ALLOWED = {
    (
        "operators/sandbox/inside/candidate.py",
        "exec",
    ): "runs what a model wrote, within the sandbox",
    (
        "dataflow/flags/config_file.py",
        "import yaml",
    ): "composes nodes of texts by its safe loader, makes no objects",
    (
        "operators/sandbox/inside/interpreter.py",
        "exec",
    ): "runs what a policy wrote, within the sandbox",
    ("operators/sandbox/inside/interpreter.py", "eval"): "the value of its last expression",
    (
        "operators/sandbox/inside/tester.py",
        "exec",
    ): "runs the tests of a task, within the sandbox too",
    (
        "operators/sandbox/inside/tester.py",
        "__import__",
    ): "hands on modules of the standard library, by name",
    (
        "bench/data_plane/pickle_baselines.py",
        "import pickle",
    ): "measures what others do, on data that it made itself",
    (
        "bench/weight_plane/systems.py",
        "torch.load",
    ): "measures what others do, on a file that it wrote itself",
    ("bench/weight_plane/systems.py", "torch.save"): "the other half of that",
    ("bench/weight_plane/systems.py", "'.pt'"): "the name of that file",
}
"""(file, what stands there): why."""


def sources() -> list[Path]:
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a name or attribute; `?.c` of an attribute of anything else."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def unsafe(tree: ast.AST) -> Iterator[str]:
    """What stands in a file and must not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                f"import {one.name}" for one in node.names if one.name.split(".")[0] in UNPICKLERS
            )
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.split(".")[0] in UNPICKLERS:
                yield f"import {module}"
            yield from (
                f"{module}.{one.name}"
                for one in node.names
                if f"{module}.{one.name}" in OBJECT_CALLS
            )
            yield from (one.name for one in node.names if one.name in OBJECT_METHODS)
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in OBJECT_CALLS or name.rpartition(".")[2] in OBJECT_METHODS:
                yield name
            for keyword in node.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if keyword.arg in FORBIDDEN_KEYWORDS and value is FORBIDDEN_KEYWORDS[keyword.arg]:
                    yield f"{keyword.arg}={value}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (f"'{end}'" for end in UNSAFE_FILES if node.value.endswith(end))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from (
                f"def {name}={ast.unparse(value)}"
                for name, value in defaults(node.args)
                if trusts(name, value)
            )
        elif (
            isinstance(node, ast.AnnAssign)
            and node.value is not None
            and trusts(dotted(node.target), node.value)
        ):
            yield f"def {dotted(node.target)}={ast.unparse(node.value)}"


def trusts(name: str, value: ast.expr) -> bool:
    """Whether a default lets a model's own code run."""
    if isinstance(value, ast.Call):
        value = next(
            (keyword.value for keyword in value.keywords if keyword.arg == "default"), value
        )
    return name == "trust_remote_code" and not (
        isinstance(value, ast.Constant) and value.value is False
    )


def defaults(arguments: ast.arguments) -> Iterator[tuple[str, ast.expr]]:
    plain = [*arguments.posonlyargs, *arguments.args]
    yield from zip(
        [one.arg for one in plain[len(plain) - len(arguments.defaults) :]],
        arguments.defaults,
        strict=True,
    )
    for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if value is not None:
            yield one.arg, value


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_in_the_tree_makes_code_or_objects_of_bytes(room: str) -> None:
    found = {
        (str(path.relative_to(ROOT)), what)
        for path in sources()
        if path.relative_to(ROOT).parts[0] == room
        for what in unsafe(parse(path))
    }
    assert found <= ALLOWED.keys(), found - ALLOWED.keys()


def test_every_exception_is_still_needed() -> None:
    files = {file for file, _ in ALLOWED}
    found = {(file, what) for file in files for what in unsafe(parse(ROOT / file))}
    assert ALLOWED.keys() <= found, ALLOWED.keys() - found


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import yaml",
        "from joblib import dump",
        "torch.load(f)",
        "torch.save(x, f)",
        "from torch import load",
        "eval(text)",
        "exec(text)",
        "subprocess.run(c, shell=True)",
        "np.load(f, allow_pickle=True)",
        "socket.recv_pyobj()",
        "dist.all_gather_object(a, b)",
        "os.system(c)",
        "AutoModel.from_pretrained(p, trust_remote_code=True)",
        "open('model.pt')",
        "f(x, weights_only=False)",
        "def load(*, trust_remote_code=True): ...",
        "trust_remote_code: bool = True",
        "trust_remote_code: bool = field(default=True)",
        "from multiprocessing import Queue",
    ],
)
def test_what_is_forbidden_is_found(text: str) -> None:
    assert list(unsafe(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "model.eval()",
        "build(c).eval()",
        "re.compile(p)",
        "json.load(f)",
        "trust_remote_code: bool = False",
        "run(c, shell=False)",
    ],
)
def test_what_is_harmless_is_not(text: str) -> None:
    assert not list(unsafe(ast.parse(text)))


def test_a_models_own_code_is_off_unless_it_is_asked_for() -> None:
    assert Model("anything").trust_remote_code is False


def test_weights_are_read_from_safetensors_alone() -> None:
    readers = [
        (path, node)
        for room in ("dataflow", "graphs", "operators", "transport")
        for path in sorted((ROOT / room).rglob("*.py"))
        if ".from_pretrained" in path.read_text()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call)
        and dotted(node.func).endswith(".from_pretrained")
        and not dotted(node.func).endswith(("Config.from_pretrained", "Tokenizer.from_pretrained"))
    ]
    assert readers
    for path, node in readers:
        said = {one.arg: one.value for one in node.keywords}.get("use_safetensors")
        assert isinstance(said, ast.Constant), f"{path}:{node.lineno} may read a pickled file"
        assert said.value is True, f"{path}:{node.lineno} may read a pickled file"
