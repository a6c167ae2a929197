"""How other systems lay out the rows of their data: which column is the prompt, and which travel
beside it."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dataflow.records import DROP_REASON, PROMPT_COLUMNS, ROLLOUT_COLUMNS
from operators.sources.row_files import FoundRow

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
        has are left out."""
        names = names_in(rows)
        prompt = next((name for name in self.prompts if name in names), self.prompts[0])
        wanted = names if self.columns is None else self.columns
        taken = {*PROMPT_COLUMNS, *ROLLOUT_COLUMNS, DROP_REASON, prompt}
        return prompt, tuple(name for name in wanted if name in names and name not in taken)


def names_in(rows: Iterable[FoundRow]) -> tuple[str, ...]:
    """Names of the columns of the first rows."""
    names: dict[str, None] = {}
    for found in itertools.islice(rows, _FIRST_ROWS):
        if isinstance(found.row, Mapping):
            names |= dict.fromkeys(map(str, found.row))
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
