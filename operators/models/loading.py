"""Loads what a `dataflow.Model` names: torch module and tokenizer, from a Hugging Face folder or
id.

A GGUF file is converted into such a folder first, where that has not been done
(`dataflow.gguf.conversion`).

Weights are read tensor by tensor into memory of their own, so that no file stays mapped (`slices`).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from dataflow.gguf.content import GGUFError
from dataflow.gguf.conversion import converted
from dataflow.model import LoRA, Model, holds_adapters, is_gguf
from dataflow.model_files import folder_fault
from operators.models.folders import ModelError, base_of

if TYPE_CHECKING:
    import torch

    from operators.models.adapters import Merged
    from operators.models.slices import Outline, Runs


def decoder_layers(module: Any) -> list[torch.nn.Module]:
    """The repeated blocks of a model of transformers. ModelError where it marks none."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[torch.nn.Module] = [
        layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)
    ]
    if not layers:
        raise ModelError(
            f"{type(module).__name__} has no layers that can be switched one by one; found no"
            " GradientCheckpointingLayer of transformers; leave gradient_checkpointing and"
            " compile out"
        )
    return layers


_M_MMAP_THRESHOLD = -3
MAPPED_BYTES = 2 << 20


def trim_memory() -> None:
    """Give back what lies free anywhere in the heap: workers keep up to 256 MiB of it otherwise
    (`transport.data.keep_freed_memory`), and holes of any size. Takes milliseconds for each 100
    MiB.
    """
    with contextlib.suppress(AttributeError, OSError):  # not every C library has it
        ctypes.CDLL(None).malloc_trim(0)


def map_large_blocks() -> None:
    """Have blocks of 2 MiB and more mapped by themselves, and given back when they are freed.

    For a process that takes and gives back tensors as large as a layer's again and again: in the
    heap smaller ones come to lie in the holes that they leave, so that the next does not fit. Costs
    the kernel's zeroing of pages at each use.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)


def load_model(
    model: Model,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    attention: str | None = None,
) -> torch.nn.Module:
    """The torch module of `model`, in eval mode, with every weight taken from safetensors files.

    Of a folder that holds adapters alone, the model that they belong to, with them merged in;
    `lora` is not read.

    A model with head "lm" gives next-token logits; "value" a number per token: 0 where the folder
    has no such head, as that of a policy; "score" a number per sequence.

    Args:
        device: where the weights go, "cpu" or "cuda:N".
        dtype: type of the weights; `model.dtype` when None.
        attention: name of a registered attention function; transformers chooses when None.

    Raises:
        ModelError: no such folder or id, a missing or broken shard, weights that do not belong to
            the config, a head "score" that the folder lacks, or code of its own without
            `trust_remote_code`.
    """

    _check_folder(model)
    if base_of(model)[1] is not None:
        return load_merged(model, device=device, dtype=dtype, attention=attention)[0]
    outline = outlined(model, dtype=dtype, attention=attention)
    if outline is None:
        return _loaded_at_once(model, dtype, attention).to(device)
    return _loaded(model, outline, device)


def outlined(
    model: Model, *, dtype: str | torch.dtype | None = None, attention: str | None = None
) -> Outline | None:
    """The module of `model` on the meta device, in eval mode, and where its weights lie, for ranks
    that read what they hold; None where it has to be loaded at once, which the log says why.
    Arguments and errors as `load_model`; a source that holds adapters alone has none.
    """
    from operators.models.borders import settle_rope
    from operators.models.slices import NoOutline, files_of, outline

    _check_folder(model)
    try:
        if base_of(model)[1] is not None:
            raise NoOutline("it holds adapters alone")
        with no_progress_bar():
            module = on_meta(model, dtype, attention)
        layout = outline(module, files_of(_located(model), model.revision))
        if lacking := sorted(
            name for name in layout.missing if model.head != "value" or not _is_of_head(name)
        ):
            raise NoOutline(f"its files have no {lacking[:3]}")
    except Exception as reason:
        # whatever it is, loading at once gets round it or says what is wrong
        structlog.get_logger().info(
            "model loaded at once", model=model.name, source=model.source, reason=str(reason)
        )
        return None
    settle_rope(layout.module, model.name, model.context_tokens)
    if layout.missing:
        _log_new_head(model, layout.missing)
    return layout


def fill(model: Model, outline: Outline, tensors: Mapping[str, tuple[torch.Tensor, Runs]]) -> None:
    """`Outline.fill`, and then memory that reading took is given back. ModelError where a file
    cannot be read.
    """
    with _attributed(model, "weights"):
        outline.fill(tensors)
    trim_memory()


def _loaded(model: Model, outline: Outline, device: str | torch.device) -> torch.nn.Module:
    """All of an outline, in memory of its own."""
    from operators.models.slices import given_memory, whole

    module: torch.nn.Module = given_memory(outline.module, device)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    fill(
        model,
        outline,
        {name: (tensors[name].data, whole(tensors[name].shape)) for name in outline.names},
    )
    return module


def on_meta(
    model: Model, dtype: str | torch.dtype | None, attention: str | None
) -> torch.nn.Module:
    """A model of transformers without its weights, whose buffers are computed. NoOutline for
    another.
    """
    import torch
    import transformers

    from operators.models.slices import NoOutline, with_buffers

    chosen = _dtype(model, dtype)
    source = _located(model)
    config = transformers.AutoConfig.from_pretrained(
        source,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
        **_options(model, None),
    )
    if getattr(config, "quantization_config", None) is not None:
        raise NoOutline("its files are quantised")
    if getattr(config, "auto_map", None):
        raise NoOutline("it has code of its own")
    options = {} if attention is None else {"attn_implementation": attention}
    came_as = getattr(config, "dtype", None)
    with torch.device("meta"):
        module = _loader(model).from_config(config, dtype=chosen, **options)
    module.came_as = came_as
    if module._get_dtype_plan(chosen):
        raise NoOutline(f"not all of its weights are to be {chosen}")
    if module.can_generate():
        with contextlib.suppress(OSError):
            module.generation_config = transformers.GenerationConfig.from_pretrained(
                source, revision=model.revision or "main"
            )
    return with_buffers(module).eval()  # type: ignore[no-any-return]


def _loaded_at_once(
    model: Model, dtype: str | torch.dtype | None, attention: str | None
) -> torch.nn.Module:
    """As transformers loads it, in memory of its own: what it gives are parts of mapped files,
    anywhere in them, and on CPUs the last bit of a matrix product depends on where its factors
    begin.
    """
    import torch

    from operators.models.borders import settle_rope

    with _attributed(model, "weights"), no_progress_bar():
        module, loading_info = _loader(model).from_pretrained(
            _located(model),
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
            dtype=_dtype(model, dtype),
            use_safetensors=True,
            output_loading_info=True,
            **_options(model, attention),
        )
    if getattr(module, "peft_config", None):
        raise ModelError(
            f"model '{model.name}' cannot be loaded: {model.source} holds adapters of another"
            f" model, found on the hub; download it (hf download {model.source}), and give the"
            " folder"
        )
    _check_weights(model, loading_info)
    _settle_head(model, module, loading_info)
    settle_rope(module, model.name, model.context_tokens)
    module.came_as = getattr(load_configs(model)[0], "dtype", None)
    for weight in module.parameters():
        weight.data = weight.data.clone(memory_format=torch.contiguous_format)
    trim_memory()
    return module.eval()  # type: ignore[no-any-return]


def _options(model: Model, attention: str | None) -> dict[str, Any]:
    options: dict[str, Any] = {} if model.head == "lm" else {"num_labels": 1}
    return options if attention is None else options | {"attn_implementation": attention}


def _dtype(model: Model, dtype: str | torch.dtype | None) -> torch.dtype:
    import torch

    chosen: torch.dtype = (
        dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype or model.dtype)
    )
    return chosen


def load_merged(
    model: Model,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    attention: str | None = None,
) -> tuple[torch.nn.Module, Merged | None]:
    """The plain module of `model`, without gradients, and where it has adapters, what brings new
    ones into it.

    A source that holds adapters alone is loaded as the model they were trained on with them merged
    in. Arguments as those of `load_model`.

    Raises:
        ModelError: as `load_model`, `adapters.read` and `adapters.adapted_layers`.
    """
    from operators.models.adapters import Merged, adapted_layers, read

    base, folder = base_of(model)
    module = load_model(base, device=device, dtype=dtype, attention=attention).requires_grad_(False)
    if model.lora is None and folder is None:
        return module, None
    merged = Merged(module, adapted_layers(module, model.lora or LoRA(), folder))
    if folder is not None:
        read(folder, merged.tensors)
        merged.adopted()
    return module, None if model.lora is None else merged


def load_adapted(model: Model, *, device: str | torch.device = "cpu") -> torch.nn.Module:
    """The module of `model` with its adapters, in eval mode: what a trainer trains.

    The weights are in the model's dtype and need no gradient; adapters are float32 and do. Where
    the source is a folder that `save` wrote, the weights come from where it says, and the adapters
    from it.

    Raises:
        ModelError: as `load_model`; peft is not there; no layer of that name; adapters of another
            shape.
    """
    assert model.lora is not None, "a model without adapters is loaded by load_model"
    from operators.models import adapters

    base, folder = base_of(model)
    module = adapters.add(load_model(base, device=device), model.lora, base, folder)
    if folder is not None:
        adapters.load(folder, module)
    return module


def outlined_to_train(model: Model) -> Outline | None:
    """As `outlined`, for a trainer: float32 weights, or those of `load_adapted`. Errors as
    `outlined`.
    """
    from operators.models import adapters

    if model.lora is None:
        return outlined(model, dtype="float32")
    base, folder = base_of(model)
    base_outline = outlined(base)
    if base_outline is None:
        return None
    with_adapters = adapters.outlined(base_outline, model.lora, base, folder)
    if folder is not None:
        adapters.read(folder, with_adapters.values)
    return with_adapters


def preload(model: Model) -> None:
    """Import the code of `model`, and what loads it, for the processes that are forked from this
    one.

    No weight is read and no device is touched; nothing is fetched, and no code of the model's own
    is run.
    """
    import torch
    import transformers

    from operators.models.slices import saved_as

    base, _ = base_of(model)
    if not base.trust_remote_code:
        config = transformers.AutoConfig.from_pretrained(
            _located(base), revision=base.revision, local_files_only=True
        )
        with torch.device("meta"):
            module = _loader(base).from_config(config)
        saved_as(module)  # for this, transformers compiles the names of all families


def load_tokenizer(model: Model) -> Any:
    """The tokenizer of `model`, a `transformers.PreTrainedTokenizerBase`: where a folder holds
    adapters and no tokenizer, that of the model that they belong to.

    Raises:
        ModelError: as `load_model`, or the folder has no tokenizer.
    """
    import transformers

    _check_folder(model)
    if (
        holds_adapters(model.source)
        and not (Path(model.source) / "tokenizer_config.json").is_file()
    ):
        model, _ = base_of(model)
    with _attributed(model, "tokenizer"):
        return transformers.AutoTokenizer.from_pretrained(
            _located(model), revision=model.revision, trust_remote_code=model.trust_remote_code
        )


def load_configs(model: Model) -> tuple[Any, Any | None]:
    """Config and generation config of `model` (None where it has none), without its weights.

    Raises:
        ModelError: as `load_model`.
    """
    import transformers

    _check_folder(model)
    model, _ = base_of(model)
    with _attributed(model, "config"):
        config = transformers.AutoConfig.from_pretrained(
            _located(model), revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    try:
        return config, transformers.GenerationConfig.from_pretrained(
            _located(model), revision=model.revision or "main"
        )
    except OSError:
        return config, None


def _loader(model: Model) -> Any:
    """The transformers class that makes the module of a model with this head."""
    import transformers

    return {
        "lm": transformers.AutoModelForCausalLM,
        "value": transformers.AutoModelForTokenClassification,
        "score": transformers.AutoModelForSequenceClassification,
    }[model.head]


def _check_folder(model: Model) -> None:
    """Refuse a folder that is not there or lacks a shard that its index names."""
    if (fault := folder_fault(model)) is not None:
        raise ModelError(fault)


def _located(model: Model) -> str:
    """The folder or id that transformers is given: of a GGUF file the folder that it is converted
    into, now if need be.
    """
    if not is_gguf(model.source):
        return model.source
    try:
        return str(converted(model.source, tell=structlog.get_logger().info))
    except GGUFError as error:
        raise ModelError(f"model '{model.name}' cannot be loaded: {error}") from error


def _check_weights(model: Model, loading_info: dict[str, Any]) -> None:
    """Refuse weights that were left to chance: missing ones would be random numbers."""
    missing = sorted(loading_info.get("missing_keys", ()))
    if model.head != "lm":
        missing = [key for key in missing if not _is_of_head(key)]
    mismatched = sorted(str(entry) for entry in loading_info.get("mismatched_keys", ()))
    if missing or mismatched:
        raise ModelError(
            f"model '{model.name}' cannot be loaded: its config needs {len(missing)} weights that "
            f"{model.source} does not have and {len(mismatched)} of another shape, "
            f"such as {(missing + mismatched)[:3]}; "
            "give weights that belong to this config.json"
        )


def _settle_head(model: Model, module: Any, loading_info: dict[str, Any]) -> None:
    """A critic without a head begins at 0, the same for every seed; a judge without one would give
    random numbers.
    """
    fresh = sorted(key for key in loading_info.get("missing_keys", ()) if _is_of_head(key))
    if model.head == "value" and fresh:
        parameters = dict(module.named_parameters())
        for name in fresh:
            parameters[name].data.zero_()
        _log_new_head(model, fresh)
    elif model.head == "score" and fresh:
        raise ModelError(
            f"model '{model.name}' cannot be loaded: it is to give scores, but {model.source} has"
            f" no {fresh}, and random weights would judge at random; give a sequence classifier"
            " with one label, such as a reward model"
        )


def _log_new_head(model: Model, names: Iterable[str]) -> None:
    structlog.get_logger().info(
        "value head set to 0", model=model.name, source=model.source, weights=sorted(names)
    )


def _is_of_head(key: str) -> bool:
    return key.split(".")[0] in ("score", "classifier")


@contextlib.contextmanager
def _attributed(model: Model, part: str) -> Iterator[None]:
    """Whatever transformers raises while loading, as a ModelError with a way out."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        text = (
            f"{type(error).__name__}:"
            f" {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        )
        way_out = "check the folder's files, or the id and revision on the hub"
        if "trust_remote_code" in str(error):
            way_out = "read that code and, if you trust it, give Model(..., trust_remote_code=True)"
            text = "it comes with Python code of its own (auto_map), which may not run"
        raise ModelError(
            f"{part} of model '{model.name}' cannot be loaded from {model.source}: {text};"
            f" {way_out}"
        ) from error


@contextlib.contextmanager
def no_progress_bar() -> Iterator[None]:
    """Keep transformers from drawing a bar into a worker's log."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
