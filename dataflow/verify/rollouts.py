"""Whether the rollouts on disk are those that the ledger says were trained: whole, once, and in time."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from dataflow import records
from dataflow.files import RunFolderError
from dataflow.ledger.writes import some
from dataflow.records import AnyArray
from dataflow.run_folder import read_arrow
from dataflow.staleness import NO_TOKEN, newest_versions, oldest_versions
from dataflow.verify.facts import Facts, Findings, Sink

_NEEDED = (records.GROUP_ID, records.POSITION, records.VERSIONS)


@dataclass(frozen=True)
class RolloutFile:
    """What the laws need of one Arrow file."""

    groups: AnyArray
    """Distinct group ids, ascending, int64."""
    broken: list[int]
    """Groups that are not whole: positions missing, double or too many."""
    oldest: AnyArray
    """Version behind the oldest token of each rollout that did not fail, int64."""
    newest: int
    """Version behind the newest token of all that did not fail; -1 without any."""
    too_early: int
    """Rollouts with a token from before the version that their prompt demanded."""


def judge_steps(facts: Facts, node: str, sink: Sink, findings: Findings) -> int | None:
    """Compare each step file with the ledger; returns the largest staleness in versions, None without any."""
    trained = sink.at("trained")
    folder = _folder(facts, node, "step")
    seen: dict[tuple[str, int], int] = {}
    bound = facts.max_staleness.get(node)
    largest: int | None = None
    for step in sink.steps:
        path = folder / f"step-{step:06d}.arrow"
        found = _read(path, findings)
        if found is None:
            continue
        wanted = trained.get(step, set())
        _same_groups(path.name, node, step, {group for _, group in wanted}, found, findings)
        for source in {source for source, _ in wanted}:
            for group in found.groups.tolist():
                if (first := seen.setdefault((source, group), step)) != step:
                    findings.fault(f"group {group} of '{source}' stands in the files of steps {first} and {step}")
        chosen = found.oldest[found.oldest != NO_TOKEN]
        if len(chosen):
            ages = (step - 1) - chosen
            largest = max(largest or 0, int(ages.max()))
            if bound is not None:
                _in_time(node, step, int(ages.max()), found.newest, bound, findings)
    _uncommitted(folder, node, sink, findings)
    return largest


def judge_evaluations(facts: Facts, node: str, sink: Sink, findings: Findings) -> None:
    """Compare each evaluation file with the ledger."""
    folder = _folder(facts, node, "eval")
    for step, wanted in sorted(sink.at("evaluated").items()):
        path = folder / f"eval-{step:06d}.arrow"
        if not path.exists():
            findings.note(f"the evaluation of '{node}' at step {step} has no file {path.name}")
            continue
        found = _read(path, findings)
        if found is None:
            continue
        _same_groups(path.name, node, step, {group for _, group in wanted}, found, findings)
        if found.too_early:
            findings.fault(f"{found.too_early} rollouts in {path.name} are older than their min_version")


def _same_groups(name: str, node: str, step: int, wanted: set[int], found: RolloutFile, findings: Findings) -> None:
    there = set(found.groups.tolist())
    if absent := wanted - there:
        findings.fault(f"groups {some(absent)} ended at step {step} of '{node}' but do not stand in {name}")
    if extra := there - wanted:
        findings.fault(f"groups {some(extra)} stand in {name} but did not end at step {step} of '{node}'")
    if found.broken:
        findings.fault(f"groups {some(found.broken)} in {name} are not whole")


def _in_time(node: str, step: int, age: int, newest: int, bound: int, findings: Findings) -> None:
    """age: of the oldest token, in versions. newest: version of the newest."""
    if age > bound:
        findings.fault(f"step {step} of '{node}' trained rollouts {age} versions old; the bound is {bound}")
    if newest > step - 1:
        findings.fault(f"step {step} of '{node}' trained rollouts of version {newest}, which did not exist before it")


def _uncommitted(folder: Path, node: str, sink: Sink, findings: Findings) -> None:
    last = sink.steps[-1] if sink.steps else 0
    left = [step for step in _steps_in(folder) if step > last]
    if left:
        findings.note(
            f"there are rollouts of steps {some(left)} that '{node}' has not committed: "
            f"a crash between write and commit, or a line that was taken back"
        )


def _folder(facts: Facts, node: str, kind: str) -> Path:
    """Where the files of `node` stand: its own folder if it has one, otherwise the common one."""
    own = facts.folder.rollouts / node
    return own if any(own.glob(f"{kind}-*.arrow")) else facts.folder.rollouts


def _steps_in(folder: Path) -> Iterator[int]:
    matches = (re.fullmatch(r"step-(\d+)\.arrow", path.name) for path in sorted(folder.glob("step-*.arrow")))
    return (int(match[1]) for match in matches if match)


def _read(path: Path, findings: Findings) -> RolloutFile | None:
    try:
        table = read_arrow(path)
        if missing := [name for name in _NEEDED if name not in table.column_names]:
            raise RunFolderError(f"{path.name} lacks the columns {missing}")
        return _digest(table)
    except (RunFolderError, pa.ArrowException, TypeError, ValueError) as error:
        findings.fault(f"the rollouts cannot be judged: {error}")
        return None


def _digest(table: pa.Table) -> RolloutFile:
    group, position = _integers(table, records.GROUP_ID), _integers(table, records.POSITION)
    oldest = oldest_versions(table.column(records.VERSIONS))
    good = np.ones(len(group), bool)
    if records.ERROR in table.column_names:
        good = table.column(records.ERROR).is_null().to_numpy().astype(bool)
    too_early = 0
    if records.MIN_VERSION in table.column_names:
        too_early = int((good & (oldest < _integers(table, records.MIN_VERSION))).sum())
    groups, first, counts = np.unique(group, return_index=True, return_counts=True)
    return RolloutFile(
        groups=groups,
        broken=_broken(table, group, position, groups, first, counts),
        oldest=oldest[good],
        newest=int(newest_versions(table.column(records.VERSIONS))[good].max(initial=-1)),
        too_early=too_early,
    )


def _broken(
    table: pa.Table, group: AnyArray, position: AnyArray, groups: AnyArray, first: AnyArray, counts: AnyArray
) -> list[int]:
    """Groups whose positions are not 0..n-1, n being the size that their rows name where they name one."""
    order = np.lexsort((position, group))
    expected = np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)
    broken = set(group[order][position[order] != expected].tolist())
    sizes = np.zeros(len(group), np.int64)
    if records.GROUP_SIZE in table.column_names:
        sizes = _integers(table, records.GROUP_SIZE)
    broken |= set(groups[(sizes[first] > 0) & (sizes[first] != counts)].tolist())
    if records.ROLLOUT_ID in table.column_names:  # rollout_id = group_id * size + position
        products = _integers(table, records.ROLLOUT_ID) - position
        broken |= set(group[products != group * np.repeat(counts, counts)[np.argsort(order)]].tolist())
    return sorted(broken)


def _integers(table: pa.Table, name: str) -> AnyArray:
    column = table.column(name)
    if column.null_count:
        raise ValueError(f"column '{name}' has {column.null_count} nulls")
    return np.asarray(column.to_numpy(), np.int64)
