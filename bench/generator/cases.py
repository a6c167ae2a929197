"""What the generator bench gives every system: a random Llama, and rollouts of given prompts and
lengths.

even   every rollout has 128 tokens.
tail   lengths of a log-normal distribution whose 99th percentile is 10 times its median.
"""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dataflow.records import AnyArray

CASES = ("even", "tail")
GROUP_SIZE = 8
PROMPT_TOKENS = 200
CONTEXT_TOKENS = 1024
EVEN_TOKENS = 128
MEDIAN_TOKENS = 48
HEAVY = 10
"""The 99th percentile of the tail's lengths over their median."""
PAD = 0


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of a random Llama."""

    vocabulary: int
    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool
    """Whether embeddings and output share their weights."""


SIZES = {
    "tiny": Size(vocabulary=64, width=128, inner=48, layers=2, heads=4, kv_heads=2, tied=False),
    "small": Size(vocabulary=512, width=128, inner=384, layers=5, heads=4, kv_heads=2, tied=False),
    "medium": Size(vocabulary=8192, width=512, inner=896, layers=8, heads=8, kv_heads=2, tied=True),
}
"""tiny is for tests; small has 1.1 million parameters, medium 20 million."""


@dataclass(frozen=True)
class Load:
    """Groups of rollouts in the order in which they start; how long each rollout gets is fixed
    beforehand.
    """

    in_flight: int
    """Rollouts in work at the same time."""
    prompts: tuple[AnyArray, ...]
    """Tokens of each group's prompt, int64 [PROMPT_TOKENS]."""
    lengths: tuple[int, ...]
    """Tokens of each rollout's completion, group after group."""

    @property
    def tokens(self) -> int:
        """Of all completions."""
        return sum(self.lengths)

    def prompt(self, rollout: int) -> AnyArray:
        """The prompt of a rollout."""
        return self.prompts[rollout // GROUP_SIZE]

    def first(self, rollouts: int) -> "Load":
        """Its first groups, which hold at most so many rollouts, but one group at least."""
        groups = max(1, min(rollouts // GROUP_SIZE, len(self.prompts)))
        return replace(
            self, prompts=self.prompts[:groups], lengths=self.lengths[: groups * GROUP_SIZE]
        )


def make_load(case: str, *, in_flight: int, rollouts: int, size: str, seed: int = 0) -> Load:
    """The load of a case: the same for the same arguments."""
    draw = np.random.default_rng(seed)
    groups = -(-rollouts // GROUP_SIZE)
    count = groups * GROUP_SIZE
    prompts = draw.integers(PAD + 1, SIZES[size].vocabulary, (groups, PROMPT_TOKENS))
    lengths = [EVEN_TOKENS] * count if case == "even" else tail_lengths(count, in_flight, seed)
    return Load(in_flight, tuple(prompts), tuple(lengths))


def tail_lengths(count: int, per_round: int, seed: int) -> list[int]:
    """One length from each of `count` equally likely slices of the distribution, in a random order.

    Neighbouring slices go to different rounds of `per_round` rollouts, so that a system that gets
    fewer rounds has the same lengths before it. What the context cannot hold is clipped.
    """
    spread = statistics.NormalDist(sigma=math.log(HEAVY) / statistics.NormalDist().inv_cdf(0.99))
    exact = [MEDIAN_TOKENS * math.exp(spread.inv_cdf((i + 0.5) / count)) for i in range(count)]
    lengths = [min(max(1, round(length)), CONTEXT_TOKENS - PROMPT_TOKENS) for length in exact]
    draw = random.Random(seed)
    rounds: list[list[int]] = [[] for _ in range(max(1, count // per_round))]
    for first in range(0, count, len(rounds)):
        slices = lengths[first : first + len(rounds)]
        for round_, length in zip(draw.sample(rounds, len(slices)), slices, strict=True):
            round_.append(length)
    for round_ in rounds:
        draw.shuffle(round_)
    return [length for round_ in rounds for length in round_]


def percentile(lengths: Sequence[int], percent: int) -> int:
    """The smallest length that at least so many percent do not exceed."""
    return sorted(lengths)[-(-len(lengths) * percent // 100) - 1]


def make_policy(folder: Path, size: str, seed: int = 0) -> Path:
    """Save a random Llama without an end token, and a tokenizer of words `w1 w2 ...`, one token
    each.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from operators.models.loading import no_progress_bar

    of = SIZES[size]
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=of.vocabulary,
        hidden_size=of.width,
        intermediate_size=of.inner,
        num_hidden_layers=of.layers,
        num_attention_heads=of.heads,
        num_key_value_heads=of.kv_heads,
        tie_word_embeddings=of.tied,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=PAD,
    )
    with no_progress_bar():
        LlamaForCausalLM(config).save_pretrained(folder)
    save_words(folder, of.vocabulary)
    return folder


def save_words(folder: Path, count: int) -> None:
    """A tokenizer of so many words, the padding among them, beside a model."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, **{f"w{i}": i for i in range(1, count)}}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>").save_pretrained(folder)


def text_of(prompt: AnyArray) -> str:
    """The text that the policy's tokenizer makes these tokens of."""
    return " ".join(f"w{token}" for token in prompt.tolist())
