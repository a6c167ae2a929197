"""Operators that take the place of others in a live run: found by name, checked against the graph,
built of their text.

A module is read anew, whatever the process has imported under its name, and of what was read the
run keeps the text: `load` makes the same operator of it in every process that starts later. What
the module imports is as that process has it.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import signal
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import structlog

from dataflow.errors import GraphError, nearest, where
from dataflow.folder.live_changes import Swap
from dataflow.graph import Graph
from dataflow.node import Operator
from dataflow.planning.plan import Plan
from dataflow.planning.wiring import edges, graph_around
from dataflow.records import Columns
from dataflow.runtime import Context
from dataflow.scorer import Keep, Scorer, adapt, split_form
from dataflow.worker import messages
from dataflow.worker.host import Settings
from dataflow.worker.link import SchedulerLink

MOST_BYTES = 256 << 10
"""The most bytes of a module's text, which every snapshot of the scheduler and every start of a
worker carries."""


def swapped(graph: Graph, swaps: Iterable[Swap]) -> Graph:
    """A graph with operators replaced, in order. Errors: GraphError."""
    for swap in swaps:
        graph = fit(graph, swap, load(swap))
    return graph


def find(swap: Swap) -> Swap:
    """The swap with its module's present text. Errors: GraphError where there is none."""
    module, attribute = _place(swap)
    if not all(
        part.isidentifier()
        for part in [*attribute.split("."), *([] if _is_file(module) else module.split("."))]
    ):
        raise GraphError(
            "an operator is named by its module and what it is called there, but got"
            f" '{swap.reference}'; write it as {swap.node}=rewards:strict or"
            f" {swap.node}=path/to/rewards.py:strict, or {swap.node}=trl:rewards:strict where it"
            " was written for another system"
        )
    if _is_file(module):
        return _with_text(swap, str(Path(module).absolute()))
    if module == "__main__":
        raise GraphError(
            f"'{swap.reference}' names the program that is running, which cannot be read anew; name"
            " the module as one would import it"
        )
    importlib.invalidate_caches()
    _import_package(swap)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise GraphError(
            f"'{swap.reference}' names module '{module}', which is not found where the run's"
            f" program looks, in {_places()}; put its file there"
        )
    if not spec.has_location or not spec.origin or not spec.origin.endswith(".py"):
        raise GraphError(
            f"'{swap.reference}' names module '{module}', which has no Python file; put the"
            " operator into one"
        )
    return _with_text(swap, spec.origin)


def _with_text(swap: Swap, file: str) -> Swap:
    try:
        text = Path(file).read_bytes()
    except OSError as error:
        raise GraphError(
            f"'{file}' cannot be read where the run is: {error.strerror}; put it there, and make it"
            " readable"
        ) from error
    if len(text) > MOST_BYTES:
        raise GraphError(
            f"'{file}' has {len(text):,} bytes, and a run keeps a module of {MOST_BYTES:,} at most;"
            " put the operator into a smaller one"
        )
    try:
        source = text.decode()
    except UnicodeDecodeError as error:
        raise GraphError(f"'{file}' is no UTF-8 text ({error}); save it as that") from error
    return replace(swap, file=file, source=source, digest=hashlib.sha256(text).hexdigest())


def load(swap: Swap) -> Any:
    """What a reference names in its module's text. Errors: GraphError where that fails, or names
    nothing.
    """
    module, attribute = _place(swap)
    named = Path(module).name
    if _is_file(module):
        module = f"{Path(module).stem}_swapped"
    else:
        _import_package(swap)
    spec = importlib.util.spec_from_file_location(module, swap.file, loader=_Kept(module, swap))
    assert spec is not None and spec.loader is not None, "it was given one"
    loaded: Any = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    try:
        spec.loader.exec_module(loaded)
    except (Exception, SystemExit) as error:
        raise _not_imported(swap, error) from error
    for part in attribute.split("."):
        if not hasattr(loaded, part):
            operators = [
                name for name, value in vars(loaded).items() if isinstance(value, Operator)
            ]
            raise GraphError(
                f"'{named}' ({swap.file}) has no '{attribute}'{nearest(attribute, operators)}; its"
                f" operators are {operators}"
            )
        loaded = getattr(loaded, part)
    return adapt(split_form(swap.reference)[0], loaded)


def fit(graph: Graph, swap: Swap, operator: Any) -> Graph:
    """The graph with one scorer or filter replaced, where the rest of a live run can stay as it is.
    Errors: GraphError.

    The new one is renamed to the node; its knobs are those that it has itself.
    """
    old = graph.operators[swap.node]
    if not isinstance(operator, Scorer):
        hint = "decorate it with @scorer or @keep" if callable(operator) else "name one"
        raise GraphError(
            f"'{swap.reference}' is a {type(operator).__name__}, and no operator that a live run"
            f" could take in; {hint}"
        )
    if isinstance(operator, Keep) != isinstance(old, Keep):
        is_now, was = ("filter" if isinstance(form, Keep) else "scorer" for form in (operator, old))
        raise GraphError(
            f"'{swap.node}' is a {was} and '{swap.reference}' is a {is_now}; swap like for like"
        )
    swapped_graph = graph.swap(swap.node, operator)
    if fault := _other_columns(swap, old, swapped_graph.operators[swap.node]):
        raise GraphError(fault)
    before, now = (
        {edge.name: edge for edge in edges(some_graph)} for some_graph in (graph, swapped_graph)
    )
    if changed := [name for name in before if before[name] != now.get(name)]:
        raise GraphError(
            f"with '{swap.reference}' in the place of '{swap.node}' other rows would travel over"
            f" {changed}, and the workers there go on as they are; start another run"
        )
    return swapped_graph


def knobs_of(operator: Operator) -> dict[str, Any]:
    """Its knobs that may change, as a run keeps them; without those of a kind that JSON has no
    values of.
    """
    knobs = {}
    for knob, settable in operator.settable().items():
        with contextlib.suppress(ValueError):
            knobs[knob] = settable.to_plain()
    return knobs


def _other_columns(swap: Swap, old: Operator, new: Operator) -> str:
    """How its columns differ from those that the nodes behind it were built for; empty: they do
    not.
    """
    was, is_now = _written(old), _written(new)
    if was == is_now:
        return ""
    return (
        f"'{swap.node}' writes {was} and '{swap.reference}' would write {is_now}, but the nodes"
        " behind it were built for the former; annotate what its function returns so"
    )


def _written(operator: Operator) -> Mapping[str, str]:
    columns: Columns = operator.provides({})
    return {name: str(kind) for name, kind in columns.items()}


def _import_package(swap: Swap) -> None:
    """The packages that its module stands in."""
    package = _place(swap)[0].rpartition(".")[0]
    if package:
        try:
            importlib.import_module(package)
        except (Exception, SystemExit) as error:
            raise _not_imported(swap, error) from error


def _place(swap: Swap) -> tuple[str, str]:
    """Module, or file, and attribute of a reference, without the form in front of it."""
    module, _, attribute = split_form(swap.reference)[1].rpartition(":")
    return module, attribute


def _is_file(module: str) -> bool:
    return module.endswith(".py")


def _places() -> list[str]:
    """Where this process finds modules, but for those of Python and of packages."""
    packages = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    places = [str(Path(place).absolute()) for place in sys.path if Path(place).is_dir()]
    return [
        place
        for place in dict.fromkeys(places)
        if not any(place.startswith(package) for package in packages)
    ]


def _not_imported(swap: Swap, error: BaseException) -> GraphError:
    return GraphError(
        f"'{swap.reference}' cannot be imported: {type(error).__name__}: {error} (at"
        f" {where(error)}); mend it, and swap again"
    )


class _Kept(SourceFileLoader):
    """Loads a module from a text that was kept, wherever its file is now."""

    def __init__(self, name: str, swap: Swap) -> None:
        super().__init__(name, swap.file)
        self._text = swap.source.encode()

    def path_stats(self, path: Any) -> Any:
        """None: no compiled file of its is looked for, or written."""
        raise OSError("it is not read from there")

    def get_data(self, path: Any) -> bytes:
        """The text."""
        return self._text


# A process that finds out whether an operator can take another one's place: imports it, checks the
# graph, and ends. Nothing of the run has changed by then: neither a module that does not end, nor
# one that ends its process, does harm.


NAME = "swap.trial"
"""The worker's name, as in the settings; no operator has it."""
TRIAL_S = 15.0
"""Seconds to import a module and check its operator; then the scheduler refuses it."""


def try_swap(graph: Graph, plan: Plan, settings: Settings, link: SchedulerLink) -> int:
    """Run it, in a process that `worker.main` has set up; the exit status."""
    # ends it also where its scheduler does not any more
    signal.setitimer(signal.ITIMER_REAL, 2 * TRIAL_S)
    link.start()
    reply = messages.Tried(life=settings.life, swap=None, error="")
    try:
        swap = settings.tries
        assert swap is not None, "it was forked for one"
        tried_swap = tried(swapped(graph, settings.swaps), plan, swap)
        reply = messages.Tried(life=settings.life, swap=tried_swap, error="")
    except GraphError as error:
        reply = messages.Tried(life=settings.life, swap=None, error=str(error))
    except BaseException as error:
        text = f"trying it failed: {type(error).__name__}: {error} (at {where(error)})"
        reply = messages.Tried(life=settings.life, swap=None, error=text)
    link.send(reply)
    link.close()
    return 0


def tried(graph: Graph, plan: Plan, request: Swap) -> Swap:
    """The swap, with its text and knobs; its operator was built once. Errors: GraphError where it
    cannot be.
    """
    swap = find(request)
    operator = fit(graph, swap, load(swap)).operators[swap.node]
    around = graph_around(graph, plan, swap.node)
    operator.build(Context(node=swap.node, graph=around, log=structlog.get_logger())).close()
    return replace(swap, knobs=knobs_of(operator))
