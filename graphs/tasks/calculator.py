"""The calculator task: the steps inside GSM8K's answers, `<<48/2=24>>` as prompt `48/2=` and answer
`24`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dataflow.errors import RecordError
from graphs.tasks import expressions
from graphs.tasks.arithmetic import same_number, value
from operators import Prompts
from operators.warm_start import warm_start

ALPHABET = "0123456789.+-*/()=%"
"""Every character of the task, each once."""

LONGEST_PROMPT = 40
"""Steps with a longer left side are skipped, in characters; the longest one of GSM8K has 30."""

MAX_TOKENS = 12
"""Room for the longest answer of GSM8K, 10 characters, its end token and one token too many."""

_STEP = re.compile(r"<<([^<>]*)>>")
_DECORATION = re.compile(r"[\s$,]")


def steps(row: Mapping[str, object]) -> list[dict[str, str]]:
    """The steps of a row {"question", "answer"} in their order, each as {"prompt", "answer"}.

    Blanks, dollar signs and thousands separators are left out. A step whose left side is no
    expression of numbers, or whose answer is no number, is skipped, and so is one longer than
    LONGEST_PROMPT.

    Raises:
        RecordError: the row has no text under "answer".
    """
    text = row.get("answer")
    if not isinstance(text, str):
        raise RecordError(
            f"a GSM8K row has no answer text; found columns {sorted(row)}; "
            'give rows such as {"question": ..., "answer": "... <<48/2=24>> ..."}'
        )
    rows = []
    for step in _STEP.findall(text):
        problem, _, right = _DECORATION.sub("", step).rpartition("=")
        is_known = set(problem + right) <= set(ALPHABET) and len(problem) < LONGEST_PROMPT
        if is_known and value(problem) is not None and value(right) is not None:
            rows.append({"prompt": problem + "=", "answer": right})
    return rows


def read(path: str | Path) -> Iterator[dict[str, str]]:
    """Yield every step of a GSM8K JSONL file as {"prompt", "answer"}, in the file's order.

    Raises:
        RecordError: a line is no JSON object with an answer text; names the file and the line.
    """
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise RecordError(
                    f"{path}:{number} is no JSON; found {line[:60]!r} ({error}); mend the line"
                ) from None
            if not isinstance(row, dict):
                raise RecordError(
                    f"{path}:{number} is no object; found {line[:60]!r}; mend the line"
                )
            try:
                read_rows = steps(row)
            except RecordError as error:
                raise RecordError(f"{path}:{number}: {error}") from None
            yield from read_rows


def unseen(
    rows: Iterable[dict[str, str]], training: Iterable[dict[str, str]]
) -> list[dict[str, str]]:
    """Those rows whose prompt does not occur among the training rows (a third of GSM8K's test
    steps).
    """
    prompts = {row["prompt"] for row in training}
    return [row for row in rows if row["prompt"] not in prompts]


def reward(completion: str, answer: str) -> float:
    """1 if the completion is the answer's number, however it is written, and nothing else, else
    0.
    """
    return float(same_number(completion, answer))


def source(path: str, name: str, *, held_out: bool = False) -> Prompts:
    """The steps of a GSM8K file or data set as prompts, or made-up ones; one rollout of each
    held-out one.
    """
    size, seed = (1, None) if held_out else (None, 0)
    rows: Any = steps if path else None
    made_up = expressions.rows(2_000 if held_out else 24_000, seed=1, held_out=held_out)
    return Prompts(
        path or list(made_up),
        rows=rows,
        columns=("answer",),
        name=name,
        group_size=size,
        shuffle_seed=seed,
    )


def warm(
    policy: str | Path, prompts: str, *, steps: int = 180, layers: int = 4, width: int = 128
) -> Path:
    """The folder of a policy that was trained on so many batches of the steps in `prompts`, or
    made-up ones.
    """
    examples = read(prompts) if Path(prompts).is_file() else expressions.rows(24_000, seed=0)
    return warm_start(
        policy,
        examples=((row["prompt"], row["answer"]) for row in examples),
        alphabet=ALPHABET,
        layers=layers,
        width=width,
        heads=4,
        steps=steps,
        batch_size=128,
        seed=0,
    )
