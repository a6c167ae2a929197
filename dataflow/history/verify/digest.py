"""What the laws need of Arrow files of rollouts, looked at many at a time: small ones cost little
more than one."""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from dataflow import records
from dataflow.folder.arrow_reading import read_arrow
from dataflow.history.verify.facts import Findings
from dataflow.records import AnyArray
from dataflow.staleness import newest_versions, oldest_versions
from dataflow.system.files import RunFolderError

_NEEDED = (records.GROUP_ID, records.POSITION, records.VERSIONS)
_OPTIONAL = (
    records.GROUP_SIZE,
    records.MIN_VERSION,
    records.ROLLOUT_ID,
    records.ERROR,
    records.OF_SOURCE,
)
MOST_FILES, MOST_BYTES = 256, 64 << 20
"""That are looked at together."""


@dataclass(frozen=True)
class RolloutFile:
    """What the laws need of one Arrow file."""

    groups: AnyArray
    """Distinct groups, ascending by source and id, int64."""
    sources: AnyArray
    """Of each of them, its source; empty where the rows do not tell."""
    broken: AnyArray
    """Of each of them, whether it is not whole: positions missing, double or too many."""
    oldest: AnyArray
    """Version behind the oldest token of each rollout that did not fail, int64."""
    newest: int
    """Version behind the newest token of all that did not fail; -1 without any."""
    too_early: int
    """Rollouts with a token from before the version that their prompt demanded."""


Read: TypeAlias = tuple[int, Path, pa.Table]
"""A step, its file, and the columns of it that are judged."""


def digests(
    files: Iterable[tuple[int, Path]], findings: Findings, is_gone: Callable[[int], bool]
) -> Iterator[tuple[int, Path, RolloutFile]]:
    """What stands in the file of each step, in their order, without those that cannot be judged,
    which are faults.

    is_gone: whether the run has meanwhile removed the file of a step, where it is not there any
    more."""
    for some in _together(files, findings, is_gone):
        yield from _judged(some, findings)


def _together(
    files: Iterable[tuple[int, Path]], findings: Findings, is_gone: Callable[[int], bool]
) -> Iterator[list[Read]]:
    """Files of the same columns, not too many and not too large together; each is read and checked
    whole."""
    found: list[Read] = []
    size = 0
    for step, path in files:
        try:
            table = _columns(path)
        except RunFolderError as error:
            if path.exists() or not is_gone(step):
                findings.fault(f"the rollouts cannot be judged: {error}")
            continue
        if found and (
            size > MOST_BYTES or len(found) == MOST_FILES or table.schema != found[0][2].schema
        ):
            yield found
            found, size = [], 0
        found.append((step, path, table))
        size += table.nbytes
    if found:
        yield found


def _columns(path: Path) -> pa.Table:
    table = read_arrow(path)
    names = set(table.column_names)
    if missing := [name for name in _NEEDED if name not in names]:
        raise RunFolderError(f"{path.name} lacks the columns {missing}")
    return table.select([name for name in (*_NEEDED, *_OPTIONAL) if name in names])


def _judged(files: list[Read], findings: Findings) -> Iterator[tuple[int, Path, RolloutFile]]:
    """Where they cannot be judged together, each is judged alone, and the fault is that of its
    file."""
    try:
        found = _digest([table for _, _, table in files])
    except (pa.ArrowException, TypeError, ValueError) as error:
        if len(files) == 1:
            findings.fault(f"the rollouts of {files[0][1].name} cannot be judged: {error}")
        else:
            for each in files:
                yield from _judged([each], findings)
        return
    for (step, path, _), digest in zip(files, found, strict=True):
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
    groups, owners, told = group[order][begins], file[order][begins], names[source[order][begins]]
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
            np.split(told, kinds),
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
    rows do not tell."""
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
    does. bool [groups]."""
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
