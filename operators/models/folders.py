"""What a folder of adapters alone says of itself: the model that they belong to, and their shape;
imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dataflow.errors import RunError
from dataflow.model import ADAPTER_CONFIG, Model, holds_adapters
from dataflow.model_files import tensor_shapes


class ModelError(RunError):
    """A model or tokenizer that could not be loaded: folder, shard, weights, or code that may not
    run.
    """

    is_lasting = True


WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Before a tensor's name in peft's files: what `PeftModel` wraps around the model."""

_READ = frozenset(
    {
        "peft_type",
        "base_model_name_or_path",
        "revision",
        "r",
        "lora_alpha",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
        "init_lora_weights",
        "eva_config",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "lora_dropout",
        "task_type",
        "auto_mapping",
        "peft_version",
        "inference_mode",
        "megatron_core",
        "qalora_group_size",
    }
)
"""Of peft's config: what is honoured here, what chose the layers that the file of tensors names,
and what says nothing of a forward pass. `lora_dropout` acts in training alone, where there is
none."""
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Ways in which adapters may have begun that left the model's own weights as they were."""


class LayerAdapter(NamedTuple):
    """Beside one linear layer: W + scale * B @ A."""

    rank: int
    scale: float


def base_of(model: Model) -> tuple[Model, Path | None]:
    """The model without adapters, and the folder that its source is if it holds adapters alone.

    Raises ModelError when that folder's config is broken.
    """
    plain = dataclasses.replace(model, lora=None)
    if not holds_adapters(model.source):
        return plain, None
    folder = Path(model.source)
    config = _config(folder)
    source = config.get("base_model_name_or_path")
    if not isinstance(source, str) or not source:
        raise ModelError(
            f"the adapters in {folder} belong to no model: {ADAPTER_CONFIG} has"
            f" base_model_name_or_path={source!r}; write the folder or id of the model there that"
            " they were trained on"
        )
    if holds_adapters(source):
        raise ModelError(
            f"the adapters in {folder} cannot be loaded: they belong to {source}, which holds"
            " adapters alone; merge those into their model with peft, and write the folder of the"
            " whole model as base_model_name_or_path"
        )
    return dataclasses.replace(plain, source=source, revision=config.get("revision")), folder


def saved_layers(folder: Path) -> dict[str, LayerAdapter]:
    """The adapters in a folder by the path of their layer, as peft reads them: from the shapes of
    their tensors, and what the config says of their scale. ModelError where they are more than
    plain ones.
    """
    config = _config(folder)
    odd = [
        name
        for name, value in config.items()
        if value and name not in _READ and (name, value) != ("bias", "none")
    ]
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        odd.append("init_lora_weights")
    if config.get("peft_type") != "LORA" or odd:
        raise ModelError(
            f"the adapters in {folder} cannot be merged: only plain LoRA can; found"
            f" {config.get('peft_type')} with { ({name: config[name] for name in odd}) }; merge"
            " them with peft, and give the folder of the whole model"
        )
    try:
        shapes = tensor_shapes(folder / WEIGHTS_FILE)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"adapters cannot be read from {folder}: {WEIGHTS_FILE} is missing or broken ({error});"
            " give a folder that a trainer's checkpoint or peft wrote"
        ) from error
    ends = ".lora_A.weight", ".lora_B.weight"
    paths = {
        name.removeprefix(PREFIX).removesuffix(ends[0]) for name in shapes if name.endswith(ends[0])
    }
    if strange := sorted(
        shapes.keys() ^ {f"{PREFIX}{path}{end}" for path in paths for end in ends}
    ):
        raise ModelError(
            f"the adapters in {folder} cannot be merged: only an A and a B beside a linear layer"
            f" can; found {len(strange)} tensors that are none or stand alone, as '{strange[0]}';"
            " merge them with peft, and give the folder of the whole model"
        )
    return {
        path: _layer(path, shapes[f"{PREFIX}{path}{ends[0]}"][0], config) for path in sorted(paths)
    }


def _layer(path: str, rank: int, config: Mapping[str, Any]) -> LayerAdapter:
    alpha = _of_layer(path, config.get("alpha_pattern"), config["lora_alpha"])
    return LayerAdapter(rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _of_layer(path: str, pattern: Mapping[str, float] | None, usual: float) -> float:
    """A pattern's value for a layer, by peft's rule: the first key that the end of its path
    matches.
    """
    return next(
        (value for key, value in (pattern or {}).items() if re.match(rf"(.*\.)?({key})$", path)),
        usual,
    )


def _config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = dict(json.loads((folder / ADAPTER_CONFIG).read_text("utf-8")))
        wrong = [
            name for name in ("r", "lora_alpha") if not isinstance(config.get(name), int | float)
        ]
        if wrong and config.get("peft_type", "LORA") == "LORA":
            raise ValueError(f"{wrong[0]}={config.get(wrong[0])!r}")
        for key, alpha in dict(config.get("alpha_pattern") or {}).items():
            re.compile(key)
            if isinstance(alpha, bool) or not isinstance(alpha, int | float):
                raise ValueError(f"alpha_pattern of {key!r} is {alpha!r}, which is no number")
    except (OSError, ValueError, TypeError, re.error) as error:
        raise ModelError(
            f"the adapters in {folder} cannot be loaded: {ADAPTER_CONFIG} is broken ({error}); copy"
            " it again"
        ) from error
    return config
