"""The doctor's report on a run that is over, or whose scheduler is dead: what its folder holds."""

import time
from typing import Any

from dataflow.doctor.gather import describe_process
from dataflow.doctor.report import ailments
from dataflow.doctor.waiting import seconds
from dataflow.folder.ledger import Ledger, LedgerError
from dataflow.folder.run_folder import RunFolder
from dataflow.history.describe import described
from dataflow.history.resume import TIMES
from dataflow.system import processes
from dataflow.system.files import to_json

_MOST_COMMAND = 100
_TOLD = ("step", "node", "version", "loss", "reward_mean", "staleness_max", "rollouts", "dropped")


def report(folder: RunFolder, why: str) -> str:
    """What is left of a run. why: what is known of its scheduler."""
    using = processes.using(folder.path)
    lines = [
        f"{folder.path.name}: {_outcome(folder, bool(using))}",
        *([f"  {why}"] if why else []),
        "",
        "processes",
    ]
    looks = processes.look([pid for pid, _ in using], 0.2)
    for pid, command in using:
        lines.append(f"  {describe_process(looks[pid])}: {command[:_MOST_COMMAND]}")
    if not using:
        lines.append("  none has a file of this run open")
    lines += ["", "ledger", *_ledger(folder), "", "last step", f"  {_last_step(folder)}"]
    return "\n".join([*lines, *(line for part in ailments(folder) for line in part)]) + "\n"


def _outcome(folder: RunFolder, alive: bool) -> str:
    times = folder.read_json("times.json", TIMES)
    if times:
        return (
            f"over: {times.get('outcome', 'ended')}, {seconds(float(times.get('seconds') or 0.0))}"
            " of training"
        )
    return (
        "no scheduler answers, but processes of it are alive"
        if alive
        else "it did not come to its end"
    )


def _ledger(folder: RunFolder) -> list[str]:
    sinks = [
        node["name"] for node in described(folder)[0].get("nodes", []) if node.get("kind") == "sink"
    ]
    try:
        with Ledger.open(folder.ledger, readonly=True) as ledger:
            return [f"  {name}: {ledger.verdict(name)}" for name in sinks]
    except LedgerError as error:
        return [f"  {error}"]


def _last_step(folder: RunFolder) -> str:
    lines: list[dict[str, Any]] = folder.read_metrics()
    steps = [line for line in lines if "eval_accuracy" not in line]
    if not steps:
        return "none was made"
    ago = seconds(max(0.0, time.time() - folder.metrics.stat().st_mtime))
    figures = {key: steps[-1][key] for key in _TOLD if key in steps[-1]}
    return f"{to_json(figures)}, written {ago} ago; all of it in {folder.metrics.name}"
