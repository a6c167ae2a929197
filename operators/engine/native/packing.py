"""A decoder's weights as the kernels read them: packed panels in one block of memory, described by C structures.

Axes: H hidden, K key/value heads, R query heads for each, D width of a head, I inner width, V vocabulary.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch

from operators.engine.native.families import window_of

LONG, FLOAT, POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Matrix(ctypes.Structure):
    """A packed weight [out, in]; see matmul.c."""

    _fields_ = [
        ("packed", POINTER), ("bias", POINTER), ("inputs", LONG), ("outputs", LONG), ("panels", LONG),
        ("halves", LONG),
    ]  # fmt: skip


class Layer(ctypes.Structure):
    """See decoder.c."""

    _fields_ = [
        ("qkv", Matrix), ("mixed", Matrix), ("gates", Matrix), ("down", Matrix),
        ("before_attention", POINTER), ("before_gates", POINTER), ("query_norm", POINTER), ("key_norm", POINTER),
        ("keys", POINTER), ("values", POINTER), ("window", LONG),
    ]  # fmt: skip


class Decoder(ctypes.Structure):
    """See decoder.c."""

    _fields_ = [
        ("layers", ctypes.POINTER(Layer)), ("layer_count", LONG), ("hidden", LONG), ("inner", LONG), ("heads", LONG),
        ("repeats", LONG), ("width", LONG), ("vocabulary", LONG), ("cache_halves", LONG), ("embedding_halves", LONG),
        ("embedding", POINTER), ("last_norm", POINTER), ("head", Matrix), ("cosines", POINTER), ("sines", POINTER),
        ("epsilon", FLOAT), ("scale", FLOAT),
    ]  # fmt: skip


def huge_pages(floats: int) -> torch.Tensor:
    """Zeros float32 [floats] on huge pages where the system gives them."""
    memory = mmap.mmap(-1, max(4 * floats, 4), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32)


class PackedWeights:
    """Packs a model's weights, again whenever they changed, into memory that stays where it is."""

    def __init__(self, library: Any, model: Any, precision: torch.dtype) -> None:
        """Make room for the weights of `model` (see `families.reason_against`) in that precision and pack them."""
        self._library = library
        self._panel = 2 * library.dataflow_lanes()
        self._model = model
        self._halves = precision == torch.bfloat16
        config = model.config
        attention = model.model.layers[0].self_attn
        self.layers = (Layer * config.num_hidden_layers)()
        self.decoder = Decoder(
            layers=self.layers, layer_count=config.num_hidden_layers, hidden=config.hidden_size,
            inner=config.intermediate_size, heads=config.num_key_value_heads,
            repeats=config.num_attention_heads // config.num_key_value_heads, width=attention.head_dim,
            vocabulary=model.lm_head.weight.shape[0], epsilon=config.rms_norm_eps, scale=attention.scaling,
        )  # fmt: skip
        self._memory: torch.Tensor | None = None
        self._used = 0
        self._kept: list[torch.Tensor] = []
        self._describe(packing=False)
        self._memory = huge_pages(self._used)
        self.refresh()

    def refresh(self) -> None:
        """Pack the weights that the model has now."""
        self._used = 0
        self._kept.clear()
        self._describe(packing=True)

    def _describe(self, packing: bool) -> None:
        """Lay out every weight in memory; write it there too if `packing`."""
        model, decoder = self._model, self.decoder
        for index, (layer, module) in enumerate(zip(self.layers, model.model.layers, strict=True)):
            attention, mlp = module.self_attn, module.mlp
            layer.qkv = self._matrix([attention.q_proj, attention.k_proj, attention.v_proj], 1, packing)
            layer.mixed = self._matrix([attention.o_proj], 1, packing)
            layer.gates = self._matrix([mlp.gate_proj, mlp.up_proj], 2, packing)
            layer.down = self._matrix([mlp.down_proj], 1, packing)
            layer.before_attention = self._vector(module.input_layernorm.weight)
            layer.before_gates = self._vector(module.post_attention_layernorm.weight)
            for name, norm in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
                if hasattr(attention, norm):
                    setattr(layer, name, self._vector(getattr(attention, norm).weight))
            layer.window = window_of(model, index)
        decoder.head = self._matrix([model.lm_head], 1, packing)
        decoder.last_norm = self._vector(model.model.norm.weight)
        embedding = self._keep(model.model.embed_tokens.weight.detach().contiguous())
        decoder.embedding, decoder.embedding_halves = embedding.data_ptr(), embedding.dtype == torch.bfloat16

    def _matrix(self, linears: list[torch.nn.Linear], parts: int, packing: bool) -> Matrix:
        """Linears of equal input, one after the other in panels of their own, or `parts` of them in each panel."""
        inputs = linears[0].in_features
        words = (inputs + 1) // 2 if self._halves else inputs
        outputs = [-(-linear.out_features * parts // self._panel) * self._panel for linear in linears]
        total = sum(outputs) // parts
        weights = self._room(total * words)
        biased = any(linear.bias is not None for linear in linears)
        biases = self._room(total) if biased else 0
        if packing:
            start = 0
            for part, (linear, count) in enumerate(zip(linears, outputs, strict=True)):
                self._pack(self._in_words(linear.weight), part % parts, parts, weights + start * words)
                if biased:
                    bias = torch.zeros(linear.out_features) if linear.bias is None else linear.bias.detach().float()
                    self._pack(bias[:, None].contiguous(), part % parts, parts, biases + start)
                start += count if parts == 1 else 0
        out = total if parts == 1 and len(linears) > 1 else sum(linear.out_features for linear in linears)
        place = 0 if self._memory is None else self._memory.data_ptr()
        bias_place = place + 4 * biases if biased else None
        return Matrix(place + 4 * weights, bias_place, inputs, out, total // self._panel, self._halves)

    def _in_words(self, weight: torch.Tensor) -> torch.Tensor:
        """As float32, or as pairs of bfloat16 that pass for float32: [out, words], dense."""
        if not self._halves:
            return weight.detach().float().contiguous()
        halves = weight.detach().to(torch.bfloat16)
        return torch.nn.functional.pad(halves, (0, halves.shape[1] % 2)).contiguous().view(torch.float32)

    def _pack(self, weight: torch.Tensor, part: int, parts: int, to: int) -> None:
        assert self._memory is not None
        self._library.dataflow_pack(
            weight.data_ptr(), weight.shape[0], weight.shape[1], part, parts, self._memory.data_ptr() + 4 * to,
            torch.get_num_threads(),
        )  # fmt: skip

    def _room(self, floats: int) -> int:
        start = self._used
        self._used += -(-floats // 16) * 16
        return start

    def _vector(self, weight: torch.Tensor) -> int:
        return self._keep(weight.detach().float().contiguous()).data_ptr()

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self._kept.append(tensor)
        return tensor
