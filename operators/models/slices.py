"""A model without its weights, and where in its files each of them lies: a rank reads what it
holds, and no more.

The module is built on the meta device, as transformers itself builds one, with its buffers
computed; it may be cut up as it is, and then be given memory and filled. What a file's names stand
for, transformers' own rules say; where they ask for more than putting tensors beside each other,
there is no outline, and the whole model has to be loaded.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dataflow.model_files import INDEX
from operators.models.tensor_files import StoredTensor, content_of, read_part

WEIGHTS = "model.safetensors"

Runs = Sequence[Sequence[tuple[int, int]]]
"""Of each dimension of a tensor, the ranges [first, last) that a rank holds, end to end in its
part."""


class NoOutline(Exception):
    """Why the whole model has to be loaded."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file, as a part of a tensor of the module."""

    name: str
    """In the file."""
    shape: tuple[int, ...]
    """There."""
    stored: StoredTensor
    """With as many dimensions as the module's tensor."""
    offsets: tuple[int, ...]
    """Where it begins in the module's tensor."""


@dataclass(frozen=True, eq=False)
class Outline:
    """A module on the meta device, and the parts of its tensors."""

    module: Any
    parts: Mapping[str, tuple[FileTensor, ...]]
    """By the module's name of a tensor."""
    missing: frozenset[str]
    """Tensors that no file has."""
    values: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors that are here already, whole: small ones, such as adapters."""

    @property
    def names(self) -> list[str]:
        """Of all tensors that are to be filled."""
        return [*self.parts, *self.missing, *self.values]

    def fill(self, tensors: Mapping[str, tuple[Tensor, Runs]]) -> None:
        """Read what a rank holds: by name, its part of a tensor, and which that is. `missing` ones
        become 0.

        Raises OSError, and EOFError where a file is shorter than it was.
        """
        with _files() as opened, torch.no_grad():
            for name, (into, runs) in tensors.items():
                if name in self.missing:
                    into.zero_()
                if name in self.values:
                    for first, own_first, size in boxes(runs):
                        narrowed(into, own_first, size).copy_(
                            narrowed(self.values[name], first, size)
                        )
                for part in self.parts.get(name, ()):
                    _fill(opened(part.stored.path), part, into, runs)


def whole(shape: Sequence[int]) -> Runs:
    """What a rank holds that holds all of a tensor."""
    return [[(0, size)] for size in shape]


def boxes(runs: Runs) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """The boxes that runs make: where each begins in the tensor, where in the part, and its
    size.
    """
    placed = []
    for ranges in runs:
        starts = itertools.accumulate((last - first for first, last in ranges), initial=0)
        placed.append(
            [(first, at, last - first) for (first, last), at in zip(ranges, starts, strict=False)]
        )
    for box in itertools.product(*placed):
        yield tuple(b[0] for b in box), tuple(b[1] for b in box), tuple(b[2] for b in box)


def overlap(
    first: Sequence[int], size: Sequence[int], other: Sequence[int], other_size: Sequence[int]
) -> tuple[list[int], list[int]] | None:
    """Where two boxes overlap: its begin and size; None where they do not."""
    begin = [max(a, b) for a, b in zip(first, other, strict=True)]
    ends = [min(a + s, b + t) for a, s, b, t in zip(first, size, other, other_size, strict=True)]
    if any(low >= high for low, high in zip(begin, ends, strict=True)):
        return None
    return begin, [high - low for low, high in zip(begin, ends, strict=True)]


def narrowed(tensor: Tensor, begin: Sequence[int], size: Sequence[int]) -> Tensor:
    """That box of it, as a view."""
    return tensor[tuple(slice(at, at + count) for at, count in zip(begin, size, strict=True))]


def outline(module: Any, files: Iterable[Path]) -> Outline:
    """How the tensors of these files make up those of `module`, which is a model of transformers on
    the meta device.

    What the module does not know is passed over. Raises NoOutline where it takes more than putting
    tensors beside each other, or shapes do not fit; ValueError for a file that is broken; OSError.
    """
    stored = {name: tensor for path in files for name, tensor in content_of(path).tensors.items()}
    names, tensors = _tensors(module)
    rules = _Rules.of(module)
    sources: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
    under: dict[str, set[str]] = defaultdict(set)
    for name in sorted(stored, key=rules.in_order):
        target, pattern = rules.target(name)
        if target in names:
            sources[names[target]].append((name, pattern))
            under[names[target]].add(target)
    if twice := sorted(name for name, targets in under.items() if len(targets) > 1):
        raise NoOutline(
            f"its files hold '{twice[0]}' under each of the names {sorted(under[twice[0]])} that"
            " share it"
        )
    parts = {
        name: tuple(_joined(name, tuple(tensors[name].shape), origins, stored, rules))
        for name, origins in sources.items()
    }
    if rules.is_needed_to_save:
        setattr(module, _SAVED_AS, parts)
    rules.leave(module)
    return Outline(module, parts, frozenset(tensors.keys() - parts.keys()))


def saved_as(module: Any) -> Mapping[str, Sequence[FileTensor]] | None:
    """Which of a module's tensors have other names in a folder that transformers loads; None:
    unknown.
    """
    if hasattr(module, _SAVED_AS):
        saved: Mapping[str, Sequence[FileTensor]] = getattr(module, _SAVED_AS)
        return saved
    try:
        return None if _Rules.of(module).is_needed_to_save else {}
    except NoOutline:
        return None


_SAVED_AS = "_dataflow_saved_as"


def _tensors(module: Any) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Every tensor name of the module, mapped to the first name of the same tensor; and the tensors
    by first name: parameters, and buffers that are saved.
    """
    names: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    first: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names[name] = first.setdefault(id(tensor), name)
        tensors.setdefault(names[name], tensor)
    return names, tensors


class _Rules:
    """What transformers knows of the names in a family's files."""

    def __init__(self, module: Any, transforms: Sequence[Any], own: Sequence[Any]) -> None:
        """own: the transforms that also apply when the model is saved."""
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        self.in_order: Callable[[str], Any] = dot_natural_key
        self._transforms = transforms
        self.is_needed_to_save = bool(own)
        self._rename = rename_source_key
        self._renamings = [
            transform for transform in transforms if isinstance(transform, WeightRenaming)
        ]
        self._converters = [
            transform for transform in transforms if isinstance(transform, WeightConverter)
        ]
        self._of_pattern = {
            pattern: converter
            for converter in self._converters
            for pattern in converter.source_patterns
        }
        self._prefix, self._wanted = module.base_model_prefix, module.state_dict()

    @classmethod
    def of(cls, module: Any) -> _Rules:
        """Raises NoOutline where this version of transformers defines them otherwise."""
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import PrefixChange

            own = [
                transform
                for transform in get_model_conversion_mapping(module, add_legacy=False)
                if not isinstance(transform, PrefixChange)
            ]
            return cls(module, get_model_conversion_mapping(module), own)
        except (ImportError, AttributeError, TypeError) as error:
            raise NoOutline(
                f"this transformers does not tell how its files are read ({error})"
            ) from error

    def target(self, name: str) -> tuple[str, str | None]:
        """The module's name for a file's, and the pattern of the conversion that it has a part in,
        if any.
        """
        renamed: tuple[str, str | None] = self._rename(
            name, self._renamings, self._converters, self._prefix, self._wanted
        )
        if renamed[0] not in self._wanted and name in self._wanted:
            return self._rename(
                name, [], [], base_model_prefix=self._prefix, meta_state_dict=self._wanted
            )
        return renamed

    def conversion(self, pattern: str) -> Any:
        """That of a pattern."""
        return self._of_pattern[pattern]

    def leave(self, module: Any) -> None:
        """What `save_pretrained` undoes: the conversions that were used."""
        module._weight_conversions = [
            transform for transform in self._transforms if transform.was_used()
        ]


def _joined(
    name: str,
    shape: tuple[int, ...],
    sources: Sequence[tuple[str, str | None]],
    stored: Mapping[str, StoredTensor],
    rules: _Rules,
) -> Iterator[FileTensor]:
    """The parts of a tensor that is made of these sources: (name in a file, pattern)."""
    pattern = sources[0][1]
    is_stacked, dim = False, 0
    order: Sequence[str | None] = [pattern]
    if pattern is None and len(sources) > 1:
        raise NoOutline(f"its files hold '{name}' {len(sources)} times")
    if pattern is not None:
        is_stacked, dim, order = _putting_together(name, rules.conversion(pattern))
    at, covered = 0, 0
    for chosen in order:
        thickness = 0
        for number, source in enumerate(
            source for source, own_pattern in sources if own_pattern == chosen
        ):
            tensor = stored[source]
            if is_stacked:
                tensor = replace(tensor, shape=(1, *tensor.shape))
            offsets = [0] * len(shape)
            if shape:
                offsets[dim] += at
                offsets[0] += number if is_stacked else 0
            ends = [first + size for first, size in zip(offsets, tensor.shape, strict=False)]
            if len(tensor.shape) != len(shape) or any(
                end > most for end, most in zip(ends, shape, strict=True)
            ):
                raise NoOutline(
                    f"'{source}' is {list(stored[source].shape)}, but '{name}' is {list(shape)}"
                )
            yield FileTensor(source, stored[source].shape, tensor, tuple(offsets))
            covered += math.prod(tensor.shape)
            thickness = tensor.shape[dim] if shape else 0
            at += 0 if is_stacked else thickness
        at += thickness if is_stacked else 0
    if covered != math.prod(shape):
        raise NoOutline(
            f"its files hold {covered} numbers of '{name}', which has {math.prod(shape)}"
        )


def _putting_together(name: str, conversion: Any) -> tuple[bool, int, list[str]]:
    """Whether a conversion stacks the tensors of each pattern, the dimension along which it puts
    those of one pattern after those of another, and the patterns in that order. NoOutline where it
    does anything else.
    """
    from transformers.core_model_loading import Concatenate, MergeModulelist

    kinds = [type(operation) for operation in conversion.operations]
    if (
        len(conversion.target_patterns) == 1
        and kinds
        and set(kinds) <= {MergeModulelist, Concatenate}
    ):
        dims = [operation.dim for operation in conversion.operations]
        if kinds == [Concatenate] and dims[0] >= 0:
            return False, dims[0], list(conversion.source_patterns)
        if (
            kinds[0] is MergeModulelist
            and dims[0] == 0
            and len(kinds) == 1
            and len(conversion.source_patterns) == 1
        ):
            return True, 0, list(conversion.source_patterns)
        if kinds == [MergeModulelist, Concatenate] and dims[0] == 0 and dims[1] > 0:
            return True, dims[1], list(conversion.source_patterns)
    raise NoOutline(f"'{name}' is made by {conversion.operations}")


def _fill(file: int, part: FileTensor, into: Tensor, runs: Runs) -> None:
    for first, own_first, size in boxes(runs):
        common = overlap(first, size, part.offsets, part.stored.shape)
        if common is not None:
            begin, sizes = common
            local = [at + b - f for at, b, f in zip(own_first, begin, first, strict=True)]
            offsets = [b - o for b, o in zip(begin, part.offsets, strict=True)]
            read_part(file, part.stored, offsets, narrowed(into, local, sizes))


@contextlib.contextmanager
def _files() -> Iterator[Callable[[Path], int]]:
    """Opens each file once."""
    opened: dict[Path, int] = {}

    def file(path: Path) -> int:
        if path not in opened:
            opened[path] = os.open(path, os.O_RDONLY)
        return opened[path]

    try:
        yield file
    finally:
        for descriptor in opened.values():
            os.close(descriptor)


def with_buffers(module: Any) -> Any:
    """A model of transformers on the meta device, with its buffers computed on the CPU, as when it
    is loaded.
    """
    for submodule in module.modules():
        if any(buffer.is_meta for buffer in submodule._buffers.values() if buffer is not None):
            for name, buffer in submodule._buffers.items():
                submodule._buffers[name] = (
                    None if buffer is None else torch.empty_like(buffer, device="cpu")
                )
            submodule._is_hf_initialized = False
    with torch.device("cpu"):
        module.initialize_weights()
    return module


def given_memory(module: Any, device: str | torch.device) -> Any:
    """The module with memory for each of its tensors that has none, not set to anything, and the
    others on `device`.
    """

    def moved(tensor: Tensor) -> Tensor:
        copied = (
            torch.empty_like(tensor, device=device)
            if tensor.is_meta
            else tensor.detach().to(device)
        )
        return (
            torch.nn.Parameter(copied, tensor.requires_grad)
            if isinstance(tensor, torch.nn.Parameter)
            else copied
        )

    return exchanged(module, moved)


def exchanged(module: Any, replacement: Callable[[Any], Any]) -> Any:
    """The module with another tensor in the place of each; what was shared stays shared."""
    replaced: dict[int, tuple[Any, Any]] = {}
    for submodule in module.modules():
        for tensors in (submodule._parameters, submodule._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    if id(tensor) not in replaced:
                        replaced[id(tensor)] = tensor, replacement(tensor)
                    tensors[name] = replaced[id(tensor)][1]
    return module


def files_of(source: str, revision: str | None) -> list[Path]:
    """The safetensors files of a folder, or of a model on the hub. NoOutline where it has none, or
    of another name.
    """
    from transformers.utils.hub import cached_file

    def found(name: str) -> Path | None:
        path = cached_file(
            source,
            name,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return None if path is None else Path(path)

    if (single := found(WEIGHTS)) is not None:
        return [single]
    if (index := found(INDEX)) is None:
        raise NoOutline(f"it has neither {WEIGHTS} nor {INDEX}")
    names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    files = [path for name in names if (path := found(name)) is not None]
    if len(files) < len(names):
        raise NoOutline("some of its files are missing")
    return files


def held(tensor: Any) -> Runs:
    """Of a tensor, all; of a DTensor, what this rank holds: of each dimension, ranges [first, last)
    of indices.
    """
    if not isinstance(tensor, DTensor):
        return whole(tensor.shape)
    return [_along(tensor, dim) for dim in range(tensor.ndim)]


def _along(tensor: DTensor, dim: int) -> list[tuple[int, int]]:
    size = tensor.shape[dim]
    of_axis = [getattr(placement, "dim", None) for placement in tensor.placements]
    cuts = [
        axis for axis, cut in enumerate(of_axis) if cut is not None and cut % tensor.ndim == dim
    ]
    if not cuts:
        return [(0, size)]
    if len(cuts) > 1:
        shape, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        return [(offset[dim], offset[dim] + shape[dim])]
    (axis,), mesh = cuts, tensor.device_mesh
    if mesh.ndim > 1:
        mesh = mesh[(mesh.mesh_dim_names or ())[axis]]
    index = torch.arange(size).view([size if axis == dim else 1 for axis in range(tensor.ndim)])
    mine = distribute_tensor(index, mesh, [tensor.placements[axis]], src_data_rank=None).to_local()
    return runs_of(mine.flatten().tolist())


def runs_of(index: list[int]) -> list[tuple[int, int]]:
    """Indices as ranges [first, last) of neighbours."""
    runs: list[tuple[int, int]] = []
    for at in index:
        if runs and runs[-1][1] == at:
            runs[-1] = (runs[-1][0], at + 1)
        else:
            runs.append((at, at + 1))
    return runs
