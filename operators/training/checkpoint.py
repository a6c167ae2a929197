"""A checkpoint: a Hugging Face folder that `from_pretrained` loads, the optimiser's state beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dataflow.errors import RunError
from operators.models import no_progress_bar
from operators.training.optimizer import load_state, state_tensors

OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "trainer_state.json"
FORMAT = 1


def write_checkpoint(
    folder: Path,
    module: Any,
    tokenizer: Any,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, Tensor],
    facts: Mapping[str, int | float | str],
) -> None:
    """Fill `folder` with weights (safetensors), config, tokenizer, optimiser state and `facts`; no pickle."""
    with no_progress_bar():
        module.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    save_file(state_tensors(optimizer, parameters), folder / OPTIMIZER_FILE)
    (folder / STATE_FILE).write_text(json.dumps({"format": FORMAT, **facts}, indent=1) + "\n", "utf-8")


def read_state(folder: Path) -> dict[str, Any]:
    """The facts of a checkpoint. RunError when the folder is none of ours."""
    try:
        state = json.loads((folder / STATE_FILE).read_text("utf-8"))
        if state["format"] != FORMAT:
            raise ValueError(f"format {state['format']}, this release reads {FORMAT}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"'{folder}' cannot be resumed from: its {STATE_FILE} is not readable ({error}); use an older checkpoint"
        ) from error
    return dict(state)


def read_optimizer(folder: Path, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> None:
    """Put the optimiser's state of a checkpoint back. RunError when it does not fit."""
    load_state(optimizer, parameters, load_file(folder / OPTIMIZER_FILE))
