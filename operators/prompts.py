"""`Prompts`: the source of a graph, from a file, a data set or any iterable of rows."""

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.annotations import admits_none, arrow_type
from dataflow.errors import RecordError, nearest
from dataflow.node import Generate, Source, SourceTraits, Traits
from dataflow.records import (
    DROP_REASON,
    ERROR,
    GROUP_ID,
    GROUP_SIZE,
    MIN_VERSION,
    OF_SOURCE,
    PROMPT,
    PROMPT_COLUMNS,
    PROMPT_ID,
    ROLLOUT_COLUMNS,
    ROUND_SIZE,
    TEMPERATURE,
    AnyArray,
    Columns,
)
from dataflow.rules import ROWS_AT_ONCE, issue_until
from dataflow.runtime import Batch, Context, Runtime
from operators.models.folders import ModelError
from operators.sources.prompt_rows import (
    LAYOUT_COLUMNS,
    Recipe,
    Report,
    Selection,
    load,
    sample_columns,
)
from operators.sources.row_files import Fault, FoundRow, Origin, rows_of, source_fault


def permutation(seed: int | None, epoch: int, rows: int) -> AnyArray:
    """Order of the rows in an epoch, int64 [rows]: the same for the same numbers, on every machine.

    The raw bits of PCG64 are sorted, because numpy promises those, but not its own shuffle, for
    ever.
    """
    if seed is None:
        return np.arange(rows)
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    return np.argsort(bits.random_raw(rows), kind="stable")


class PromptRuntime(Runtime):
    """Issues prompts.

    consumes: nothing
    produces: up to 32 groups at a time, each written into the ledger before it leaves
    waits for: steps that need more groups (drops are told by the control), or the next evaluation
        round
    unblocked by: {"dropped": n}, {"evaluate": step}

    Where the ledger knows groups without an outcome when it starts, they are issued again, under
    their numbers, before any other: whoever has them still knows them by these.
    """

    def __init__(
        self,
        table: pa.Table,
        report: Report,
        context: Context,
        *,
        name: str,
        shuffle_seed: int | None,
        group_size: int | None,
        epochs: int | None,
        notice: str = "",
    ) -> None:
        """table: the prompts of an epoch. notice: for the user. The rest as `operators.Prompts` has
        it.
        """
        self._notice = notice
        self._source = name
        self._seed = None if shuffle_seed is None else shuffle_seed + context.run.seed
        self._group_size = group_size or 0
        self._table = table
        self._dropped_rows = report.dropped
        self._ledger = context.ledger
        self._on_demand = context.graph.on_demand
        self._next = 0 if context.ledger is None else context.ledger.next_group_id(self._source)
        self._again: deque[int] | None = None
        """Groups to be issued once more, in order; None: before its first work, when every node is
        ready."""
        self._last = None if epochs is None else epochs * len(table)
        bound = context.graph.bounds.get(self._source)
        steps = context.run.steps if bound is None or bound.steps is None else bound.steps
        self._needed = None if bound is None or steps is None else steps * bound.prompts_per_step
        self._dropped_groups = 0
        self._is_draining = False
        self._order: tuple[int, AnyArray] = (-1, np.arange(0))
        self._rounds: deque[int] = deque()
        self._asked = -1
        """Step of the last round that was asked for."""
        self._at = 0

    def work(self) -> list[Batch] | None:
        """The next groups, if any are wanted."""
        if self._is_draining:
            return None
        if self._again is None:
            self._again = self._in_flight()
        if self._on_demand:
            return self._round(self._again) if self._rounds else None
        if self._again:
            again = [self._again.popleft() for _ in range(min(len(self._again), ROWS_AT_ONCE))]
            return [self._issue(again, self._rows(again), 0, 0)]
        stop = issue_until(
            self._next, last=self._last, needed=self._needed, dropped=self._dropped_groups
        )
        if stop <= self._next:
            return None
        groups = range(self._next, stop)
        return [self._issue(groups, self._rows(groups), 0, 0)]

    def pending(self) -> int:
        """Prompts that the rounds asked for still lack."""
        if self._is_draining:
            return 0
        return len(self._rounds) * len(self._table) - self._at

    def tell(self, message: Mapping[str, Any]) -> None:
        """{"evaluate": step}: issue a round, once however often it is asked for; with "again", all
        of the open one. Recorded rounds are skipped. {"dropped": n}: n more groups are needed;
        {"drain": True}: no more.
        """
        if "evaluate" in message and self._on_demand:
            step, again = int(message["evaluate"]), bool(message.get("again"))
            if again:
                self._rounds.clear()
                self._at, self._again = 0, self._in_flight()
            # Asked after what is in flight, so that of a round that is recorded in between only its
            # own groups remain.
            if (again or step > self._asked) and not self._is_judged(step):
                self._rounds.append(step)
            self._asked = max(self._asked, step)
        if "dropped" in message:
            self._dropped_groups = max(self._dropped_groups, int(message["dropped"]))
        if message.get("drain"):
            self._is_draining = True

    def status(self) -> dict[str, float | int | str]:
        """Groups issued, prompts of an epoch, rows left out because they are bad, and whether it is
        done.
        """
        is_over = (
            self._last is not None
            and self._next >= self._last
            and not self._on_demand
            and self._again == deque()
        )
        return {
            "issued": self._next,
            "rows": len(self._table),
            "bad_rows": self._dropped_rows,
            "done": int(is_over or self._is_draining),
            **({"notice": self._notice} if self._notice else {}),
        }

    def _is_judged(self, step: int) -> bool:
        """Whether the round of a step is recorded."""
        return self._ledger is not None and self._ledger.is_judged(self._source, step)

    def _in_flight(self) -> deque[int]:
        """Groups without an outcome, in order."""
        waiting = [] if self._ledger is None else self._ledger.in_flight(self._source)
        return deque(group.group_id for group in waiting)

    def _rows(self, groups: Sequence[int]) -> AnyArray:
        """Rows of some groups."""
        rows = np.empty(len(groups), np.int64)
        size = len(self._table)
        for at, group in enumerate(groups):
            epoch, place = divmod(group, size)
            if self._order[0] != epoch:
                self._order = (epoch, permutation(self._seed, epoch, size))
            rows[at] = self._order[1][place]
        return rows

    def _round(self, waiting: deque[int]) -> list[Batch]:
        """The next groups of a round; an interrupted round restarts with its groups' numbers."""
        stop = min(self._at + ROWS_AT_ONCE, len(self._table))
        count = stop - self._at
        again = [waiting.popleft() for _ in range(min(len(waiting), count))]
        groups = [*again, *range(self._next, self._next + count - len(again))]
        batch = self._issue(groups, np.arange(self._at, stop), self._rounds[0], len(self._table))
        self._at = stop
        if stop == len(self._table):
            self._rounds.popleft()
            self._at = 0
        return [batch]

    def _issue(
        self, groups: Sequence[int], rows: AnyArray, min_version: int, round_size: int
    ) -> Batch:
        count = len(rows)
        ids = np.asarray(groups, np.int64)
        table = self._table.take(pa.array(rows)).combine_chunks()
        names = [
            PROMPT_ID,
            PROMPT,
            *(name for name in table.schema.names if name not in (PROMPT_ID, PROMPT)),
        ]
        columns = {name: _flat(table.column(name)) for name in names}
        columns[GROUP_ID] = pa.array(ids)
        for name, value in (
            (GROUP_SIZE, self._group_size),
            (MIN_VERSION, min_version),
            (ROUND_SIZE, round_size),
        ):
            columns[name] = pa.array(np.full(count, value, np.int32))
        order = [GROUP_ID, PROMPT_ID, PROMPT, GROUP_SIZE, MIN_VERSION, ROUND_SIZE, *names[2:]]
        if self._ledger is not None:
            self._ledger.issue(
                self._source, list(zip(ids.tolist(), columns[PROMPT_ID].to_pylist(), strict=True))
            )
        self._next = max(self._next, int(ids[-1]) + 1)
        return Batch(
            self._source, pa.RecordBatch.from_arrays([columns[name] for name in order], names=order)
        )


def _flat(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


# How other systems lay out the rows of their data: which column is the prompt, and which travel
# beside it.

_FIRST_ROWS = 50


@dataclass(frozen=True, kw_only=True)
class DataForm:
    """One layout of rows."""

    prompts: tuple[str, ...]
    """Where the prompt is: the first of these that the rows have."""
    columns: tuple[str, ...] | None
    """What travels beside it, as far as the rows have it; None: all other columns."""
    chat: bool = False
    """Whether prompts are lists of messages."""

    def found_in(self, rows: Iterable[FoundRow]) -> tuple[str, tuple[str, ...]]:
        """The column of the prompt and those beside it, by the first rows; names that the engine
        has are left out.
        """
        names = names_in(rows)
        prompt = next((name for name in self.prompts if name in names), self.prompts[0])
        chosen = names if self.columns is None else self.columns
        reserved = {*PROMPT_COLUMNS, *ROLLOUT_COLUMNS, DROP_REASON, prompt}
        return prompt, tuple(name for name in chosen if name in names and name not in reserved)


def names_in(rows: Iterable[FoundRow]) -> tuple[str, ...]:
    """Names of the columns of the first rows."""
    names: dict[str, None] = {}
    for row in itertools.islice(rows, _FIRST_ROWS):
        if isinstance(row.row, Mapping):
            names |= dict.fromkeys(map(str, row.row))
    return tuple(names)


DATA_FORMS = {
    "verl": DataForm(
        prompts=("prompt",),
        columns=("data_source", "ability", "reward_model", "extra_info"),
        chat=True,
    ),
    "trl": DataForm(prompts=("prompt",), columns=None),
    "verifiers": DataForm(
        prompts=("prompt", "question"), columns=("answer", "info", "task"), chat=True
    ),
    "openrlhf": DataForm(prompts=("input", "prompt"), columns=("label",)),
    "slime": DataForm(prompts=("prompt", "input", "text"), columns=("label", "metadata")),
}
"""By the name of the system."""


MakeRow = Callable[[Any], Any]


@dataclass(frozen=True, eq=False)
class Prompts(Source):
    """Issues prompts from JSONL, JSON, Parquet or Arrow files, a data set's folder or id, a data
    frame or an iterable.

    Bad rows (broken JSON, a missing column, null, another type than before) end the run at its
    start with the file and line, or are left out, counted and logged with on_bad="drop". Equal
    prompts are issued each.

    >>> from dataflow import Graph, collect
    >>> from operators import Prompts
    >>> rows = [{"prompt": "2+2=", "answer": "4"}, {"prompt": "3+4=", "answer": "7"}]
    >>> prompts = Graph("sums").source(Prompts(rows, columns=("answer",)))
    >>> collect(prompts, rows=2).select(["prompt", "answer"]).to_pylist()
    [{'prompt': '2+2=', 'answer': '4'}, {'prompt': '3+4=', 'answer': '7'}]
    """

    source: Any
    """Path of a file or folder, a list of such paths, id on the hub, a data frame, or an iterable
    of dicts or texts. As hf:NAME[/CONFIG][:SPLIT] an id says which part, train where it says none:
    hf:openai/gsm8k:test."""
    columns: Sequence[str] | Mapping[str, Any] = field(default=(), kw_only=True)
    """Columns kept beside the prompt; with types where the first rows do not tell them: {"answer":
    float}."""
    form: str | None = field(default=None, kw_only=True)
    """Whose rows these are (verl, trl, verifiers, openrlhf, slime): the prompt is found where that
    system has it, and its columns are kept beside those asked for, null where a row lacks one. Of
    verl and verifiers prompts are chats."""
    rows: MakeRow | None = field(default=None, kw_only=True)
    """A function from a row to a prompt: a dict, a text, None to skip the row, or a list of
    prompts."""
    prompt_column: str = field(default=PROMPT, kw_only=True)
    """Column that holds the prompt."""
    chat: bool = field(default=False, kw_only=True)
    """Whether prompts are chat messages; a text becomes one message of the user. Columns `tools`
    and `chat_template_kwargs` that the rows have are kept then, as JSON: each prompt is laid out
    with its own."""
    shuffle_seed: int | None = field(default=None, kw_only=True)
    """Seed of the order, to which the run's is added; another order in every epoch. None: as they
    stand."""
    epochs: int | None = field(default=None, kw_only=True)
    """Times that all prompts are issued; None: for ever."""
    start: int = field(default=0, kw_only=True)
    """Prompts passed over at the beginning."""
    limit: int | None = field(default=None, kw_only=True)
    """Prompts of an epoch; None: all."""
    group_size: int | None = field(default=None, kw_only=True)
    """Rollouts of each prompt; None: as many as the generator makes."""
    id_column: str | None = field(default=None, kw_only=True)
    """Column that names a prompt, each once; None: the number of its row."""
    split: str | None = field(default=None, kw_only=True)
    """Split of a data set that has several."""
    config: str | None = field(default=None, kw_only=True)
    """Configuration of a data set on the hub that has several."""
    on_bad: str = field(default="error", kw_only=True)
    """error or drop: what a bad row does."""
    seen: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    """What was read of the first rows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.columns, str):
            object.__setattr__(self, "columns", (self.columns,))
        object.__setattr__(self, "source", rows_of(self.source))
        if self.form in DATA_FORMS and DATA_FORMS[self.form].chat:
            object.__setattr__(self, "chat", True)

    def renamed(self, name: str) -> "Prompts":
        """The same prompts under another name."""
        return dataclasses.replace(self, name=name)

    @property
    def origin(self) -> Origin:
        """Where its rows are."""
        needed = (self.prompt_column, *self.columns, *([self.id_column] if self.id_column else []))
        needed = (*needed, *(LAYOUT_COLUMNS if self.chat else ()))
        columns = needed if self.rows is None and self.form is None else None
        return Origin(source=self.source, split=self.split, config=self.config, columns=columns)

    @property
    def recipe(self) -> Recipe:
        """How its rows become prompts."""
        prompt, of_form = self._layout()
        optional = {name for name, kind in self._stated.items() if admits_none(kind)}
        return Recipe(
            columns=tuple(dict.fromkeys((*self.columns, *of_form, *self._of_layout))),
            prompt_column=prompt,
            id_column=self.id_column,
            make=self.rows,
            chat=self.chat,
            nullable=frozenset({*optional, *of_form}),
        )

    @property
    def traits(self) -> Traits:
        """How often it issues its rows, for how many rollouts each, and whether they are chats."""
        issues = SourceTraits(epochs=self.epochs, group_size=self.group_size)
        return Traits(source=issues, chat=self.chat)

    def extra_columns(self) -> Columns:
        """The asked-for columns, typed as stated, else as in the first rows, else as text."""
        if "types" not in self.seen:
            types, self.seen["faults"] = self._sample()
            stated = {name: arrow_type(kind) for name, kind in self._stated.items()}
            types |= {name: kind for name, kind in stated.items() if kind is not None}
            types |= {name: pa.string() for name in LAYOUT_COLUMNS if self.chat and name in types}
            self.seen["types"] = types
        return dict(self.seen["types"])

    def count(self) -> int | None:
        """Prompts of one epoch, where counting is cheap."""
        total = None if self.rows is not None or self.on_bad == "drop" else self.origin.count()
        if total is None:
            return None
        remaining = max(0, total - self.start)
        return remaining if self.limit is None else min(remaining, self.limit)

    def knobs(self) -> dict[str, Any]:
        """Knobs that differ from their defaults."""
        shown: dict[str, Any] = {"source": self.origin.shown.strip("'")}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name not in ("name", "source", "rows", "seen") and value != item.default:
                shown[item.name] = value
        if self.rows is not None:
            shown["rows"] = getattr(self.rows, "__name__", type(self.rows).__name__)
        return shown

    def faults(self) -> list[str]:
        """What is wrong with the knobs, or with a column that no row has."""
        return [*self._knob_faults(), *self._column_faults()]

    def missing(self) -> str | None:
        """A data set that the hub does not give."""
        fault = None if self._knob_faults() or self.origin.hub is None else self.origin.hub.fault
        return fault and f"'{self.name}': {fault}"

    def build(self, context: Context) -> Runtime:
        """Read everything, and issue; RecordError for a source that cannot be read, and for bad
        rows.
        """
        types = self.extra_columns()
        selection = Selection(start=self.start, limit=self.limit, drops_bad=self.on_bad == "drop")
        try:
            table, report = load(self.origin, self.recipe, types, selection)
        except RecordError as error:
            raise RecordError(f"'{self.name}': {error}") from error
        for kind, (count, first) in report.bad.items():
            context.log.warning(
                "prompts left out", source=self.name, reason=kind, rows=count, first=first
            )
        context.log.info(
            "prompts read",
            source=self.name,
            prompts=len(table),
            left_out=report.dropped,
            skipped=report.skipped,
            equal_to_another=report.duplicates,
        )
        notices = [text for taker in context.graph.takers if (text := self._too_long(taker, table))]
        for text in notices:
            context.log.warning("prompts are too long", source=self.name, said=text)
        return PromptRuntime(
            table,
            report,
            context,
            notice=" ".join(notices),
            name=self.name,
            shuffle_seed=self.shuffle_seed,
            group_size=self.group_size,
            epochs=self.epochs,
        )

    def _too_long(self, taker: Generate, table: pa.Table) -> str:
        """As `tokenize.too_long`; empty where that cannot be told here: whoever takes them says
        what is wrong then.
        """
        from operators.generation.tokenize import too_long

        try:
            return too_long(taker, table)
        except ModelError:
            return ""
        except RecordError as error:
            raise RecordError(f"'{self.name}': {error}") from error

    @property
    def _stated(self) -> Mapping[str, Any]:
        """Columns whose type is given."""
        return self.columns if isinstance(self.columns, Mapping) else {}

    def _layout(self) -> tuple[str, tuple[str, ...]]:
        """The column of the prompt, and the layout's other columns."""
        if self.form not in DATA_FORMS:
            return self.prompt_column, ()
        if "layout" not in self.seen:
            self.seen["layout"] = (self.prompt_column, ())
            if self.origin.is_here:
                try:
                    self.seen["layout"] = DATA_FORMS[self.form].found_in(self.origin)
                except RecordError as error:
                    self.seen["unreadable"] = str(error)
        prompt, columns = self.seen["layout"]
        return (prompt if self.prompt_column == PROMPT else self.prompt_column), columns

    @property
    def _of_layout(self) -> tuple[str, ...]:
        """The first rows' columns that set a chat's layout."""
        if not self.chat or self.rows is not None or self._knob_faults() or not self.origin.is_here:
            return ()
        if "laid out by" not in self.seen:
            try:
                names = names_in(self.origin)
            except RecordError as error:
                names, self.seen["unreadable"] = (), str(error)
            self.seen["laid out by"] = tuple(name for name in LAYOUT_COLUMNS if name in names)
        by: tuple[str, ...] = self.seen["laid out by"]
        return by

    def _sample(self) -> tuple[dict[str, pa.DataType], list[Fault]]:
        if self._knob_faults() or not self.origin.is_here:
            return {name: pa.string() for name in self.columns}, []
        recipe = self.recipe
        unknown = {name: pa.string() for name in recipe.columns}
        try:
            types, faults = sample_columns(self.origin, recipe)
            nested = {} if self.rows is not None else self.origin.nested_types()
            return types | {name: kind for name, kind in nested.items() if name in types}, faults
        except RecordError as error:
            self.seen["unreadable"] = str(error)
            return unknown, []

    def _column_faults(self) -> list[str]:
        """A file that is not there, or a fault that all of the first rows have, is one of the
        graph.
        """
        if (missing := self.origin.missing) is not None:
            return [f"'{self.name}': {missing}"]
        self.extra_columns()
        if "unreadable" in self.seen:
            return [f"'{self.name}': {self.seen['unreadable']}"]
        faults: list[Fault] = self.seen.get("faults", [])
        kinds = {fault.kind for fault in faults}
        if len(kinds) != 1 or not faults[0].kind.startswith("no column"):
            return []
        return [
            f"'{self.name}' reads {self.origin.shown}, whose first row {faults[0].detail};"
            f" {faults[0].do}"
        ]

    def _knob_faults(self) -> list[str]:
        faults = []
        for knob, least in (
            ("epochs", 1),
            ("limit", 1),
            ("group_size", 1),
            ("start", 0),
            ("shuffle_seed", 0),
        ):
            value = getattr(self, knob)
            is_number = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (is_number and value >= least):
                faults.append(
                    f"'{self.name}' has {knob}={value!r}, which is no number from {least} up;"
                    " give one"
                )
        if self.on_bad not in ("error", "drop"):
            faults.append(
                f"'{self.name}' has on_bad={self.on_bad!r}, which is not known; use 'error' or"
                " 'drop'"
            )
        if self.form is not None and self.form not in DATA_FORMS:
            faults.append(
                f"'{self.name}' has form={self.form!r}, which is not"
                f" known{nearest(str(self.form), DATA_FORMS)}; use one of {list(DATA_FORMS)}, or"
                " name prompt_column= and columns="
            )
        if self.rows is not None and not callable(self.rows):
            faults.append(
                f"'{self.name}' has rows={self.rows!r:.60}, which is no function; "
                "give one from a row to a prompt, such as rows=lambda row: row['question']"
            )
        if (fault := source_fault(self.source)) is not None:
            faults.append(f"'{self.name}' {fault}")
        reserved = {*PROMPT_COLUMNS, *ROLLOUT_COLUMNS, TEMPERATURE, ERROR, OF_SOURCE}
        for name in self.columns:
            if not isinstance(name, str):
                faults.append(
                    f"'{self.name}' has {name!r} in columns=, which is no name; give texts"
                )
            elif name in reserved:
                faults.append(
                    f"'{self.name}' asks for column '{name}', a name that the engine's own column"
                    " has; leave it out, or rename yours with rows=..."
                )
        if isinstance(self.columns, Mapping):
            faults += [
                f"'{self.name}' gives column '{name}' the type {kind!r}, which no column has; use"
                " str or int"
                for name, kind in self.columns.items()
                if arrow_type(kind) is None and kind is not Any
            ]
        return faults
