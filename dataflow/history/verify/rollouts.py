"""Whether the rollouts on disk are those that the ledger says were trained: whole, once, and in
time.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from dataflow import records
from dataflow.folder.arrow_reading import read_arrow
from dataflow.folder.finished import File
from dataflow.folder.ledger import HOME, Ledger, some
from dataflow.folder.live_changes import bound_at
from dataflow.folder.retention import gone
from dataflow.folder.run_folder import RunFolder
from dataflow.history.resume import forgotten
from dataflow.history.verify.facts import Findings, SinkRows, VerifyFacts
from dataflow.planning.hosts import named
from dataflow.records import AnyArray
from dataflow.staleness import NO_TOKEN, newest_versions, oldest_versions
from dataflow.system.files import RunFolderError

# What the laws need of Arrow files of rollouts, looked at many at a time: small ones cost little
# more than one.

_NEEDED = (records.GROUP_ID, records.POSITION, records.VERSIONS)
_OPTIONAL = (
    records.GROUP_SIZE,
    records.MIN_VERSION,
    records.ROLLOUT_ID,
    records.ERROR,
    records.OF_SOURCE,
)
MOST_FILES, MOST_BYTES = 256, 64 << 20
"""Files that are judged together, at most."""


@dataclass(frozen=True)
class RolloutFile:
    """What the laws need to know of one Arrow file."""

    groups: AnyArray
    """Distinct groups, ascending by source and id, int64."""
    sources: AnyArray
    """The source of each of them; empty where the rows do not tell."""
    broken: AnyArray
    """Whether each of them is broken: positions missing, double or too many."""
    oldest: AnyArray
    """Version behind the oldest token of each rollout that did not fail, int64."""
    newest: int
    """Version behind the newest token of all that did not fail; -1 without any."""
    too_early: int
    """Rollouts with a token from before the version that their prompt demanded."""


Read: TypeAlias = tuple[int, Path, pa.Table]
"""A step, its file, and the judged columns of it."""


def digests(
    files: Iterable[tuple[int, Path]], findings: Findings, is_gone: Callable[[int], bool]
) -> Iterator[tuple[int, Path, RolloutFile]]:
    """What stands in the file of each step, in their order, without those that cannot be judged,
    which are faults.

    is_gone: whether the run has meanwhile removed the file of a step, where it is not there any
    more.
    """
    for step_files in _together(files, findings, is_gone):
        yield from _judged(step_files, findings)


def _together(
    files: Iterable[tuple[int, Path]], findings: Findings, is_gone: Callable[[int], bool]
) -> Iterator[list[Read]]:
    """Files of the same columns, not too many and not too large together; each is read and checked
    whole.
    """
    batch: list[Read] = []
    size = 0
    for step, path in files:
        try:
            table = _columns(path)
        except RunFolderError as error:
            if path.exists() or not is_gone(step):
                findings.fault(f"the rollouts cannot be judged: {error}")
            continue
        if batch and (
            size > MOST_BYTES or len(batch) == MOST_FILES or table.schema != batch[0][2].schema
        ):
            yield batch
            batch, size = [], 0
        batch.append((step, path, table))
        size += table.nbytes
    if batch:
        yield batch


def _columns(path: Path) -> pa.Table:
    table = read_arrow(path)
    names = set(table.column_names)
    if missing := [name for name in _NEEDED if name not in names]:
        raise RunFolderError(f"{path.name} lacks the columns {missing}")
    return table.select([name for name in (*_NEEDED, *_OPTIONAL) if name in names])


def _judged(files: list[Read], findings: Findings) -> Iterator[tuple[int, Path, RolloutFile]]:
    """Where they cannot be judged together, each is judged alone, and the fault is that of its
    file.
    """
    try:
        rollouts = _digest([table for _, _, table in files])
    except (pa.ArrowException, TypeError, ValueError) as error:
        if len(files) == 1:
            findings.fault(f"the rollouts of {files[0][1].name} cannot be judged: {error}")
        else:
            for file in files:
                yield from _judged([file], findings)
        return
    for (step, path, _), digest in zip(files, rollouts, strict=True):
        yield step, path, digest


def _digest(tables: list[pa.Table]) -> list[RolloutFile]:
    """Of each table; rows of all are sorted by file, group and position at once."""
    lengths = [len(table) for table in tables]
    table = pa.concat_tables(tables)
    file = np.repeat(np.arange(len(tables)), lengths)
    group, position = _integers(table, records.GROUP_ID), _integers(table, records.POSITION)
    oldest, newest = (
        of(table.column(records.VERSIONS)) for of in (oldest_versions, newest_versions)
    )
    good = np.ones(len(group), bool)
    if records.ERROR in table.column_names:
        good = table.column(records.ERROR).is_null().to_numpy().astype(bool)
    early = np.zeros(len(group), bool)
    if records.MIN_VERSION in table.column_names:
        early = good & (oldest < _integers(table, records.MIN_VERSION))
    source, names = _sources(table)
    order = np.lexsort((position, group, source, file))
    is_next = [np.diff(of[order], prepend=-1) != 0 for of in (group, source, file)]
    begins = np.flatnonzero(functools.reduce(np.logical_or, is_next))
    groups, owners, source_names = (
        group[order][begins],
        file[order][begins],
        names[source[order][begins]],
    )
    broken = _broken(table, group, position, order, begins)
    rows, kinds = np.cumsum(lengths)[:-1], np.searchsorted(owners, np.arange(1, len(tables)))
    return [
        RolloutFile(
            groups=its_groups,
            sources=its_sources,
            broken=is_broken,
            oldest=ages[is_good],
            newest=int(young[is_good].max(initial=-1)),
            too_early=int(is_early.sum()),
        )
        for its_groups, its_sources, is_broken, ages, young, is_good, is_early in zip(
            np.split(groups, kinds),
            np.split(source_names, kinds),
            np.split(broken, kinds),
            np.split(oldest, rows),
            np.split(newest, rows),
            np.split(good, rows),
            np.split(early, rows),
            strict=True,
        )
    ]


def _sources(table: pa.Table) -> tuple[AnyArray, AnyArray]:
    """Of each row the number of its source, int64 [rows]; the sources' names: one, empty, where
    rows do not tell.
    """
    if records.OF_SOURCE not in table.column_names:
        return np.zeros(len(table), np.int64), np.array([""])
    coded = table.column(records.OF_SOURCE).combine_chunks().dictionary_encode()
    return coded.indices.to_numpy().astype(np.int64), np.array(coded.dictionary.to_pylist() or [""])


def _broken(
    table: pa.Table, group: AnyArray, position: AnyArray, order: AnyArray, begins: AnyArray
) -> AnyArray:
    """Whether positions of a group are not 0..n-1, n being the size that its rows name where they
    name one.

    order: of the rows, by file, source, group and position. begins: where in that order each group
    does. bool [groups].
    """
    if not len(group):
        return np.zeros(0, bool)
    counts = np.diff(begins, append=len(group))
    expected = np.arange(len(group)) - np.repeat(begins, counts)
    bad = position[order] != expected
    if records.ROLLOUT_ID in table.column_names:  # rollout_id = group_id * size + position
        firsts = (_integers(table, records.ROLLOUT_ID) - position)[order]
        bad |= firsts != group[order] * np.repeat(counts, counts)
    broken: AnyArray = np.logical_or.reduceat(bad, begins)
    if records.GROUP_SIZE in table.column_names:
        sizes = _integers(table, records.GROUP_SIZE)[order][begins]
        broken |= (sizes > 0) & (sizes != counts)
    return broken


def _integers(table: pa.Table, name: str) -> AnyArray:
    column = table.column(name)
    if column.null_count:
        raise ValueError(f"column '{name}' has {column.null_count} nulls")
    return np.asarray(column.to_numpy(), np.int64)


def judge_steps(facts: VerifyFacts, node: str, sink: SinkRows, findings: Findings) -> int | None:
    """Compare each step file with the ledger; returns the largest staleness in versions, None
    without any.
    """
    trained = sink.at("trained")
    folder = _folder(facts, node, "step")
    standing: dict[str, list[tuple[int, AnyArray]]] = {}
    bound = facts.max_staleness.get(node)
    largest: int | None = None
    paths = _kept(
        facts, node, [(step, folder / f"step-{step:06d}.arrow") for step in sink.steps], findings
    )
    for step, path, rollouts in digests(paths, findings, partial(_is_gone, facts, node)):
        expected = trained.get(step, {})
        _same_groups(path.name, node, step, expected, rollouts, findings)
        for source in expected:
            standing.setdefault(source, []).append((step, rollouts.groups))
        chosen = rollouts.oldest[rollouts.oldest != NO_TOKEN]
        if len(chosen):
            ages = (step - 1) - chosen
            largest = max(largest or 0, int(ages.max()))
            if bound is not None:
                bound_then = bound_at(facts.changes, node, step, bound)
                _in_time(node, step, int(ages.max()), rollouts.newest, bound_then, findings)
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
    for step, path, rollouts in digests(
        [(step, path) for step, path in paths if path.exists()],
        findings,
        partial(_is_gone, facts, node),
    ):
        _same_groups(path.name, node, step, evaluated[step], rollouts, findings)
        if rollouts.too_early:
            findings.fault(
                f"{rollouts.too_early} rollouts in {path.name} are older than their min_version"
            )


def _kept(
    facts: VerifyFacts, node: str, paths: list[tuple[int, Path]], findings: Findings
) -> list[tuple[int, Path]]:
    """Files without those that the run removed, or that lie on other hosts: only the ledger tells
    of them.
    """
    paths = _here(facts, node, paths, findings)
    upto = facts.not_kept.get(node, 0)
    files = [(step, path) for step, path in paths if step > upto or path.exists()]
    if len(files) < len(paths):
        findings.note(
            f"the rollouts of {len(paths) - len(files)} steps of '{node}' up to step {upto} were"
            " not kept: what became of their groups is judged by the ledger alone"
        )
    return files


def _here(
    facts: VerifyFacts, node: str, paths: list[tuple[int, Path]], findings: Findings
) -> list[tuple[int, Path]]:
    """Files without those that only other hosts have."""
    have = {
        step: facts.places.get(str(path.relative_to(facts.folder.path)), HOME)
        for step, path in paths
    }
    away = [step for step, _ in paths if have[step] != HOME]
    if away:
        hosts = named(dict.fromkeys(have[step] for step in away))
        findings.note(
            f"the rollouts of {len(away)} step{'s' if len(away) > 1 else ''} of '{node}' are on"
            f" host {hosts}, and not here: what became of their groups is judged by the ledger"
            " alone"
        )
    return [(step, path) for step, path in paths if have[step] == HOME]


def _is_gone(facts: VerifyFacts, node: str, step: int) -> bool:
    """Whether a run under way has removed the file of a step since its ledger was read."""
    with Ledger.open(facts.folder.ledger, readonly=True) as ledger:
        return step <= gone(ledger, node)


def _same_groups(
    name: str,
    node: str,
    step: int,
    ended: Mapping[str, AnyArray],
    rollouts: RolloutFile,
    findings: Findings,
) -> None:
    present = list(zip(rollouts.sources.tolist(), rollouts.groups.tolist(), strict=True))
    tells = any(rollouts.sources)
    expected = {
        (source if tells else "", group)
        for source, groups in ended.items()
        for group in groups.tolist()
    }
    if absent := expected - set(present):
        findings.fault(
            f"groups {_named(absent)} ended at step {step} of '{node}' but do not stand in {name}"
        )
    if extra := set(present) - expected:
        findings.fault(
            f"groups {_named(extra)} stand in {name} but did not end at step {step} of '{node}'"
        )
    if broken := set(itertools.compress(present, rollouts.broken)):
        findings.fault(f"groups {_named(broken)} in {name} are not whole")


def _named(groups: Collection[tuple[str, int]]) -> str:
    """Numbers of groups, each with its source where that is told."""
    sources = sorted({source for source, _ in groups})
    by_source = {
        source: some({group for of, group in groups if of == source}) for source in sources
    }
    return ", and ".join(
        f"{groups} of '{source}'" if source else str(groups) for source, groups in by_source.items()
    )


def _once(source: str, files: list[tuple[int, AnyArray]], findings: Findings) -> None:
    """Check that no group is in the files of two steps."""
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
    read, the newest first; and steps that the ledger does not know.
    """
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
    if later := [step for step, _ in folder.rollouts_of(own).files("step") if step > last]:
        findings.note(
            f"there are rollouts of steps {some(later)} that '{node}' has not committed: "
            "a crash between write and commit, or a line that was taken back"
        )


def judge_finished(folder: RunFolder, findings: Findings) -> None:
    """Read what generators have kept of groups without an outcome."""
    for path in sorted(
        path
        for ending in ("arrows", "parts", "turns")
        for path in folder.path.glob(f"finished/*/*.{ending}")
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
