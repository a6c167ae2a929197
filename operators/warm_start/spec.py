"""What a warm start was asked for, as one value with a stable fingerprint."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

from dataflow.errors import GraphError
from dataflow.model_files import PromisedModel

PAD, UNKNOWN = "<pad>", "<unk>"
"""Tokens of every policy beside its characters."""
EOS = "<eos>"
"""The token with which a turn ends."""

RECORD_FILE = "warm_start.json"
"""The file in a finished policy folder that says which spec made it."""

BAD_INPUT = 2
"""Exit status of the training process when it refused its input with one line on stderr."""

RECIPE = 1
"""Raised whenever the same spec would now train another policy, so that old folders are made
anew."""

_COUNTS = (
    "layers",
    "width",
    "heads",
    "mlp_width",
    "max_positions",
    "steps",
    "batch_size",
    "threads",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmStartSpec:
    """Everything that decides the weights: the same spec gives the same policy on the same
    machine.
    """

    alphabet: str
    """The characters that are tokens, each once, in the order of their ids."""
    layers: int
    """Number of decoder layers."""
    width: int
    """Width of the residual stream, in units."""
    heads: int
    """Number of attention heads; divides `width`."""
    mlp_width: int
    """Width of the gated feed-forward layer, in units."""
    max_positions: int
    """Longest sequence the model is configured for, in tokens."""
    steps: int
    """Number of optimiser steps."""
    batch_size: int
    """Examples per optimiser step."""
    learning_rate: float
    """Peak learning rate of AdamW; warmed up over 20 steps, then falling linearly to a tenth."""
    seed: int
    """Seeds the initial weights and the order of the examples."""
    threads: int
    """Number of threads torch computes with."""
    examples_sha256: str
    """Digest of the examples file."""

    def __post_init__(self) -> None:
        """Refuse what could not be trained.

        Raises:
            GraphError: with what is wrong, what was found and what to do next.
        """
        if not self.alphabet or len(set(self.alphabet)) != len(self.alphabet):
            raise GraphError(
                "the alphabet of a warm start must name each character once; found"
                f" {self.alphabet!r}; pass a string without repetitions"
            )
        for field in _COUNTS:
            if (number := getattr(self, field)) < 1:
                raise GraphError(
                    f"{field} of a warm start must be 1 or more; found {number}; raise it"
                )
        if self.width % (2 * self.heads):
            raise GraphError(
                f"width of a warm start must be a multiple of twice its heads; found {self.width}"
                f" with heads={self.heads}; try"
                f" {2 * self.heads * max(1, self.width // (2 * self.heads))}"
            )
        if not 0 < self.learning_rate < 1:
            raise GraphError(
                "learning_rate of a warm start must lie between 0 and 1; found"
                f" {self.learning_rate}; try 1e-3"
            )

    @property
    def vocabulary(self) -> int:
        """Tokens: the characters, and those of every policy."""
        return len(self.alphabet) + len((PAD, EOS, UNKNOWN))

    def promise(self) -> PromisedModel:
        """What the policy's files will hold, for an explanation that does not make them."""
        config = {
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "intermediate_size": self.mlp_width,
            "num_hidden_layers": self.layers,
            "tie_word_embeddings": True,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "max_position_embeddings": self.max_positions,
        }
        wide, high = [self.mlp_width, self.width], [self.width, self.mlp_width]
        layer = {f"self_attn.{name}_proj": [self.width, self.width] for name in "qkvo"}
        layer |= {"mlp.gate_proj": wide, "mlp.up_proj": wide, "mlp.down_proj": high}
        layer |= {"input_layernorm": [self.width], "post_attention_layernorm": [self.width]}
        shapes = {
            "model.embed_tokens.weight": [self.vocabulary, self.width],
            "model.norm.weight": [self.width],
        }
        for number in range(self.layers):
            shapes |= {
                f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()
            }
        return PromisedModel(
            config=config, shapes=shapes, how=f"a warm start of {self.steps} steps"
        )

    @property
    def fingerprint(self) -> str:
        """Hex digest of every field and of the recipe: equal fingerprints mean the same policy."""
        fields = {"recipe": RECIPE, **dataclasses.asdict(self)}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def recorded_fingerprint(folder: Path) -> str | None:
    """The fingerprint that a finished policy folder records, or None where there is none to
    read.
    """
    try:
        record = json.loads((folder / RECORD_FILE).read_text("utf-8"))
    except (OSError, ValueError):  # absent, unreadable or cut short: not a finished folder
        return None
    fingerprint = record.get("fingerprint") if isinstance(record, dict) else None
    return fingerprint if isinstance(fingerprint, str) else None
