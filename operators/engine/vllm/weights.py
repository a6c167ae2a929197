"""The weights of a vLLM engine on the parent's side: tensors to write into, and how its process
finds them.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from dataflow.model import Model
from dataflow.model_files import INDEX
from operators.engine.vllm.shared_tensors import attach, lay_out, pack_handle, reserve
from operators.models.errors import ModelError


class VllmWeights:
    """Full tensors under the trainer's names: in memory that both processes map, or on a GPU that
    both see.
    """

    def __init__(self, module: torch.nn.Module, dtype: str, device: str) -> None:
        """Hold a copy of the module's parameters."""
        parameters = dict(module.named_parameters())
        self._file: int | None = None
        if device == "cpu":
            layout, size = lay_out(
                {name: tuple(tensor.shape) for name, tensor in parameters.items()}, dtype
            )
            self._file = reserve(size)
            self._close = weakref.finalize(self, os.close, self._file)
            self._opening: dict[str, Any] = {"file": self._file, "layout": layout}
            self.tensors = attach(self._file, layout)
        else:
            kind = getattr(torch, dtype)
            self.tensors = {
                name: torch.empty_like(p, dtype=kind, device=device)
                for name, p in parameters.items()
            }
            self._opening = {}
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.copy_(parameters[name])

    @property
    def files(self) -> list[int]:
        """Open files that vLLM's process must inherit."""
        return [] if self._file is None else [self._file]

    def opening(self) -> dict[str, Any]:
        """The first message to vLLM's process."""
        return self._opening

    def offer(self) -> dict[str, Any]:
        """The message to vLLM's process at an update: handles, or nothing where it maps the
        memory.
        """
        if self._file is not None:
            return {}
        torch.cuda.synchronize()
        names = list(self.tensors)
        gpu = str(torch.cuda.get_device_properties(self.tensors[names[0]].device).uuid)
        return {
            "names": names,
            "dtype_names": [
                str(tensor.dtype).removeprefix("torch.") for tensor in self.tensors.values()
            ],
            "shapes": [list(tensor.shape) for tensor in self.tensors.values()],
            "handles": [{gpu: pack_handle(_handle(tensor))} for tensor in self.tensors.values()],
        }

    def close(self) -> None:
        """Close the file; the memory is freed once no process maps it."""
        self.tensors = {}
        if self._file is not None:
            self._close()


def _handle(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What another process opens a CUDA tensor with."""
    return reduce_tensor(tensor)[1]  # type: ignore[no-untyped-call,no-any-return]


def check_names(model: Model, names: Collection[str], folder: Path) -> None:
    """Refuse a model whose trained names are not those of its files: vLLM loads by the files'
    names.

    Raises ModelError, for example for a mixture of experts whose experts the trainer holds in one
    tensor.
    """
    stored = _stored(folder)
    unknown = sorted(set(names) - stored)
    if unknown:
        raise ModelError(
            f"engine 'vllm' cannot take the weights of model '{model.name}': {len(unknown)} of its"
            f" {len(names)} "
            f"parameters are not in its files by their names, such as {unknown[:3]}; use"
            ' engine="native"'
        )


def _stored(folder: Path) -> set[str]:
    """Names of the tensors in a folder's safetensors files."""
    if (folder / INDEX).is_file():
        return set(json.loads((folder / INDEX).read_text("utf-8"))["weight_map"])
    tensor_names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            tensor_names.update(json.loads(opened.read(int.from_bytes(opened.read(8), "little"))))
    return tensor_names
