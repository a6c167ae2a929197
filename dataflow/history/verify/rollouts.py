"""Whether the rollouts on disk are those that the ledger says were trained: whole, once, and in
time."""

import itertools
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from dataflow.folder.finished import File
from dataflow.folder.knob_changes import bound_at
from dataflow.folder.ledger import Ledger
from dataflow.folder.ledger.places import HOME, holders
from dataflow.folder.ledger.refusals import some
from dataflow.folder.retention import gone
from dataflow.folder.run_folder import RunFolder
from dataflow.history.resume import forgotten
from dataflow.history.verify.digest import RolloutFile, digests
from dataflow.history.verify.facts import Findings, SinkRows, VerifyFacts
from dataflow.planning.hosts import named
from dataflow.records import AnyArray
from dataflow.staleness import NO_TOKEN


def judge_steps(facts: VerifyFacts, node: str, sink: SinkRows, findings: Findings) -> int | None:
    """Compare each step file with the ledger; returns the largest staleness in versions, None
    without any."""
    trained = sink.at("trained")
    folder = _folder(facts, node, "step")
    standing: dict[str, list[tuple[int, AnyArray]]] = {}
    bound = facts.max_staleness.get(node)
    largest: int | None = None
    paths = _kept(
        facts, node, [(step, folder / f"step-{step:06d}.arrow") for step in sink.steps], findings
    )
    for step, path, found in digests(paths, findings, partial(_is_gone, facts, node)):
        wanted = trained.get(step, {})
        _same_groups(path.name, node, step, wanted, found, findings)
        for source in wanted:
            standing.setdefault(source, []).append((step, found.groups))
        chosen = found.oldest[found.oldest != NO_TOKEN]
        if len(chosen):
            ages = (step - 1) - chosen
            largest = max(largest or 0, int(ages.max()))
            if bound is not None:
                held = bound_at(facts.changes, node, step, bound)
                _in_time(node, step, int(ages.max()), found.newest, held, findings)
    for source, files in standing.items():
        _once(source, files, findings)
    return largest


def judge_evaluations(facts: VerifyFacts, node: str, sink: SinkRows, findings: Findings) -> None:
    """Compare each evaluation file with the ledger."""
    folder = _folder(facts, node, "eval")
    evaluated = sink.at("evaluated")
    paths = _kept(
        facts,
        node,
        [(step, folder / f"eval-{step:06d}.arrow") for step in sorted(evaluated)],
        findings,
    )
    for step, path in paths:
        if not path.exists():
            findings.note(f"the evaluation of '{node}' at step {step} has no file {path.name}")
    for step, path, found in digests(
        [(step, path) for step, path in paths if path.exists()],
        findings,
        partial(_is_gone, facts, node),
    ):
        _same_groups(path.name, node, step, evaluated[step], found, findings)
        if found.too_early:
            findings.fault(
                f"{found.too_early} rollouts in {path.name} are older than their min_version"
            )


def _kept(
    facts: VerifyFacts, node: str, paths: list[tuple[int, Path]], findings: Findings
) -> list[tuple[int, Path]]:
    """Without files that the run removed itself, or that lie on other hosts: of what stood in them
    the ledger alone tells."""
    paths = _here(facts, node, paths, findings)
    upto = facts.not_kept.get(node, 0)
    found = [(step, path) for step, path in paths if step > upto or path.exists()]
    if len(found) < len(paths):
        findings.note(
            f"the rollouts of {len(paths) - len(found)} steps of '{node}' up to step {upto} were"
            " not kept: what became of their groups is judged by the ledger alone"
        )
    return found


def _here(
    facts: VerifyFacts, node: str, paths: list[tuple[int, Path]], findings: Findings
) -> list[tuple[int, Path]]:
    """Without those that other hosts have, which have no folder in common with this one."""
    have = {
        step: holders(facts.places, str(path.relative_to(facts.folder.path)))
        for step, path in paths
    }
    away = [step for step, _ in paths if HOME not in have[step]]
    if away:
        hosts = named(host for step in away for host in have[step])
        findings.note(
            f"the rollouts of {len(away)} steps of '{node}' are on host {hosts}, and not here: what"
            " became of their groups is judged by the ledger alone"
        )
    return [(step, path) for step, path in paths if HOME in have[step]]


def _is_gone(facts: VerifyFacts, node: str, step: int) -> bool:
    """Whether a run under way has removed the file of a step since its ledger was read."""
    with Ledger.open(facts.folder.ledger, readonly=True) as ledger:
        return step <= gone(ledger, node)


def _same_groups(
    name: str,
    node: str,
    step: int,
    ended: Mapping[str, AnyArray],
    found: RolloutFile,
    findings: Findings,
) -> None:
    there = list(zip(found.sources.tolist(), found.groups.tolist(), strict=True))
    tells = any(found.sources)
    wanted = {
        (source if tells else "", group)
        for source, groups in ended.items()
        for group in groups.tolist()
    }
    if absent := wanted - set(there):
        findings.fault(
            f"groups {_named(absent)} ended at step {step} of '{node}' but do not stand in {name}"
        )
    if extra := set(there) - wanted:
        findings.fault(
            f"groups {_named(extra)} stand in {name} but did not end at step {step} of '{node}'"
        )
    if broken := set(itertools.compress(there, found.broken)):
        findings.fault(f"groups {_named(broken)} in {name} are not whole")


def _named(groups: Collection[tuple[str, int]]) -> str:
    """Numbers of groups, each with its source where that is told."""
    sources = sorted({source for source, _ in groups})
    by_source = {
        source: some({group for of, group in groups if of == source}) for source in sources
    }
    return ", and ".join(
        f"{found} of '{source}'" if source else str(found) for source, found in by_source.items()
    )


def _once(source: str, files: list[tuple[int, AnyArray]], findings: Findings) -> None:
    """No group stands in the files of two steps."""
    groups = np.concatenate([groups for _, groups in files])
    steps = np.repeat([step for step, _ in files], [len(groups) for _, groups in files])
    order = np.lexsort((steps, groups))
    groups, steps = groups[order], steps[order]
    for at in np.flatnonzero(groups[1:] == groups[:-1]).tolist():
        first = steps[np.searchsorted(groups, groups[at])]
        findings.fault(
            f"group {groups[at]} of '{source}' stands in the files of steps {first} and"
            f" {steps[at + 1]}"
        )


def _in_time(node: str, step: int, age: int, newest: int, bound: int, findings: Findings) -> None:
    """age: of the oldest token, in versions. newest: version of the newest."""
    if age > bound:
        findings.fault(
            f"step {step} of '{node}' trained rollouts {age} versions old; the bound is {bound}"
        )
    if newest > step - 1:
        findings.fault(
            f"step {step} of '{node}' trained rollouts of version {newest}, which did not exist"
            " before it"
        )


def judge_folder(
    facts: VerifyFacts, node: str, sink: SinkRows, findings: Findings, most_bytes: float
) -> None:
    """Compare what else a trainer has left with the ledger: checkpoints, of which so many bytes are
    read, the newest first; and steps that the ledger does not know."""
    folder = facts.folder
    own = (
        node
        if any(
            place.is_dir() for place in (folder.rollouts / node, folder.path / "checkpoints" / node)
        )
        else None
    )
    checkpoints = folder.checkpoints_of(own)
    unread = 0
    for step in reversed(checkpoints.steps()):
        size = checkpoints.size_bytes(step)
        most_bytes -= size
        unread += most_bytes < 0
        damage = checkpoints.damage(step, read=most_bytes >= 0)
        if damage and checkpoints.folder(step).exists():  # else the run has removed it meanwhile
            findings.fault(
                f"the checkpoint of step {step} of '{node}' is damaged: {damage}; a resume goes on"
                " from an older one, or from the start, and makes the steps since again"
            )
    if unread:
        findings.note(
            f"{unread} checkpoints of '{node}' are as large as they were; --deep reads them, too"
        )
    with Ledger.open(folder.ledger, readonly=True) as ledger:
        if lost := forgotten(folder, ledger, node, own):
            findings.fault(lost)
    last = sink.steps[-1] if sink.steps else 0
    if left := [step for step, _ in folder.rollouts_of(own).files("step") if step > last]:
        findings.note(
            f"there are rollouts of steps {some(left)} that '{node}' has not committed: "
            "a crash between write and commit, or a line that was taken back"
        )


def judge_finished(folder: RunFolder, findings: Findings) -> None:
    """Look through what generators have kept of groups without an outcome."""
    for path in sorted(
        each
        for ending in ("arrows", "parts", "turns")
        for each in folder.path.glob(f"finished/*/*.{ending}")
    ):
        file = File(path)
        for _ in file.read():
            pass
        if file.damage and path.exists():
            findings.fault(file.damage)


def _own(facts: VerifyFacts, node: str, kind: str) -> str | None:
    """The folder of `node` where its files stand, if it has one; None: the common one."""
    return node if facts.folder.rollouts_of(node).files(kind) else None


def _folder(facts: VerifyFacts, node: str, kind: str) -> Path:
    return facts.folder.rollouts_of(_own(facts, node, kind)).path
