"""What a trainer holds of a micro-batch while it computes, by a model's widths: pure arithmetic.

Counted are the tensors that autograd saves of transformers' Llama, Qwen2 and Qwen3 layers with
packed attention; a test counts them again. What norms and activations of other families save is
about as much."""

from dataclasses import dataclass

from dataflow.planning.model_size import ModelSize

_MOST_KEPT, _KEPT_OF_WEIGHT = 0.7, 1.5
"""Of the logits, and of numbers of the head's weight: what the sliced head keeps for its backward
pass, at most."""
_SLICE, _CPU_SLICE = 1 << 25, 1 << 20
"""Logits of a slice on a GPU and on a CPU; two are held."""
_ENDS = 14
"""Bytes of a token around the head, in widths of the model."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """How a rank's forward and backward pass are made."""

    size: ModelSize
    wide: bool
    """Whether products are in float32, else in a type of two bytes."""
    masters: bool
    """Whether layers compute with float32 weights, which are cast on the way: those of one rank
    without adapters."""
    trains: bool = True
    """Whether all weights are trained, else adapters alone."""
    rank: int = 0
    """Of adapters."""
    compiled: bool = False
    checkpointed: bool = False
    shares: int = 1
    """Ranks that share out each layer."""
    on_gpu: bool = True

    @property
    def of_layer(self) -> int:
        """Bytes that one layer keeps of a token for the backward pass."""
        size, each = self.size, 4 if self.wide else 2
        heads = 3 * each * size.query_width + 2 * each * size.key_width
        normed = size.query_width + size.key_width if size.norms_heads else 0
        if self.compiled:  # what norms and activations made is computed again
            whole = (self.of_input + 3 * each) * size.width
            return whole + (heads + 3 * each * size.inner + each * normed) // self.shares
        whole = self._around_products * size.width
        normed *= 8 if self.wide else 6 if self.trains else 4
        return (
            whole + (heads + 4 * each * size.inner + normed) // self.shares + 7 * each * self.rank
        )

    @property
    def _around_products(self) -> int:
        """Bytes in widths of the model: of two norms, and inputs of products where each has a copy
        of its own."""
        if self.wide:
            return 24 if self.trains else 16
        if not self.trains:
            return 18
        return 26 if self.masters else 16

    @property
    def of_input(self) -> int:
        """Bytes of a number that goes into a layer."""
        return 4 if self.wide or self.masters else 2

    def at_most(self, tokens: int) -> int:
        """Bytes where a micro-batch of so many tokens is furthest: at the end of the forward pass,
        or where the backward pass has begun and the head's gradient is there."""
        size = self.size
        casts = 2 * size.linear_numbers if self.masters and not self.wide else 0
        if self.checkpointed:
            kept = self.of_input * size.width * size.layers * tokens
            return kept + max(
                casts + self._head(tokens, False), self._head(tokens, True), self.one_layer(tokens)
            )
        return casts + self.of_layer * size.layers * tokens + self._head(tokens, True)

    def one_layer(self, tokens: int) -> int:
        """Bytes at the end of the backward pass: the first layer's, or the second gradient of
        weights that embedding and head have in common."""
        size, layers = self.size, max(1, self.size.layers)
        casts = 2 * size.linear_numbers // layers if self.masters and not self.wide else 0
        return max(
            casts + self.of_layer * tokens, 4 * size.largest_end if size.tied and self.trains else 0
        )

    def _head(self, tokens: int, backward: bool) -> int:
        size = self.size
        vocabulary = size.largest_end // size.width if size.width else 0
        logits = tokens * vocabulary
        kept = int(min(_MOST_KEPT * logits, _KEPT_OF_WEIGHT * size.largest_end))
        gradient = self.of_input * size.largest_end if backward and self.trains else 0
        slices = 2 * min(_SLICE if self.on_gpu else _CPU_SLICE, logits)
        return 4 * (kept + slices) + gradient + _ENDS * size.width * tokens
