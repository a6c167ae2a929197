"""The summary of a run, computed from its folder."""

import contextlib
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from dataflow.display import Summary
from dataflow.display.formatting import silence
from dataflow.folder.copies.store import CONFIG, Copies
from dataflow.folder.faults import describe_faults, read_faults, restarts
from dataflow.folder.ledger import Ledger, LedgerError
from dataflow.folder.live_changes import read_live_changes
from dataflow.folder.retention import not_kept
from dataflow.folder.run_folder import RunFolder
from dataflow.history.bottleneck import bounded
from dataflow.history.describe import described
from dataflow.history.resume import TIMES
from dataflow.planning.hosts import named
from dataflow.structure import lines_of

_WINDOW = 20
_CAUSES = 4
"""Failures that the summary names, at most."""


def window_of(steps: int) -> int:
    """Steps at the begin and at the end of a run whose means are shown: as many of a long run as of
    a longer one.

    >>> [window_of(steps) for steps in (1, 30, 300, 3000)]
    [1, 10, 20, 20]
    """
    return max(1, min(_WINDOW, steps // 3))


def summarize(folder: RunFolder, verdict: str, is_clean: bool) -> Summary:
    """The summary of a run: its metrics, its times (`times.json`, written when it ends), and the
    ledger's verdict.
    """
    graph, config = described(folder)
    leaders = config.get("leading") or [None]
    lines = lines_of(folder.read_metrics(), leaders[0])
    times = folder.read_json("times.json", TIMES)
    steps = [line for line in lines if "eval_accuracy" not in line]
    scores = [line["eval_accuracy"] for line in lines if line.get("eval_accuracy") is not None]
    rewards = [line["reward_mean"] for line in steps if line.get("reward_mean") is not None]
    window = window_of(len(rewards))
    seconds = times.get("seconds")
    bound = bounded(seconds, times.get("busy_seconds", {}), times.get("beside_seconds", {}), config)
    efficiency = bound.share if bound else None
    path, program = _from_here(folder.path), _program()
    quoted = shlex.quote(str(path))
    return Summary(
        graph=graph.get("name", path.name),
        outcome=times.get("outcome", "not finished"),
        steps=len(steps),
        wall_s=seconds,
        rollouts=sum(line.get("rollouts", 0) for line in steps),
        dropped=sum(sum((line.get("dropped") or {}).values()) for line in steps),
        failed=_added(steps, "failed"),
        does_not_apply=_added(steps, "does_not_apply"),
        reward_before=_mean(rewards[:window]),
        reward_after=_mean(rewards[-window:]),
        reward_steps=window,
        accuracy_before=scores[0] if scores else None,
        accuracy_after=scores[-1] if len(scores) > 1 else None,
        efficiency=efficiency,
        bounded_by=bound.node if bound else "",
        staleness_mean=_mean(
            [line["staleness_mean"] for line in steps if "staleness_mean" in line]
        ),
        staleness_max=max(
            (line["staleness_max"] for line in steps if "staleness_max" in line), default=None
        ),
        foreseen=_foreseen(folder.foreseen, steps, efficiency),
        restarts=restarts(folder.path),
        faults=tuple(describe_faults(read_faults(folder.path))),
        changes=tuple((change.verb, str(change)) for change in read_live_changes(folder)),
        hosts=_hosts(config.get("hosts", {})),
        signal=silence(steps),
        verdict=verdict,
        is_clean=is_clean,
        folder=str(path),
        models=_models(folder, graph),
        folder_bytes=folder.size_bytes,
        not_kept=_not_kept(folder),
        commands=(
            *(
                ()
                if times.get("outcome") == "finished"
                else ((f"{program} resume {quoted}", "go on from here"),)
            ),
            *_from_copies(program, config, times),
            (live_command(folder), "the run in a browser: graph, curves, rollouts, faults"),
            (f"{program} verify {quoted}", "the ledger, recomputed from the folder"),
            (f"{program} show {quoted}", "this summary again"),
            (str(path / "curve.svg"), "reward and accuracy by step"),
            (str(path / "graph.svg"), "the graph as it was placed"),
            (str(path / "trace.json"), "who worked when, for ui.perfetto.dev"),
        ),
    )


def _foreseen(
    prediction: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], efficiency: float | None
) -> tuple[str, ...]:
    """The forecast beside the measurements; steps count without the first tenth, in which nothing
    is full yet.
    """
    if not prediction:
        return ()
    counted = [
        float(line["seconds"])
        for line in steps[len(steps) // 10 :]
        if _is_number(line.get("seconds"))
    ]
    came = {
        "s a step": (counted[-1] - counted[0]) / (len(counted) - 1) if len(counted) > 1 else None,
        "efficiency": efficiency,
        "staleness": _mean(
            [line["staleness_mean"] for line in steps if _is_number(line.get("staleness_mean"))]
        ),
    }
    named = {"s a step": "step_s", "efficiency": "efficiency", "staleness": "staleness_mean"}
    lines = []
    for name, measured in came.items():
        before = prediction.get(named[name])
        if _is_number(before) and measured is not None:
            off = f" ({measured / before - 1:+.0%})" if name == "s a step" and before > 0 else ""
            lines.append(f"{before:.3g} {name}, came {measured:.3g}{off}")
    return tuple(lines)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float)


def _from_copies(
    program: str, config: Mapping[str, Any], times: Mapping[str, Any]
) -> tuple[tuple[str, str], ...]:
    copies = msgspec.convert(config.get(CONFIG) or None, Copies | None)
    if copies is None or times.get("outcome") == "finished":
        return ()
    return ((f"{program} resume --from '{copies.place}'", "go on where this folder is not seen"),)


def _hosts(placed: Mapping[str, Sequence[str]]) -> str:
    """`prompts and generator on a and b, trainer on c`."""
    alike: dict[str, list[str]] = {}
    for node, hosts in placed.items():
        alike.setdefault(named(hosts), []).append(node)
    return ", ".join(f"{named(nodes, len(nodes))} on {hosts}" for hosts, nodes in alike.items())


def _not_kept(folder: RunFolder) -> str:
    with contextlib.suppress(LedgerError), Ledger.open(folder.ledger, readonly=True) as ledger:
        return ", ".join(
            f"rollouts of {node} up to step {step} not kept"
            for node, step in not_kept(ledger.facts()).items()
        )
    return ""


def live_command(folder: RunFolder) -> str:
    """How the page of a run is opened from here."""
    return f"{_program()} live {shlex.quote(str(_from_here(folder.path)))}"


def _models(folder: RunFolder, graph: Mapping[str, Any]) -> tuple[str, ...]:
    """The newest checkpoint of each trainer."""
    names = [None, *(str(node.get("name")) for node in graph.get("nodes", ()))]
    stores = [folder.checkpoints_of(name) for name in names]
    return tuple(
        str(_from_here(store.folder(max(store.steps())))) for store in stores if store.steps()
    )


def _from_here(path: Path) -> Path:
    """The shorter way to a path: from the working folder, where it lies below that."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _program() -> str:
    """How the `dataflow` command is called from this shell: by its name, or through the Python of
    its environment.
    """
    return (
        "dataflow"
        if shutil.which("dataflow")
        else f"{shlex.quote(str(_from_here(Path(sys.executable))))} -m dataflow"
    )


def _added(steps: Sequence[Mapping[str, Any]], figure: str) -> str:
    """Counts by name that each step has, added up: `15 rollouts (judge: hung 12, reward: raised
    3)`.
    """
    total: Counter[str] = Counter()
    for line in steps:
        total.update(line.get(figure) or {})
    if not total:
        return ""
    causes = [f"{name} {count:,}" for name, count in total.most_common(_CAUSES)]
    more = [f"{len(total) - _CAUSES} more"] * (len(total) > _CAUSES)
    return f"{total.total():,} rollouts ({', '.join(causes + more)})"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
