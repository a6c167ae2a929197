"""A checkpoint: a Hugging Face folder that `from_pretrained` loads, the optimiser's state in shards beside it.

Every rank copies its part to main memory while training waits (`stage`); threads write the copies. Rank 0 writes the
whole weights, or the adapters alone, and is done when the shards of all ranks stand beside them. No pickle anywhere.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dataflow.errors import RunError
from dataflow.limits import Limits
from operators.models import adapters
from operators.models.loading import no_progress_bar
from operators.training.checkpoints import shards
from operators.training.checkpoints.staging import Background, StagingBuffers
from operators.training.learner.optimizer import fresh_state, state_tensors
from operators.training.learner.refreshed import tensors_of

if TYPE_CHECKING:
    from operators.training.learner.learner import Learner

OPTIMIZER_FOLDER = "optimizer"
STATE_FILE = "trainer_state.json"
FORMAT = 2
DEADLINE_S = Limits().checkpoint_s
"""For a checkpoint to be written, where nobody says how long."""


@dataclass(frozen=True)
class StagedState:
    """One rank's part of a checkpoint, in main memory."""

    module: Any
    weights: Mapping[str, Tensor]
    """Whole, on rank 0; of a module with adapters these alone."""
    pieces: Mapping[str, shards.TensorPart]
    """Of the optimiser's state, <parameter>/<moment>, and of what is kept for refreshed readers."""
    rank: int
    ranks: int
    deadline_s: float
    """For the other ranks' parts."""

    def write(self, folder: Path, tokenizer: Any, facts: Mapping[str, int | float | str]) -> None:
        """Write all of it, and on rank 0 wait for the others' shards. RunFolderError names the file that it cannot."""
        if self.rank == 0:
            self._write_model(folder, tokenizer)
            with shards.explained(folder / STATE_FILE):
                text = json.dumps({"format": FORMAT, **facts}, indent=1) + "\n"
                (folder / STATE_FILE).write_text(text, "utf-8")
        place = folder / OPTIMIZER_FOLDER
        shards.write(place / shards.file_name(self.rank, self.ranks), self.pieces)
        if self.rank == 0:
            shards.wait_for(place, self.ranks, self.deadline_s)

    def _write_model(self, folder: Path, tokenizer: Any) -> None:
        with shards.explained(folder / "model.safetensors"):
            if adapters.is_adapted(self.module):
                adapters.save(folder, self.module, self.weights)
            else:
                with no_progress_bar():
                    self.module.save_pretrained(folder, state_dict=dict(self.weights))
        if tokenizer is not None:
            with shards.explained(folder / "tokenizer.json"):
                tokenizer.save_pretrained(folder)


@dataclass(frozen=True)
class _Writer:
    """What a learner's checkpoints are written with."""

    staging: StagingBuffers
    background: Background
    """Of a rank behind rank 0."""


_WRITERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Writer] = weakref.WeakKeyDictionary()
"""By optimiser, of which each learner of this process has one."""


def nbytes(learner: Learner) -> int:
    """About how many bytes a checkpoint takes: what is trained, AdamW's two moments of it, what is kept beside."""
    kept = sum(int(tensor.nbytes) for tensor in tensors_of(learner.refreshed).values())
    return sum(3 * int(weight.nbytes) for weight in learner.parameters.values()) + kept


def prepare(folder: Path) -> None:
    """Make an empty folder ready for `stage`. RunFolderError where the disk refuses."""
    with shards.explained(folder / OPTIMIZER_FOLDER):
        (folder / OPTIMIZER_FOLDER).mkdir(exist_ok=True)


def stage(learner: Learner, rank: int, ranks: int, folder: Path, deadline_s: float = DEADLINE_S) -> StagedState | None:
    """Copy this rank's part to main memory: for `Learner.everywhere`, as tensors are gathered one by one.

    folder: one that all ranks see, after `prepare`. Rank 0 gets its part, to write it when it likes, before the next
    call; the others write theirs in the background, and return None. What goes wrong there, rank 0's `write` raises.
    """
    writer = _WRITERS.setdefault(
        learner.optimizer, _Writer(StagingBuffers(), Background(f"rank {rank}'s part of a checkpoint"))
    )
    writer.background.wait(deadline_s)
    weights = {}
    for name, tensor in _exported(learner.forward.module).items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if rank == 0:
            weights[name] = writer.staging.copy(name, whole)
    pieces = {}
    for name, tensor in (state_tensors(learner.optimizer, learner.parameters) | tensors_of(learner.refreshed)).items():
        piece = shards.piece_of(tensor, rank)
        if piece is not None:
            pieces[name] = shards.TensorPart(writer.staging.copy(name, piece.tensor), piece.offsets)
    writer.staging.settle()
    staged = StagedState(learner.forward.module, weights, pieces, rank, ranks, deadline_s)
    if rank == 0:
        return staged
    writer.background.start(functools.partial(_write_beside, staged, folder), deadline_s)
    return None


def save(
    folder: Path,
    learner: Learner,
    tokenizer: Any,
    facts: Mapping[str, int | float | str],
    rank: int = 0,
    ranks: int = 1,
) -> None:
    """Write a checkpoint and wait for it; called on every rank."""
    prepare(folder)
    staged = stage(learner, rank, ranks, folder)
    if staged is not None:
        staged.write(folder, tokenizer, facts)
    else:
        _WRITERS[learner.optimizer].background.wait(DEADLINE_S)


def restore(learner: Learner, rank: int, ranks: int, folder: Path) -> None:
    """Put back the optimiser's state of a checkpoint, and what is kept for refreshed readers: for `Learner.everywhere`.

    Whatever number of ranks wrote them. The weights are loaded with the model, from the same folder. Raises RunError
    when the state does not fit.
    """
    state = fresh_state(learner.optimizer, learner.parameters) | tensors_of(learner.refreshed)
    shards.read(folder / OPTIMIZER_FOLDER, state)


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


def _exported(module: Any) -> dict[str, Any]:
    """The tensors that the folder is to hold, each once, under the module's names."""
    if adapters.is_adapted(module):
        return {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    named = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in module.state_dict().items() if name not in named}
    return dict(module.named_parameters()) | buffers


def _write_beside(staged: StagedState, folder: Path) -> None:
    try:
        staged.write(folder, None, {})
    except Exception as error:  # rank 0 raises it
        shards.give_up(folder / OPTIMIZER_FOLDER, staged.rank, error)
