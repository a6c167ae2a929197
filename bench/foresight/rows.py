"""Rows of published steps as they come: odd names, numbers and gaps are read as what they are
nearest to, and told.
"""

from __future__ import annotations

import csv
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from dataflow.errors import GraphError
from dataflow.foresight.catalogue import CATALOGUE
from dataflow.foresight.counts import Counts, counts
from transport.weights.costs.decoder import Decoder

NUMBERS = (
    "gpus",
    "gpus_trainer",
    "gpus_generator",
    "rollouts_per_generation",
    "rollouts_per_step",
    "max_tokens",
    "mean_tokens",
    "generator_tp",
    "generator_pp",
    "trainer_tp",
    "trainer_cp",
    "trainer_ep",
    "trainer_pp",
)
"""Columns that are above 0 where they are given."""
_SIZE = re.compile(r"(?<![\d.A-Za-z])(\d+(?:\.\d+)?)\s*B\b", re.IGNORECASE)
_WIDTH, _VOCABULARY = 128, 150_000
"""Of a head and of a vocabulary, as large models have them."""


def read_rows(path: Path) -> list[dict[str, str]]:
    """Of a table with the columns of rl_steps.csv; more, fewer and empty ones are as they are."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        return [
            {
                name.strip(): (value or "").strip()
                for name, value in row.items()
                if isinstance(name, str)
            }
            for row in csv.DictReader(file, restval="")
        ]


def understood(
    row: Mapping[str, str], models: Mapping[str, Counts]
) -> tuple[dict[str, str], Counts, list[str]]:
    """The row with names and numbers that are known, the model's dimensions, and what was taken for
    what.

    GraphError where a row says nothing that a prediction needs.
    """
    assumed: list[str] = []
    fields = dict.fromkeys(("system", "model", "mode", "gpu", *NUMBERS, "staleness"), "") | dict(
        row
    )
    for name in (*NUMBERS, "staleness"):
        if fields[name] and not (_number(fields[name]) >= (0 if name == "staleness" else 1)):
            assumed.append(f"{name} {fields[name]!r} is passed over")
            fields[name] = ""
    if not fields["gpus"]:
        parts = [_number(fields[name]) for name in ("gpus_trainer", "gpus_generator")]
        if math.isnan(sum(parts)):
            raise GraphError(
                f"a row needs its devices; found gpus {row.get('gpus')!r}; say how many"
            )
        fields["gpus"] = f"{sum(parts):g}"
    kind = _kind(fields["gpu"])
    if kind != fields["gpu"]:
        assumed.append(f"devices {fields['gpu']!r} are taken for {kind}")
    mode = _mode(fields["mode"], fields["staleness"])
    if mode != fields["mode"]:
        assumed.append(f"mode {fields['mode']!r} is taken for {mode}")
    model = fields["model"]
    if model in models:
        dimensions = models[model]
    elif near := nearest_model(model, models):
        assumed.append(f"model {model!r} is taken for {near}")
        dimensions = models[near]
    else:
        dimensions = sized(model)
        assumed.append(
            f"model {model!r} is taken for a dense one of {dimensions.parameters / 1e9:.3g} B"
        )
    return fields | {"gpu": kind, "mode": mode}, dimensions, assumed


def nearest_model(name: str, models: Mapping[str, Counts]) -> str:
    """That is called so but for case, marks, a version's minor number and what was made of it;
    empty: none.

    >>> models = {"Llama-3.1-8B": None, "Llama-3.1-70B": None}
    >>> nearest_model("meta-llama/Llama-3.3-70B-Instruct", models)
    'Llama-3.1-70B'
    """
    alike = {model: _SIZE.findall(model) for model in models}
    sizes = _SIZE.findall(name)
    of = [model for model in models if sizes and alike[model] == sizes] if sizes else list(models)
    plain = {re.sub(r"[^a-z0-9]", "", model.lower()): model for model in of}
    plain_name = re.sub(r"[^a-z0-9]", "", name.lower().rpartition("/")[2])
    near = difflib.get_close_matches(plain_name, plain, n=1, cutoff=0.6)
    return plain[near[0]] if near else ""


def sized(name: str) -> Counts:
    """A dense decoder of as many parameters as a name says, as wide as such ones are. GraphError
    where it says none.
    """
    sizes = _SIZE.findall(name)
    if not sizes:
        raise GraphError(
            f"a row needs a model that is known, or a size in its name; found {name!r}; write it"
            " as 14B"
        )
    billions = float(sizes[0])
    # 12 width^2 a layer, and as many layers as large models of that size have for their width
    width = _WIDTH * max(4, round((billions * 1e9 / 12 * 110) ** (1 / 3) / _WIDTH))
    layers = max(1, round(billions * 1e9 / (12 * width**2)))
    heads = width // _WIDTH
    return counts(
        Decoder(
            layers=layers,
            width=width,
            inner=round(width * 3.25),
            heads=heads,
            kv_heads=min(8, heads),
            vocabulary=_VOCABULARY,
            head_width=_WIDTH,
        )
    )


def _number(text: str) -> float:
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def number(row: Mapping[str, str], column: str, otherwise: float) -> float:
    """What a row that is understood has in a column, or something else."""
    return _number(row[column]) if row.get(column) else otherwise


def _kind(name: str) -> str:
    kinds = [kind for kind in CATALOGUE if kind != "cpu"]
    inside: Sequence[str] = [kind for kind in kinds if kind.lower() in name.lower()]
    if inside:
        return max(inside, key=len)
    near = difflib.get_close_matches(name.upper(), kinds, n=1, cutoff=0.5)
    return near[0] if near else "H100"


def _mode(name: str, staleness: str) -> str:
    if re.match(r"sync|on.?policy|coloc", name, re.IGNORECASE) or (
        not name and staleness in ("", "0")
    ):
        return "sync"
    return "async"
