"""A folder of adapters alone, as a trainer's checkpoint leaves it."""

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from operators.models.adapters import WEIGHTS_FILE, in_file, save_config


def save(folder: Path, module: Any) -> None:
    trained = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    files = {in_file(name): weight.detach().cpu().contiguous() for name, weight in trained.items()}
    save_file(files, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    save_config(folder, module)
