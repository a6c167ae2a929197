"""What a folder of adapters alone says of itself: the model that they belong to, and their shape; imports no torch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from dataflow.model import ADAPTER_CONFIG, ALL_LINEAR, LoRA, Model
from operators.models.errors import ModelError


def base_of(model: Model) -> tuple[Model, Path | None]:
    """The model without adapters, and the folder that its source is if it holds adapters alone.

    Raises ModelError when that folder's config is broken.
    """
    folder = Path(model.source)
    plain = dataclasses.replace(model, lora=None)
    if not (folder / ADAPTER_CONFIG).is_file() or (folder / "config.json").is_file():
        return plain, None
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text("utf-8"))
        source, revision = config["base_model_name_or_path"], config.get("revision")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"the adapters of '{model.name}' cannot be loaded: {folder / ADAPTER_CONFIG} is broken ({error}); "
            f"copy it again"
        ) from error
    return dataclasses.replace(plain, source=source, revision=revision), folder


def saved_lora(folder: Path) -> LoRA:
    """What a folder's config says of its adapters. ModelError where they are more than plain ones."""
    config = json.loads((folder / ADAPTER_CONFIG).read_text("utf-8"))
    targets = config["target_modules"]
    odd = [name for name in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "layers_to_transform",
           "modules_to_save", "fan_in_fan_out") if config.get(name)]  # fmt: skip
    if config.get("peft_type") != "LORA" or odd or not isinstance(targets, list | str):
        raise ModelError(
            f"the adapters in {folder} cannot be merged: only plain LoRA can; found {config.get('peft_type')} with "
            f"{odd or targets}; merge them with peft, and give the folder of the whole model"
        )
    names = targets if targets == ALL_LINEAR else tuple(targets)
    return LoRA(config["r"], alpha=config["lora_alpha"], targets=names)
