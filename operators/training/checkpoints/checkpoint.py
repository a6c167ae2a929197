"""A checkpoint: a Hugging Face folder that `from_pretrained` loads, the optimiser's state in shards beside it.

Every rank writes what it holds, in the background, straight from its memory: the weights into files that all ranks
share, its optimiser's state into one of its own. Nobody gathers a tensor or keeps a copy; so the next update waits
until all is read (`Learner.unread`). What lies on a GPU is copied to main memory first, and no update waits for the
disk. Rank 0 adds the config, and is done when the shards of all ranks stand beside it. No pickle anywhere.
"""

from __future__ import annotations

import functools
import json
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dataflow.errors import RunError
from dataflow.limits import Limits
from dataflow.model import ADAPTER_CONFIG
from operators.models import adapters
from operators.models.loading import no_progress_bar
from operators.models.slices import saved_as
from operators.training.checkpoints import shards
from operators.training.checkpoints.model_files import ModelFiles
from operators.training.checkpoints.staging import Background, StagingBuffers
from operators.training.learner.optimizer import fresh_state, state_tensors

if TYPE_CHECKING:
    from operators.training.learner.learner import Learner

OPTIMIZER_FOLDER = "optimizer"
STATE_FILE = "trainer_state.json"
FORMAT = 2
DEADLINE_S = Limits().checkpoint_s
"""For a checkpoint to be written, where nobody says how long."""


@dataclass(frozen=True)
class StagedState:
    """Rank 0's part of a checkpoint but for the tensors that each rank writes."""

    module: Any
    gathered: Mapping[str, Tensor] | None
    """Whole weights, where files cannot be written part by part."""
    ranks: int
    deadline_s: float
    """For the ranks' parts."""

    def write(self, folder: Path, tokenizer: Any, facts: Mapping[str, int | float | str]) -> None:
        """Write the rest, and wait for all ranks' parts. RunFolderError names the file that cannot be written."""
        self._write_config(folder)
        if tokenizer is not None:
            with shards.explained(folder / "tokenizer.json"):
                tokenizer.save_pretrained(folder)
        with shards.explained(folder / STATE_FILE):
            text = json.dumps({"format": FORMAT, **facts}, indent=1) + "\n"
            (folder / STATE_FILE).write_text(text, "utf-8")
        shards.wait_for(folder / OPTIMIZER_FOLDER, self.ranks, self.deadline_s)

    def _write_config(self, folder: Path) -> None:
        if adapters.is_adapted(self.module):
            with shards.explained(folder / ADAPTER_CONFIG):
                adapters.save_config(folder, self.module)
            return
        with shards.explained(folder / "config.json"), no_progress_bar():
            if self.gathered is not None:
                self.module.save_pretrained(folder, state_dict=dict(self.gathered))
                return
            with tempfile.TemporaryDirectory(dir=folder) as aside:
                self.module.save_pretrained(aside, state_dict={})
                for path in Path(aside).iterdir():
                    if path.suffix != shards.SUFFIX:
                        path.replace(folder / path.name)


@dataclass(frozen=True)
class RankParts:
    """What one rank writes."""

    files: ModelFiles | None
    weights: Mapping[str, Sequence[shards.TensorPart]]
    state: Mapping[str, Sequence[shards.TensorPart]]
    """Of the optimiser, <parameter>/<moment>."""
    rank: int
    ranks: int

    def write(self, folder: Path) -> None:
        """Write them; what goes wrong, rank 0's `StagedState.write` raises."""
        place = folder / OPTIMIZER_FOLDER
        try:
            if self.files is not None:
                self.files.write(self.weights, first=self.rank == 0)
            shards.write(place / shards.file_name(self.rank, self.ranks), self.state)
        except Exception as error:
            shards.give_up(place, self.rank, error)


@dataclass(frozen=True)
class _Writer:
    """What a learner's checkpoints are written with."""

    staging: StagingBuffers
    background: Background


_WRITERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Writer] = weakref.WeakKeyDictionary()
"""By optimiser, of which each learner of this process has one."""


def nbytes(learner: Learner) -> int:
    """About how many bytes a checkpoint takes: what is trained, and AdamW's two moments of it."""
    return sum(3 * int(weight.nbytes) for weight in learner.parameters.values())


def prepare(folder: Path) -> None:
    """Make an empty folder ready for `stage`. RunFolderError where the disk refuses."""
    with shards.explained(folder / OPTIMIZER_FOLDER):
        (folder / OPTIMIZER_FOLDER).mkdir(exist_ok=True)


def stage(learner: Learner, rank: int, ranks: int, folder: Path, deadline_s: float = DEADLINE_S) -> StagedState | None:
    """Begin to write this rank's part: for `Learner.everywhere`.

    folder: one that all ranks see, after `prepare`. Rank 0 gets the rest, to write it when it likes. Until all ranks
    have written, which the learner waits for by itself, their weights and state have to stay as they are.
    """
    writer = _WRITERS.setdefault(
        learner.optimizer, _Writer(StagingBuffers(), Background(f"rank {rank}'s part of a checkpoint"))
    )
    writer.background.wait(deadline_s)
    module = learner.forward.module
    exported, cut = _exported(module), saved_as(module)
    files = _files(folder, module, exported, cut)
    gathered: dict[str, Tensor] | None = None
    if files is None:
        gathered = _gathered(exported, rank)
    copied = writer.staging.copied
    parts = RankParts(
        files,
        {} if files is None else {name: shards.parts_of(each, rank, copied(name)) for name, each in exported.items()},
        {
            name: shards.parts_of(each, rank, copied(name))
            for name, each in state_tensors(learner.optimizer, learner.parameters).items()
        },
        rank,
        ranks,
    )
    writer.staging.settle()
    writer.background.start(functools.partial(parts.write, folder), deadline_s)
    if rank:
        return None
    if not all(weight.is_cuda for weight in learner.parameters.values()):
        learner.before_change = functools.partial(_wait_everywhere, learner, deadline_s)
    return StagedState(module, gathered, ranks, deadline_s)


def written(learner: Learner, rank: int, ranks: int, deadline_s: float) -> None:
    """Wait until this rank's part is written: for `Learner.everywhere`. DeadlineError after so many seconds."""
    _WRITERS[learner.optimizer].background.wait(deadline_s)


def _wait_everywhere(learner: Learner, deadline_s: float) -> None:
    learner.everywhere(written, deadline_s=deadline_s)


def _files(folder: Path, module: Any, exported: Mapping[str, Any], cut: Mapping[str, Any] | None) -> ModelFiles | None:
    """Where all that is exported goes; None where only transformers can tell."""
    if adapters.is_adapted(module):
        return ModelFiles.of(folder, exported, {}, adapters.WEIGHTS_FILE, adapters.in_file)
    return None if cut is None else ModelFiles.of(folder, exported, cut)


def _gathered(exported: Mapping[str, Any], rank: int) -> dict[str, Tensor] | None:
    """Whole tensors in main memory on rank 0, put together one by one; all ranks call this."""
    found = {}
    for name, tensor in exported.items():
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if rank == 0:
            found[name] = full.detach().to("cpu", copy=True)
    return found if rank == 0 else None


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
    written(learner, rank, ranks, DEADLINE_S)


def restore(learner: Learner, rank: int, ranks: int, folder: Path) -> None:
    """Put the optimiser's state of a checkpoint back, whatever number of ranks wrote it: for `Learner.everywhere`.

    The weights are loaded with the model, from the same folder. Raises RunError when the state does not fit.
    """
    shards.read(folder / OPTIMIZER_FOLDER, fresh_state(learner.optimizer, learner.parameters))


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
