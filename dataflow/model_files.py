"""What the files of a model's folder tell before anything is loaded: whether it can be a model at
all.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dataflow.gguf.content import GGUFError, read_content
from dataflow.gguf.conversion import file_fault, file_of, folder_of
from dataflow.gguf.decoders import decoder_in
from dataflow.gguf.vocabulary import template_of
from dataflow.model import ADAPTER_CONFIG, Model, holds_adapters, is_gguf, saved_adapters

INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"
_TOKENIZER_CONFIG, _TEMPLATES = (
    "tokenizer_config.json",
    ("chat_template.jinja", "chat_template.json"),
)
_MOST_HEADER = 100 << 20
_HUB_S = 5.0


@dataclass(frozen=True, kw_only=True)
class PromisedModel:
    """What the files of a model will tell that a run makes when it starts."""

    config: Mapping[str, Any]
    shapes: Mapping[str, list[int]]
    """By tensor."""
    how: str
    """For people."""


PROMISED: ContextVar[dict[str, PromisedModel] | None] = ContextVar("promised", default=None)
"""By source, models that an explanation does not make; None: this is none, so that models are
made."""


def promised(source: str) -> PromisedModel | None:
    """Of a model that a run would make first, a GGUF file that is not converted too; None: it is
    there, or nobody promised it.
    """
    promises = PROMISED.get(None)
    if is_gguf(source) and folder_here(source) is None:
        try:
            decoder = decoder_in(read_content(file_of(source)))
        except (GGUFError, OSError):
            return None
        shapes = {tensor.name: list(tensor.shape) for tensor in decoder.tensors}
        promise = PromisedModel(
            config=decoder.config, shapes=shapes, how="the conversion of its GGUF file"
        )
        return promise if promises is None else promises.setdefault(source, promise)
    return (promises or {}).get(source)


def folder_here(source: str) -> Path | None:
    """The folder of a model's files on this machine: of a GGUF file, the one that it was converted
    into; None where none is there.
    """
    if not is_gguf(source):
        return Path(source) if Path(source).is_dir() else None
    try:
        folder = folder_of(source)
    except (GGUFError, OSError):
        return None
    return folder if folder.is_dir() else None


def config_of(source: str) -> Any:
    """The config of the model in a folder, or of an id in the hub's cache. Raises OSError,
    ValueError.
    """
    if (promise := promised(source)) is not None:
        return promise.config
    return json.loads(
        (
            (folder_here(source) or Path(source)) / _CONFIG
            if not _is_id(source)
            else _cached(source)
        ).read_text("utf-8")
    )


def fetch_config(source: str) -> None:
    """Have the config of an id on the hub in its cache. OSError where it cannot be had, in words;
    nothing is done for a folder.
    """
    if not _is_id(source):
        return
    if (fault := _hub_fault(Model(source))) is not None:
        raise OSError(fault.partition(": ")[2].partition("; ")[0])
    from huggingface_hub import hf_hub_download

    hf_hub_download(source, _CONFIG)


def _is_id(source: str) -> bool:
    path = Path(source)
    return not (
        path.exists()
        or path.is_absolute()
        or is_gguf(source)
        or source.startswith((".", "~"))
        or source.count("/") != 1
    )


def _cached(source: str) -> Path:
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(source, _CONFIG)
    return Path(cached) if isinstance(cached, str) else Path(source) / _CONFIG


def folder_fault(model: Model) -> str | None:
    """Why a model's folder cannot be loaded from, in three parts: it is not there, or lacks what
    loading needs; None where it may be well, or the model is none of this machine's.
    """
    folder = Path(model.source)
    head = f"model '{model.name}' cannot be loaded: "
    if is_gguf(model.source):
        fault = None if folder_here(model.source) is not None else file_fault(model.source)
        return fault and f"{head}{fault}"
    if promised(model.source) is not None:
        return None
    if not folder.is_dir():
        if (
            folder.is_absolute()
            or model.source.startswith((".", "~"))
            or model.source.count("/") > 1
        ):
            return (
                f"{head}there is no folder {model.source}; "
                "give a folder with config.json and safetensors, or an id on the hub"
            )
        return None
    if holds_adapters(model.source):
        return None
    if (folder / ADAPTER_CONFIG).is_file():
        return (
            f"{head}{folder} holds a whole model and adapters beside it, and libraries differ in"
            f" which of them they read; move {ADAPTER_CONFIG} away, or the whole model's files"
        )
    if not (folder / _CONFIG).is_file():
        names = sorted(path.name for path in folder.iterdir())
        file = next((name for name in names if is_gguf(name)), None)
        fix = f"the file itself, {folder / file}" if file else "a folder that save_pretrained wrote"
        return f"{head}{folder} has no config.json, only {names[:8]}; give {fix}"
    if not (folder / INDEX).is_file():
        return None
    try:
        shards = set(json.loads((folder / INDEX).read_text("utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        return f"{head}{folder / INDEX} is broken ({error}); copy it again"
    missing = sorted(shard for shard in shards if not (folder / shard).is_file())
    if missing:
        return (
            f"{head}{INDEX} names {len(shards)} shards but {missing} are not in {folder}; copy the"
            " missing files there"
        )
    return None


def start_fault(model: Model) -> str | None:
    """Why a run cannot start with this model: what `folder_fault` says, an id that the hub does not
    know, a config of a kind that no decoder has, or weights that are no safetensors.
    """
    if (fault := folder_fault(model)) is not None:
        return fault
    folder = Path(model.source)
    if promised(model.source) is not None or is_gguf(model.source):
        return None
    if not folder.is_dir():
        return _hub_fault(model)
    if holds_adapters(model.source):
        saved = saved_adapters(model.source)
        base, revision = saved.get("base_model_name_or_path"), saved.get("revision")
        return (
            start_fault(replace(model, source=base, revision=revision, lora=None)) if base else None
        )
    head = f"model '{model.name}' cannot be loaded: "
    try:
        config: Any = json.loads((folder / _CONFIG).read_text("utf-8"))
    except (OSError, ValueError) as error:
        return f"{head}{folder / _CONFIG} is no JSON ({error}); copy it again"
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        return (
            f"{head}{folder / _CONFIG} names no model_type; give a folder that save_pretrained"
            " wrote"
        )
    if config.get("is_encoder_decoder"):
        return (
            f"{head}a '{config['model_type']}' reads with an encoder; give a decoder, such as a"
            " Llama or a Qwen"
        )
    if "auto_map" in config and not model.trust_remote_code and not config.get("architectures"):
        return (
            f"{head}it has code of its own (auto_map); read it and, if you trust it, give"
            " trust_remote_code=True"
        )
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        names = sorted(path.name for path in folder.iterdir())[:8]
        return (
            f"{head}{folder} has no weights in safetensors, only {names}; save them with"
            " save_pretrained"
        )
    for file in files:
        try:
            tensor_shapes(file)
        except (OSError, ValueError) as error:
            return f"{head}{error}; copy it again"
    return None


def _hub_fault(model: Model) -> str | None:
    """Why a model that is no folder here cannot be had: it is not in the hub's cache, and the hub
    has none.
    """
    if (
        why := hub_refusal(model.source, (_CONFIG, ADAPTER_CONFIG), revision=model.revision)
    ) is None:
        return None
    return (
        f"model '{model.name}' cannot be loaded: there is no folder {model.source} here, and the"
        f" hub gives no model of that id ({why}); give a folder with config.json and safetensors,"
        " or an id on the hub"
    )


def hub_refusal(
    name: str, files: Sequence[str], *, kind: str | None = None, revision: str | None = None
) -> str | None:
    """What the hub says when it is asked for an id; None where it has one, or its cache here has
    one of the files.

    kind: None for a model, "dataset" for a data set.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    try:
        for file in files:
            if isinstance(
                try_to_load_from_cache(name, file, repo_type=kind, revision=revision), str
            ):
                return None
        get_hf_file_metadata(
            hf_hub_url(name, files[0], repo_type=kind, revision=revision), timeout=_HUB_S
        )
    except Exception as error:
        # it has other files
        if type(error).__name__ in ("EntryNotFoundError", "RemoteEntryNotFoundError"):
            return None
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no word'])[0]:.200}"
    return None


def template_fault(model: Model) -> str | None:
    """Why prompts cannot be laid out as chat messages, in three parts: the folder's tokenizer has
    no template; None where it has one, or where that cannot be told from files of this machine.
    """
    folder = folder_here(model.source) or Path(model.source)
    if is_gguf(model.source) and not folder.is_dir():
        return _file_template_fault(model)
    if not (folder / _TOKENIZER_CONFIG).is_file() or any(
        (folder / name).exists() for name in _TEMPLATES
    ):
        return None
    try:
        config: Any = json.loads((folder / _TOKENIZER_CONFIG).read_text("utf-8"))
    except (OSError, ValueError):
        return None  # who loads the tokenizer says it
    if not isinstance(config, dict) or config.get("chat_template"):
        return None
    return (
        f"prompts for model '{model.name}' cannot be laid out as chat messages: neither"
        f" {_TOKENIZER_CONFIG} nor {_TEMPLATES[0]} in {folder} has a chat template; give its"
        " tokenizer one, or use chat=False"
    )


def _file_template_fault(model: Model) -> str | None:
    try:
        if template_of(read_content(file_of(model.source))) is not None:
            return None
    except (GGUFError, OSError):
        return None  # who loads the model says it
    return (
        f"prompts for model '{model.name}' cannot be laid out as chat messages: its GGUF file has"
        " no chat template; give a file of the instructed model, or use chat=False"
    )


def tensor_shapes(file: Path) -> dict[str, list[int]]:
    """Shapes by name of a safetensors file: 8 bytes of length, then a JSON header with every
    tensor's. ValueError where it is none.
    """
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(min(length, _MOST_HEADER)))
        return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is torn or no safetensors file ({error})") from error
