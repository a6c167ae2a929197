"""How large a model is: by the headers of its safetensors files, or by its config alone; nothing is
loaded.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dataflow.model import ALL_LINEAR, LoRA, saved_adapters
from dataflow.model_files import config_of, folder_here, promised, tensor_shapes
from dataflow.structure import Structure
from dataflow.weight_ends import Refresh
from transport.weights.costs.decoder import Decoder
from transport.weights.errors import LayoutMismatch

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def bytes_of(dtype: str) -> int:
    """Bytes of a number in this dtype."""
    return _BYTES[dtype]


TOGETHER = ("experts", "latent")
"""Names of matrices that no adapter takes."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Parameters of a model."""

    parameters: int
    largest_end: int = 0
    """Parameters of the embedding, or of the head."""
    linear: tuple[tuple[str, int, int], ...] = ()
    """(last name, outputs, inputs) of the layers that may have adapters."""

    layers: int = 0
    width: int = 0
    """Width of a hidden state; 0, as the others, where the config does not say."""
    cache_elements: int = 0
    """Numbers in keys and values of one token, in all layers."""
    key_value_heads: int = 0
    """Key and value heads of a layer; more ranks than these hold some of them alike."""
    context: int = 0
    """Most tokens of prompt and completion."""
    query_width: int = 0
    """Query heads times their width."""
    inner: int = 0
    """Width of the MLP, of all experts of a token together."""
    norms_heads: bool = False
    """Whether queries and keys are normalized head by head."""
    tied: bool = False
    """Whether the head is the embedding."""
    is_foreseen: bool = False
    """Whether a config alone tells this, and no file of weights."""

    @property
    def linear_numbers(self) -> int:
        """Parameters of all linear layers."""
        return sum(rows * columns for _, rows, columns in self.linear)

    def held_numbers(self, tensor_parallel: int) -> int:
        """Parameters of all ranks of a trainer together, so many of which share out each layer and
        each hold what the others do of embedding and head.
        """
        ends = self.largest_end * (1 if self.tied else 2)
        return self.parameters + (tensor_parallel - 1) * ends

    @property
    def key_width(self) -> int:
        """Width of a token's keys in a layer."""
        return self.cache_elements // (2 * self.layers) if self.layers else 0

    @property
    def architecture(self) -> tuple[object, ...]:
        """Equal where weights of one fit into the other, whatever the head."""
        return self.linear, self.layers, self.width

    @property
    def told(self) -> str:
        """For people: `2 layers of width 64, 4,096 numbers in linear layers`."""
        return (
            f"{self.layers} layers of width {self.width}, {self.linear_numbers:,} numbers in their"
            " linear layers"
        )

    def memory_bytes(self, dtype: str, trains: bool, lora: LoRA | None = None) -> int:
        """Bytes of all `parts`."""
        return sum(self.parts(dtype, trains, lora).values())

    def parts(
        self, dtype: str, trains: bool, lora: LoRA | None = None, quantized: str | None = None
    ) -> dict[str, int]:
        """Estimate: weights alone to read; weights, gradients and two AdamW moments in float32 to
        train.

        With adapters these four are of them alone, beside weights in `dtype`; a reader has the
        adapted layers twice. quantized: linear layers that are read take a byte a number.
        """
        if trains and lora is None:
            return {
                "weights": 4 * self.parameters,
                "gradients": 4 * self.parameters,
                "optimiser": 8 * self.parameters,
            }
        weights = self.parameters * _BYTES[dtype]
        if quantized is not None and not trains:
            weights -= self.linear_numbers * (_BYTES[dtype] - 1)
        if lora is None:
            return {"weights": weights}
        small = 4 * self._adapters(lora)
        if trains:
            return {
                "weights": weights,
                "adapters": small,
                "gradients": small,
                "optimiser": 2 * small,
            }
        again = sum(rows * columns for _, rows, columns in self._adapted(lora)) * _BYTES[dtype]
        return {"weights": weights, "adapted layers": again, "adapters": small}

    def kept_bytes(self, dtype: str, refresh: Refresh, lora: LoRA | None = None) -> int:
        """Of what a trainer keeps for readers that it refreshes so: the average in float32, the
        version they have.
        """
        count = self.parameters if lora is None else self._adapters(lora)
        return count * (4 * bool(refresh.decay) + _BYTES[dtype] * (refresh.every > 1))

    def sent_bytes(
        self, dtype: str, lora: LoRA | None = None, ranks: int = 1, quantized: str | None = None
    ) -> int:
        """Of a version on its way to a reader, the most that one of its ranks takes. quantized: as
        `parts` has it.
        """
        if lora is not None:
            return _BYTES[dtype] * self._adapters(lora) // ranks
        return self.parts(dtype, False, None, quantized)["weights"] // ranks

    def _adapted(self, lora: LoRA) -> list[tuple[str, int, int]]:
        """Linear modules that have adapters; experts are no such modules."""
        return [
            layer
            for layer in self.linear
            if layer[0] not in TOGETHER
            and (lora.targets in (ALL_LINEAR, None) or layer[0] in lora.targets)
        ]

    def _adapters(self, lora: LoRA) -> int:
        """Parameters of the adapters' matrices A and B."""
        return sum(lora.rank * (rows + columns) for _, rows, columns in self._adapted(lora))


def measure_models(graph: Structure) -> dict[str, ModelSize]:
    """Sizes by source, of those models whose folder is at hand."""
    sources = {
        operator.uses.source for operator in graph.operators.values() if operator.uses is not None
    }
    sizes = {
        source: measured(saved_adapters(source).get("base_model_name_or_path") or source)
        for source in sorted(sources)
    }
    return {source: size for source, size in sizes.items() if size is not None}


def measured(source: str) -> ModelSize | None:
    """Of the model in a folder; where that has no weights, of a family whose tensors a config
    tells. None elsewhere.
    """
    promise = promised(source)
    try:
        files = sorted((folder_here(source) or Path(source)).glob("*.safetensors"))
        shapes = (
            promise.shapes
            if promise
            else {name: shape for file in files for name, shape in tensor_shapes(file).items()}
        )
        foreseen = {} if shapes else Decoder.from_config(config_of(source)).tensors("")
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ZeroDivisionError,
        LayoutMismatch,
    ):
        return None
    return _of_shapes(
        source,
        {name: list(shape) for name, (shape, _) in foreseen.items()} or shapes,
        bool(foreseen),
    )


def _of_shapes(source: str, shapes: Mapping[str, Sequence[int]], is_foreseen: bool) -> ModelSize:
    layers = {
        name.removesuffix(".weight"): shape for name, shape in shapes.items() if len(shape) == 2
    }
    inner = {path: shape for path, shape in layers.items() if not _is_outer(path)}
    linear = tuple(
        ("experts" if ".experts." in path else path.rpartition(".")[2], rows, columns)
        for path, (rows, columns) in inner.items()
    )
    ends = [rows * columns for path, (rows, columns) in layers.items() if path not in inner]
    return ModelSize(
        parameters=sum(map(math.prod, shapes.values())),
        largest_end=max(ends, default=0),
        linear=linear,
        norms_heads=any(path.endswith(".q_norm.weight") for path in shapes),
        tied=len(ends) == 1,
        is_foreseen=is_foreseen,
        **_shape(source),
    )


def _shape(source: str) -> dict[str, int]:
    """What the config says of the layers, in the names that most decoders have; nothing where it
    says less.
    """
    try:
        whole_config = config_of(source)
        config = whole_config.get("text_config") or whole_config
        layers, width = int(config["num_hidden_layers"]), int(config["hidden_size"])
        heads = int(config["num_attention_heads"])
        head_width = int(config.get("head_dim") or width // heads)
        key_value_heads = int(config.get("num_key_value_heads") or heads)
        context = int(config.get("max_position_embeddings") or 0)
        experts = int(config.get("num_experts_per_tok") or 1)
        inner = (
            int(config.get("moe_intermediate_size") or config.get("intermediate_size") or 4 * width)
            * experts
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return {}
    return {
        "layers": layers,
        "width": width,
        "cache_elements": 2 * layers * key_value_heads * head_width,
        "key_value_heads": key_value_heads,
        "context": context,
        "query_width": heads * head_width,
        "inner": inner,
    }


def _is_outer(path: str) -> bool:
    """Whether a matrix is an embedding or the output layer, or chooses experts."""
    last = path.rpartition(".")[2]
    return "embed" in last or last in ("lm_head", "wte", "wpe", "gate", "router")
