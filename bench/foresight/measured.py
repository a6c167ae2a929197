"""Measured serving runs that aiconfigurator-core carries, read where they lie: which hold together,
what each did.

A row of its systems/silicon_sample.csv is one run of a server: mean milliseconds to the first token
and per token after it, of so many requests at once with prompts and answers of one length.
Aggregated: prompts are taken in between the steps of those that decode.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dataflow.errors import GraphError
from dataflow.foresight.catalogue import DeviceKind, device_kind
from dataflow.foresight.counts import Counts, counts
from dataflow.foresight.links import PER_LAYER
from dataflow.foresight.steps import Kernels, TokenCost, WeightFormat, step
from transport.weights.costs.decoder import Decoder

ROWS = "systems/silicon_sample.csv"
SYSTEMS = {"h100_sxm": "H100", "h200_sxm": "H200", "b200_sxm": "B200"}
FORMS = {"": "bfloat16", "fp8": "fp8", "fp4": "fp4", "int4": "int4"}
_PRODUCTS = {"fp4": "nvfp4"}
_EXPERTS = {"fp4": "nvfp4", "fp8": "fp8_block", "int4": "int4_wo"}
"""Formats as the tables of kernels call them."""
_CONFIGS = {
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
}
"""Names of models in the rows that the package has a config of under another."""
_LIKE = {"minimax_m2": "qwen3_moe", "gpt_oss": "qwen3_moe", "kimi_k2": "deepseek_v3"}
"""Families, by one whose config names the dimensions alike."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A measured run."""

    model: str
    form: str
    device: str
    ranks: int
    batch: int
    """Requests at once."""
    prompt: int
    answer: int
    token_s: float
    """Measured, of a token after the first."""
    first_s: float
    """Measured, to the first one."""
    file: str
    """That the package had it from."""
    data_parallel: int
    expert_ranks: int
    """Ranks that the experts lie on; 0: none."""
    step: TokenCost
    kernels: Kernels | None
    """Of its replica; None: a form of attention or experts that no table of ours has."""

    @property
    def key(self) -> tuple[object, ...]:
        """What makes two rows one run that was read twice."""
        return (
            self.model,
            self.form,
            self.device,
            self.ranks,
            self.data_parallel,
            self.expert_ranks,
            self.batch,
            self.prompt,
            self.answer,
            round(self.token_s, 5),
        )


@dataclass(frozen=True, kw_only=True)
class Known:
    """A model by its config."""

    decoder: Decoder
    counts: Counts
    window: int = 0
    """Tokens that every other layer looks back at; 0: all layers see all."""
    exchanges: int = PER_LAYER
    """All-reduces of a layer."""

    def seen(self, tokens: float) -> float:
        """Tokens that a layer looks back at, in the mean of all layers."""
        return (tokens + min(tokens, self.window)) / 2 if self.window else tokens


def read_model(package: Path, name: str) -> Known:
    """By the package's copy of its config. GraphError where there is none, or none that is
    known.
    """
    path = package / "model_configs" / f"{_CONFIGS.get(name, name).replace('/', '--')}_config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
        config = config.get("text_config", config)
        family = config["model_type"]
        if family in ("minimax_m2", "gpt_oss"):
            config["moe_intermediate_size"] = config["intermediate_size"]
        config["model_type"] = _LIKE.get(family, family)
        decoder = Decoder.from_config(config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise GraphError(
            f"the dimensions of model '{name}' are not in the package: {type(error).__name__}:"
            f" {error}; leave out its rows"
        ) from None
    return Known(
        decoder=decoder,
        counts=counts(decoder),
        window=config.get("sliding_window") or 0 if family == "gpt_oss" else 0,
        # its norm of queries and keys goes over all heads, so over all ranks
        exchanges=PER_LAYER + (config.get("qk_norm_type") == "per_layer"),
    )


def read_served(package: Path, backend: str = "vllm") -> list[Served]:
    """All aggregated rows of a server on the three devices. GraphError where the package has
    none.
    """
    path, models = package / ROWS, dict[str, Known]()
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [
                row
                for row in csv.DictReader(file)
                if row["backend"] == backend and row["mode"] == "agg"
            ]
        rows = [row for row in rows if row["system"] in SYSTEMS]
    except (OSError, KeyError) as error:
        raise GraphError(
            f"measured runs cannot be read: {type(error).__name__}: {error}; reinstall the package"
        ) from None
    if not rows:
        raise GraphError(
            f"measured runs of {backend} on {', '.join(SYSTEMS)} are to be in {path.name}, which"
            " has none"
        )
    for row in rows:
        if row["model_path"] not in models:
            models[row["model_path"]] = read_model(package, row["model_path"])
    return [_served(row, models[row["model_path"]]) for row in rows]


def _served(row: Mapping[str, str], model: Known) -> Served:
    kind, ranks, batch = (
        device_kind(SYSTEMS[row["system"]]),
        _whole(row, "tp_size"),
        _whole(row, "batch_size"),
    )
    prompt, answer = _whole(row, "isl"), _whole(row, "osl")
    return Served(
        model=row["model_path"],
        form=FORMS[row["precision"]],
        device=kind.name,
        ranks=ranks,
        batch=batch,
        prompt=prompt,
        answer=answer,
        token_s=float(row["silicon_tpot_ms"]) / 1e3,
        first_s=float(row["silicon_ttft_ms"]) / 1e3,
        file=row["silicon_data_source"].split(";")[0].split("=")[-1].split("/")[-1],
        data_parallel=_whole(row, "attention_dp_size", 1),
        expert_ranks=(
            _whole(row, "moe_tp_size", 1) * _whole(row, "moe_ep_size", 1)
            if model.counts.routed
            else 0
        ),
        step=_step(model, _form(row, model), kind, ranks, batch, prompt, answer),
        kernels=_kernels(_form(row, model), model, kind.name, ranks),
    )


def _step(
    model: Known,
    form: WeightFormat,
    kind: DeviceKind,
    ranks: int,
    batch: int,
    prompt: int,
    answer: int,
) -> TokenCost:
    return step(
        model.counts,
        form,
        kind,
        ranks=ranks,
        batch=batch,
        seen=model.seen(prompt + answer / 2),
        prompts=prompt / answer,
        prompts_seen=model.seen(prompt / 2),
        exchanges=model.exchanges,
    )


@cache
def _kernels(form: WeightFormat, model: Known, kind: str, ranks: int) -> Kernels | None:
    """fp8 of scaled blocks by the table of whole tensors: that of blocks has launches in it, 60 to
    180 us a product.
    """
    if model.window:
        return None
    return Kernels(
        decoder=model.decoder,
        kind=device_kind(kind),
        ranks=ranks,
        products=_PRODUCTS.get(form.dense, form.dense),
        experts=_EXPERTS.get(form.experts, form.experts),
    )


def _form(row: Mapping[str, str], model: Known) -> WeightFormat:
    """Formats by the checkpoints' configs: 4 bits are of the experts alone where there are some,
    mxfp4 gpt-oss's.
    """
    name = FORMS[row["precision"]]
    if not model.counts.routed or name in ("bfloat16", "fp8"):
        return WeightFormat(dense=name, experts=name)
    return WeightFormat(experts="mxfp4" if "gpt-oss" in row["model_path"] else name)


def _whole(row: Mapping[str, str], column: str, otherwise: int = 0) -> int:
    return int(float(row[column])) if row[column] else otherwise


def holding(rows: Sequence[Served]) -> tuple[list[Served], Counter[str]]:
    """Rows whose description holds together; how many do not, by why. No rule looks at an error of
    a prediction.
    """
    good, why, met = [], Counter[str](), set[tuple[object, ...]]()
    for row in rows:
        if row.key in met:
            why["is the same run as another row"] += 1
        elif row.data_parallel > 1 or row.expert_ranks not in (0, row.ranks):
            why[
                "cuts attention and experts over other ranks (data parallel, which no replica of"
                " ours is)"
            ] += 1
        elif row.first_s >= row.answer * row.token_s / 2:
            why[
                "waited a third of its time for a place, so the batch decoded is not the row's"
            ] += 1
        else:
            good.append(row)
        met.add(row.key)
    fast = {row.file for row in good if row.step.busy >= row.token_s}
    why["is of a file with rows faster than data sheets allow"] = sum(
        row.file in fast for row in good
    )
    return [row for row in good if row.file not in fast], why
