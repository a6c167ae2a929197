"""Which decoders the fused step computes, and their weights as the kernels read them: packed
panels in one block of memory, described by C structures.

Axes: H hidden, K key/value heads, R query heads for each, D width of a head, I inner width, V
vocabulary.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from operators.engine.attention import huge_pages
from operators.engine.native.attention import serves
from operators.models.borders import CHANGING

FAMILIES = ("Llama", "Qwen2", "Qwen3", "Mistral")
"""Rotary position embeddings, RMS norms, grouped attention, gated SiLU: alike but for biases, norms
and windows."""
SILU = ("SiLUActivation", "SiLU")


def reason_against(model: torch.nn.Module) -> str | None:
    """Why the fused step cannot compute this model; None if it can."""
    kind = type(model).__name__
    family = kind.removesuffix("ForCausalLM")
    home = f"transformers.models.{family.lower()}.modeling_{family.lower()}"
    if family not in FAMILIES or type(model).__module__ != home:
        return f"{kind} is not one of {', '.join(FAMILIES)}"
    for module in model.modules():
        name = type(module).__name__
        own = type(module).__module__ == home and name.startswith(family)
        is_known = (
            type(module) in (torch.nn.Linear, torch.nn.Embedding, torch.nn.ModuleList)
            or name in SILU
        )
        if not own and not is_known:
            return f"it holds a {name}"
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return f"a hook or a forward of its own is set on a {name}"
    if (kind := str(model.model.rotary_emb.rope_type)) in CHANGING:  # type: ignore[union-attr]
        return f"its rotary embedding is {kind} and not settled"
    if not serves(model) or any(
        type(weight) is not torch.nn.Parameter for weight in model.parameters()
    ):
        return "its weights are not all plain float32 or all plain bfloat16 on the CPU"
    return None


def window_of(model: Any, layer: int) -> int:
    """Positions that a layer attends to, its own included; 0: all."""
    attention = model.model.layers[layer].self_attn
    if type(model).__name__ == "MistralForCausalLM":
        return int(getattr(model.config, "sliding_window", None) or 0)
    return int(getattr(attention, "sliding_window", None) or 0)


LONG, FLOAT, POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Matrix(ctypes.Structure):
    """A packed weight [out, in]; see matmul.c."""

    _fields_ = [
        ("packed", POINTER),
        ("bias", POINTER),
        ("inputs", LONG),
        ("outputs", LONG),
        ("panels", LONG),
        ("halves", LONG),
    ]


class Packing(ctypes.Structure):
    """A weight [out, in] to pack; see matmul.c."""

    _fields_ = [
        ("weight", POINTER),
        ("out", LONG),
        ("in", LONG),
        ("part", LONG),
        ("parts", LONG),
        ("packed", POINTER),
    ]


class Layer(ctypes.Structure):
    """See decoder.c."""

    _fields_ = [
        ("qkv", Matrix),
        ("mixed", Matrix),
        ("gates", Matrix),
        ("down", Matrix),
        ("before_attention", POINTER),
        ("before_gates", POINTER),
        ("query_norm", POINTER),
        ("key_norm", POINTER),
        ("keys", POINTER),
        ("values", POINTER),
        ("window", LONG),
    ]


class DecoderStruct(ctypes.Structure):
    """See decoder.c."""

    _fields_ = [
        ("layers", ctypes.POINTER(Layer)),
        ("layer_count", LONG),
        ("hidden", LONG),
        ("inner", LONG),
        ("heads", LONG),
        ("repeats", LONG),
        ("width", LONG),
        ("vocabulary", LONG),
        ("cache_halves", LONG),
        ("embedding_halves", LONG),
        ("embedding", POINTER),
        ("last_norm", POINTER),
        ("head", Matrix),
        ("cosines", POINTER),
        ("sines", POINTER),
        ("epsilon", FLOAT),
        ("scale", FLOAT),
    ]


class PackedWeights:
    """Packs a model's weights into memory at a fixed address, again whenever they change."""

    def __init__(self, library: Any, model: Any, precision: torch.dtype) -> None:
        """Make room for the weights of `model` (see `families.reason_against`) in that precision
        and pack them.
        """
        self._library = library
        self._panel = 2 * library.dataflow_lanes()
        self._model = model
        self._halves = precision == torch.bfloat16
        config = model.config
        attention = model.model.layers[0].self_attn
        self.layers = (Layer * config.num_hidden_layers)()
        self.decoder = DecoderStruct(
            layers=self.layers,
            layer_count=config.num_hidden_layers,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            heads=config.num_key_value_heads,
            repeats=config.num_attention_heads // config.num_key_value_heads,
            width=attention.head_dim,
            vocabulary=model.lm_head.weight.shape[0],
            epsilon=config.rms_norm_eps,
            scale=attention.scaling,
        )
        self._matrices: list[tuple[torch.Tensor, int, int, int]] = []
        """Parameters that are packed: which part of how many in their panels, and where they go, in
        floats."""
        self._biases: list[tuple[torch.Tensor, int, int, int]] = []
        self._vectors: list[tuple[ctypes.Structure, str, torch.Tensor]] = []
        """Parameters that are read as they are: from the field of which structure."""
        self._kept: list[torch.Tensor] = []
        self._used, self._start = 0, 0
        self._memory: torch.Tensor | None = None
        self._describe()
        self.refresh()

    def let_go(self) -> None:
        """Give the packed weights' memory back, until `refresh`."""
        self._kept.clear()
        self._memory = None

    def refresh(self) -> None:
        """Pack the weights that the model's parameters have now."""
        if self._memory is None:
            self._memory = huge_pages(4 * max(1, self._used)).view(torch.float32)
            self._start = self._memory.data_ptr()
            self._describe()
        self._kept.clear()
        sources = [
            (self._as_words(weight), part, parts, to) for weight, part, parts, to in self._matrices
        ]
        sources += [
            (_floats(bias)[:, None], part, parts, to) for bias, part, parts, to in self._biases
        ]
        packings = [
            Packing(self._keep(dense).data_ptr(), *dense.shape, part, parts, self._start + 4 * to)
            for dense, part, parts, to in sources
        ]
        for holder, name, weight in self._vectors:
            setattr(holder, name, self._keep(_floats(weight)).data_ptr())
        embedding = self._model.model.embed_tokens.weight
        self.decoder.embedding = self._keep(embedding.detach().contiguous()).data_ptr()
        count = len(packings)
        self._library.dataflow_pack((Packing * count)(*packings), count, torch.get_num_threads())

    def read_windows(self) -> None:
        """Take over each layer's attention window."""
        for index, layer in enumerate(self.layers):
            layer.window = window_of(self._model, index)

    def _describe(self) -> None:
        """Lay out every weight in memory, from `start` on."""
        self._used = 0
        for table in (self._matrices, self._biases, self._vectors):
            table.clear()
        model, decoder = self._model, self.decoder
        self.read_windows()
        for layer, module in zip(self.layers, model.model.layers, strict=True):
            attention, mlp = module.self_attn, module.mlp
            layer.qkv = self._matrix([attention.q_proj, attention.k_proj, attention.v_proj], 1)
            layer.mixed = self._matrix([attention.o_proj], 1)
            layer.gates = self._matrix([mlp.gate_proj, mlp.up_proj], 2)
            layer.down = self._matrix([mlp.down_proj], 1)
            norms = [
                ("before_attention", module.input_layernorm),
                ("before_gates", module.post_attention_layernorm),
            ]
            norms += [
                (name, getattr(attention, norm))
                for name, norm in (("query_norm", "q_norm"), ("key_norm", "k_norm"))
                if hasattr(attention, norm)
            ]
            self._vectors += [(layer, name, norm.weight) for name, norm in norms]
        decoder.head = self._matrix([model.lm_head], 1)
        self._vectors.append((decoder, "last_norm", model.model.norm.weight))
        decoder.embedding_halves = model.model.embed_tokens.weight.dtype == torch.bfloat16

    def _matrix(self, linears: list[torch.nn.Linear], parts: int) -> Matrix:
        """Linears of equal input, one after the other in panels of their own, or `parts` of them in
        each panel.
        """
        inputs = linears[0].in_features
        words = (inputs + 1) // 2 if self._halves else inputs
        outputs = [
            -(-linear.out_features * parts // self._panel) * self._panel for linear in linears
        ]
        total = sum(outputs) // parts
        weights = self._room(total * words)
        biased = any(linear.bias is not None for linear in linears)
        biases = self._room(total) if biased else 0
        start = 0
        for part, (linear, count) in enumerate(zip(linears, outputs, strict=True)):
            self._matrices.append((linear.weight, part % parts, parts, weights + start * words))
            if linear.bias is not None:
                self._biases.append((linear.bias, part % parts, parts, biases + start))
            start += count if parts == 1 else 0
        out = (
            total
            if parts == 1 and len(linears) > 1
            else sum(linear.out_features for linear in linears)
        )
        bias_place = self._start + 4 * biases if biased else None
        return Matrix(
            self._start + 4 * weights, bias_place, inputs, out, total // self._panel, self._halves
        )

    def _as_words(self, weight: torch.Tensor) -> torch.Tensor:
        """As float32, or as pairs of bfloat16 that pass for float32: [out, words], dense."""
        if not self._halves:
            return _floats(weight)
        halves = weight.detach().to(torch.bfloat16)
        return (
            torch.nn.functional.pad(halves, (0, halves.shape[1] % 2))
            .contiguous()
            .view(torch.float32)
        )

    def _room(self, floats: int) -> int:
        start = self._used
        self._used += -(-floats // 16) * 16
        return start

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self._kept.append(tensor)
        return tensor


def _floats(weight: torch.Tensor) -> torch.Tensor:
    return (
        weight
        if weight.dtype == torch.float32 and weight.is_contiguous()
        else weight.detach().float().contiguous()
    )
