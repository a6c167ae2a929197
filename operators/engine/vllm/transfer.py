"""vLLM's weight-transfer engine for weights in shared memory; loaded in vLLM's process only.

vLLM comes with engines for NCCL and CUDA IPC; this one is for processors. It reads the tensors that
the parent writes into, under the trainer's names, and has vLLM load them as it loads a checkpoint:
packed and fused as its layers need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer.base import (  # type: ignore[import-not-found,unused-ignore]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import (  # type: ignore[import-not-found,unused-ignore]
    WeightTransferEngineFactory,
)
from vllm.model_executor.model_loader.reload import (  # type: ignore[import-not-found,unused-ignore]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

if TYPE_CHECKING:
    from operators.engine.vllm.shared_tensors import Layout, attach
else:
    from shared_tensors import Layout, attach

NAME = "shared_memory"


@dataclass
class Block(WeightTransferInitInfo):  # type: ignore[misc,unused-ignore]
    """The block of memory: an open file and what stands where in it."""

    file: int
    layout: Layout


@dataclass
class Whole(WeightTransferUpdateInfo):  # type: ignore[misc,unused-ignore]
    """All tensors of the block are new."""


class SharedMemoryTransfer(WeightTransferEngine):  # type: ignore[misc,unused-ignore]
    """Loads all tensors of the block at every update."""

    init_info_cls = Block
    update_info_cls = Whole

    def init_transfer_engine(self, init_info: Block) -> None:
        """Map the block."""
        self._tensors: dict[str, torch.Tensor] = attach(init_info.file, init_info.layout)

    def start_weight_update(self) -> None:
        """Give the layers the shape of a checkpoint again, one at a time as its weights come."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Any) -> None:
        """Load every tensor; vLLM copies, so that the parent may write the next version
        afterwards.
        """
        self.model.load_weights(iter(self._tensors.items()))

    def finish_weight_update(self) -> None:
        """Pack what is left as vLLM computes with it."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Let go of the block."""
        self._tensors = {}


def register() -> None:
    """Make the engine known to vLLM's own registry, as `NAME`."""
    WeightTransferEngineFactory.register_engine(NAME, SharedMemoryTransfer)
