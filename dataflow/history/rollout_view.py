"""One rollout of a run, found in its Arrow files and printed: prompt, text, tokens, scores and
fate.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from rich.columns import Columns
from rich.console import Console
from rich.text import Text

from dataflow import records
from dataflow.errors import RunError
from dataflow.folder.arrow_reading import read_arrow
from dataflow.folder.finished import File
from dataflow.folder.ledger import Fate, Ledger
from dataflow.folder.retention import KNOB, not_kept
from dataflow.folder.run_folder import RunFolder
from dataflow.history.describe import described, model_of
from dataflow.model_files import folder_here
from dataflow.system.files import to_json

_SHOWN = {*records.PROMPT_COLUMNS, *records.ROLLOUT_COLUMNS, records.OF_SOURCE}
_COLOURS = ((-0.1, "green"), (-1.0, "yellow"), (-3.0, "dark_orange"), (float("-inf"), "red"))
"""The least log-probability of each colour of a token."""


@dataclass(frozen=True, kw_only=True)
class FoundRollout:
    """A rollout and its place."""

    source: str
    """Its source."""
    place: str
    """The file."""
    row: Mapping[str, Any]
    fates: tuple[Fate, ...]
    """What each sink did with its group; none while it is in flight."""


def find_rollout(
    folder: RunFolder, rollout_id: int, *, source: str | None = None, group_id: int | None = None
) -> FoundRollout:
    """The rollout with this id. Errors: RunError where there is none, or one in each of several
    sources.
    """
    with Ledger.open(folder.ledger, readonly=True) as ledger:
        rollouts = [
            rollout
            for path, outcome, step in _files(folder)
            for rollout in _in_file(folder, ledger, path, outcome, step, rollout_id)
            if source in (None, rollout.source)
            and group_id in (None, rollout.row[records.GROUP_ID])
        ]
        lost = not_kept(ledger.facts())
    by_source = {rollout.source: rollout for rollout in reversed(rollouts)}
    if not rollouts:
        selection = "".join(
            f" of {name} {it!r}"
            for name, it in (("source", source), ("group", group_id))
            if it is not None
        )
        upto = "".join(
            f", or of a step of '{node}' up to {step}, which were not kept"
            for node, step in lost.items()
        )
        raise RunError(
            f"'{folder.path.name}' has no rollout {rollout_id}{selection} in its files; it was not"
            f" finished, or dropped before its step{upto}; take --source and --group"
            f" away{f', or make the next run with a larger {KNOB}' if lost else ''}"
        )
    if len(by_source) > 1:
        raise RunError(
            f"rollout {rollout_id} stands in several sources: {sorted(by_source)}; choose one with"
            " --source"
        )
    return rollouts[0]


def show_rollout(
    rollout: FoundRollout, console: Console, vocabulary: "Mapping[int, str] | None" = None
) -> None:
    """Print it. vocabulary: texts of token ids; the ids are shown without."""
    row = rollout.row
    where = (
        f"{rollout.source}, group {row[records.GROUP_ID]}, position {row[records.POSITION]},"
        f" {rollout.place}"
    )
    console.print(f"[bold]rollout {row[records.ROLLOUT_ID]}[/] ({where})", highlight=False)
    for fate in rollout.fates or ("in flight",):
        console.print(f"outcome  {fate}", highlight=False, markup=False)
    ended = (
        row[records.FINISH_REASON] if row[records.ERROR] is None else f"error: {row[records.ERROR]}"
    )
    console.print(f"ended    {ended}", highlight=False, markup=False)
    for name, value in scores(row).items():
        shown = "no value: it does not apply, or was not asked" if value is None else value
        console.print(f"{name:<8} {shown}", highlight=False, markup=False)
    for title, text in (("prompt", row[records.PROMPT]), ("completion", row[records.COMPLETION])):
        console.print(f"\n[bold]{title}[/]")
        console.print(text, highlight=False, markup=False)
    console.print("\n[bold]tokens[/] (text, log-probability, version)")
    console.print(Columns([_token(*token, vocabulary) for token in chosen(row)], padding=(0, 2)))


def plain_rollout(rollout: FoundRollout) -> str:
    """All of it as JSON."""
    fates = [dataclasses.asdict(fate) for fate in rollout.fates]
    return to_json(
        {"source": rollout.source, "place": rollout.place, "fates": fates, "rollout": rollout.row},
        indent=1,
    )


def scores(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that the graph added to a rollout: one value each; a list by its length, mean and
    range.
    """
    return {name: _summed(value) for name, value in row.items() if name not in _SHOWN}


def chosen(row: Mapping[str, Any]) -> Iterator[tuple[int, float, int]]:
    """Id, log-probability and version of each token that the policy chose."""
    names = (records.TOKENS, records.LOGPROBS, records.VERSIONS, records.MASK)
    for token, logprob, version, is_chosen in zip(*(row[name] for name in names), strict=True):
        if is_chosen:
            yield token, logprob, version


def vocabulary_of(folder: RunFolder) -> "dict[int, str] | None":
    """Texts of token ids, from the tokenizer in a checkpoint, or in the folder that the generator's
    model came from; None where neither is there.
    """
    for path in _tokenizers(folder):
        from tokenizers import Tokenizer

        words = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
        return {number: word for word, number in words.items()}
    return None


def _tokenizers(folder: RunFolder) -> Iterator[Path]:
    yield from sorted((folder.path / "checkpoints").rglob("tokenizer.json"), reverse=True)
    for node in described(folder)[0].get("nodes", []):
        source = model_of(node).get("source")
        path_here = folder_here(str(source)) if source else None
        if path_here is not None and (path := path_here / "tokenizer.json").is_file():
            yield path


def _files(folder: RunFolder) -> Iterator[tuple[Path, str, int | None]]:
    """Every file of rollouts: its path, the outcome of what is in it, and at which step; first what
    has one.
    """
    for path in sorted(folder.rollouts.rglob("*.arrow")):
        if match := re.fullmatch(r"(step|eval)-(\d+)\.arrow", path.name):
            yield path, {"step": "trained", "eval": "evaluated"}[match[1]], int(match[2])
    for path in sorted((folder.path / "finished").rglob("*.arrows")):
        yield path, "", None


def _in_file(
    folder: RunFolder, ledger: Ledger, path: Path, outcome: str, step: int | None, rollout_id: int
) -> list[FoundRollout]:
    """The rollouts with this id in a file. One of a step has the rows of its sources in the order
    of their names.
    """
    tables = [read_arrow(path)] if outcome else map(pa.Table.from_batches, zip(File(path).read()))
    rows = [
        row
        for table in tables
        for row in table.filter(pc.equal(table.column(records.ROLLOUT_ID), rollout_id)).to_pylist()
    ]
    if not rows:
        return []
    fates_of = {
        source: tuple(ledger.fates(source, rows[0][records.GROUP_ID]))
        for source in ledger.sources()
    }
    if all(row.get(records.OF_SOURCE) for row in rows):
        sources = [row[records.OF_SOURCE] for row in rows]
    elif outcome:
        sources = [
            source
            for source, fates in fates_of.items()
            if any((fate.outcome, fate.step) == (outcome, step) for fate in fates)
        ]
    else:
        sources = [path.name.partition(".")[2].removesuffix(".arrows")]
    place = str(path.relative_to(folder.path))
    return [
        FoundRollout(
            source=source,
            place=place,
            row=row,
            fates=tuple(ledger.fates(source, row[records.GROUP_ID])),
        )
        for source, row in zip(sources, rows, strict=False)
    ]


def _token(
    token: int, logprob: float, version: int, vocabulary: "Mapping[int, str] | None"
) -> Text:
    colour = next(colour for least, colour in _COLOURS if logprob >= least)
    word = str(token) if vocabulary is None else repr(vocabulary.get(token, token))
    return Text.assemble((word, f"bold {colour}"), f" {logprob:.3f} ", (f"v{version}", "dim"))


def _summed(value: Any) -> Any:
    if not isinstance(value, list):
        return f"{value:.6g}" if isinstance(value, float) else value
    numbers = [number for number in value if isinstance(number, int | float)]
    if not numbers:
        return f"{len(value)} values"
    mean = sum(numbers) / len(numbers)
    return f"{len(value)} values, mean {mean:.4g}, from {min(numbers):.4g} to {max(numbers):.4g}"
