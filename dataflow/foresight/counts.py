"""What a decoder has and what a token costs it: parameters, operations, bytes of the cache; by its
dimensions alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from dataflow.errors import GraphError
from dataflow.model_files import config_of, fetch_config
from dataflow.planning.model_size import ModelSize, measured
from transport.weights.costs.decoder import Decoder as Decoder
from transport.weights.costs.decoder import Latent as Latent


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Of all layers together; numbers, not bytes."""

    layers: int
    width: int
    attention: int
    """Parameters of its projections."""
    mlps: int
    """Of MLPs that every token goes through: dense layers, shared experts."""
    experts: int
    """Of all routed experts."""
    experts_per_token: int
    """Of those that one token goes through."""
    mixtures: int
    """Layers that have experts."""
    routed: int
    """Experts that a token goes through, in a layer."""
    spread: float
    """Share of a layer's experts that a token goes through; 1 where there are none."""
    ends: int
    """Of one of embedding and output layer."""
    tied: bool
    cache: int
    """Numbers that the cache holds of a token."""
    cache_cuts: int
    """Ranks over which tensor parallelism cuts these; more hold copies."""
    mixing: int
    """Width over which attention mixes tokens: heads times their width, of keys and values in the
    mean."""

    @property
    def parameters(self) -> int:
        """Without norms, biases and routers."""
        return self.attention + self.mlps + self.experts + self.ends * (1 if self.tied else 2)

    @property
    def active(self) -> int:
        """Parameters that one token is multiplied with; the embedding is looked up."""
        return self.attention + self.mlps + self.experts_per_token + self.ends

    def touched(self, tokens: float) -> float:
        """Parameters that are read for so many tokens at once, where each goes to experts of its
        own, evenly.
        """
        return (
            self.attention
            + self.mlps
            + self.ends
            + self.experts * (1 - (1 - self.spread) ** tokens if self.routed else 0)
        )

    def forward(self, tokens: float, context: float) -> float:
        """Operations of a forward pass over tokens that look back, in the mean, at `context`
        others.

        Two per parameter and token, and four per width and token looked at (Kaplan et al., arXiv
        2001.08361, section 2.1, where `context` is the whole length; here what a causal mask
        leaves).
        """
        return tokens * (2 * self.active + 4 * self.mixing * context)


def counts_of(source: str) -> Counts:
    """Of the model in a folder, by its config.json alone. GraphError where that is not at hand or
    not known.
    """
    return counts(decoder_of(source))


def decoder_of(source: str) -> Decoder:
    """Dimensions of the model in a folder, or of an id on the hub. GraphError as `counts_of`."""
    try:
        try:
            return Decoder.from_config(config_of(source))
        except FileNotFoundError:
            fetch_config(source)
            return Decoder.from_config(config_of(source))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise GraphError(
            f"the dimensions of model '{source}' are not at hand: {type(error).__name__}: {error};"
            " put its config.json into a folder, whose name is the model's (weights are not"
            " needed)"
        ) from None


def counts(decoder: Decoder) -> Counts:
    """Of a decoder with any of grouped and latent attention, one MLP and experts.

    >>> from transport.weights.costs.decoder import NAMED
    >>> round(counts(NAMED["llama-8b"]).parameters / 1e9, 2)
    8.03
    """
    width, heads, experts = decoder.width, decoder.heads, decoder.experts
    if decoder.latent is None:
        projections = 2 * width * decoder.head_width * (heads + decoder.kv_heads)
        cache, cuts, mixing = (
            2 * decoder.kv_heads * decoder.head_width,
            decoder.kv_heads,
            heads * decoder.head_width,
        )
    else:
        own = decoder.latent
        key = own.plain + own.rotated
        queries = own.queries * (width + heads * key) if own.queries else width * heads * key
        projections = (
            queries
            + width * (own.keys + own.rotated)
            + own.keys * heads * (own.plain + own.values)
            + heads * own.values * width
        )
        cache, cuts, mixing = own.keys + own.rotated, 1, heads * (key + own.values) // 2
    mixtures = decoder.layers - experts.dense_layers if experts else 0
    expert = 3 * width * experts.inner if experts else 0
    shared = expert * experts.shared if experts else 0
    return Counts(
        layers=decoder.layers,
        width=width,
        attention=decoder.layers * projections,
        mlps=(decoder.layers - mixtures) * 3 * width * decoder.inner + mixtures * shared,
        experts=mixtures * experts.number * expert if experts else 0,
        experts_per_token=mixtures * experts.per_token * expert if experts else 0,
        mixtures=mixtures,
        routed=experts.per_token if experts else 0,
        spread=experts.per_token / experts.number if experts else 1.0,
        ends=decoder.vocabulary * width,
        tied=decoder.tied,
        cache=decoder.layers * cache,
        cache_cuts=cuts,
        mixing=decoder.layers * mixing,
    )


def size_of(source: str) -> ModelSize:
    """As a plan counts it. GraphError as `decoder_of`."""
    return measured(source) or _by_counts(decoder_of(source))


def _by_counts(decoder: Decoder) -> ModelSize:
    """Of a mixture of experts, whose tensors nobody lists. Experts, and the projections of latent
    attention, stand as one matrix for all layers, which no adapter takes.
    """
    model, width = counts(decoder), decoder.width
    layers = max(1, model.layers)
    token = (model.mlps + model.experts_per_token) // (3 * layers * width)
    queries, keys = (heads * decoder.head_width for heads in (decoder.heads, decoder.kv_heads))
    inner = model.mlps // (3 * layers * width)
    linear = [("experts", model.experts, 1)]
    if inner:
        mlp = [("gate_proj", inner, width), ("up_proj", inner, width), ("down_proj", width, inner)]
        linear += mlp * layers
    if decoder.latent is None:
        layer = [("q_proj", queries, width), ("k_proj", keys, width), ("v_proj", keys, width)]
        linear += [*layer, ("o_proj", width, queries)] * layers
    else:
        linear += [("latent", model.attention, 1)]
    return ModelSize(
        parameters=model.parameters,
        largest_end=model.ends,
        tied=model.tied,
        linear=tuple(linear),
        layers=model.layers,
        width=model.width,
        cache_elements=model.cache,
        key_value_heads=model.cache_cuts,
        query_width=model.mixing // layers,
        inner=token,
        is_foreseen=True,
    )
