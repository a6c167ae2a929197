"""The run that is watched: a model of random weights, GRPO's streams, a checkpoint every other
step.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow import Graph, Model, run, scorer

STEPS, MORE_STEPS = 4, 2
"""Of the run, and of the one that goes on from its last checkpoint."""
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789= .-"
POSITIONS = 64


@dataclass(frozen=True)
class Size:
    """Of a Llama."""

    layers: int
    width: int
    mlp_width: int
    heads: int


SIZES = {0: Size(1, 64, 128, 2), 100: Size(14, 768, 2048, 12), 400: Size(20, 1280, 3456, 20)}
"""By millions of parameters; 0: next to none, whose run shows what processes hold beside a
model."""
PROMPTS, GROUP, NEW_TOKENS = 2, 2, 4
"""Of a step: prompts, rollouts of each, tokens of each."""


@scorer
def reward(completion: str) -> float:
    """How many different letters there are."""
    return float(len(set(completion)))


def build(policy: Path, tensor_parallel: int) -> Graph:
    """A graph with short rollouts, so that weights are what takes memory."""
    from operators import Generator, Prompts, Trainer
    from operators.credit import advantage
    from operators.losses import aipo

    g, model = Graph("memory"), Model(str(policy))
    generator = Generator(
        model,
        group_size=GROUP,
        max_tokens=NEW_TOKENS,
        cache_bytes=32 << 20,
        tensor_parallel=tensor_parallel,
    )
    trainer = Trainer(model, loss=aipo, prompts_per_step=PROMPTS, lr=1e-5, checkpoint_every=2)
    rows = [{"prompt": word} for word in ("ab", "cd", "ef", "gh")]
    trainer(advantage(reward(generator(g.source(Prompts(rows))))))
    g.feedback(trainer.weights, generator, max_staleness=0)
    return g


def write(folder: Path, size: Size) -> None:
    """A policy of that size, in a folder."""
    from operators.warm_start.launch import WarmStartSpec
    from operators.warm_start.train import character_tokenizer, small_llama

    spec = WarmStartSpec(
        alphabet=ALPHABET,
        layers=size.layers,
        width=size.width,
        heads=size.heads,
        mlp_width=size.mlp_width,
        max_positions=POSITIONS,
        steps=1,
        batch_size=1,
        learning_rate=1e-3,
        seed=0,
        threads=1,
        examples_sha256="",
    )
    tokenizer = character_tokenizer(ALPHABET, POSITIONS)
    small_llama(spec, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def facts(folder: Path) -> dict[str, int]:
    """Of a model, in bytes. weights: all of it. layer: the most that FSDP2 gathers at once.
    activations: what autograd keeps of a step's rollouts for the backward pass, beside the weights,
    on one rank.
    """
    import torch

    from operators.models.loading import load_model
    from operators.training.parallel.shard import layers_of

    module: Any = load_model(Model(str(folder)))
    weights = {weight.untyped_storage().data_ptr() for weight in module.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage
        return tensor

    tokens = torch.zeros(PROMPTS * GROUP, 2 + NEW_TOKENS, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(input_ids=tokens, use_cache=False).logits.log_softmax(-1).sum().backward()
    return {
        "weights": sum(weight.nbytes for weight in module.parameters()),
        "layer": max(
            sum(weight.nbytes for weight in layer.parameters()) for layer in layers_of(module)
        ),
        "activations": sum(storage.nbytes() for storage in storages.values()),
    }


def main() -> None:
    """Write the model, make the run, or go on with it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["write", "facts", "run", "resume"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--millions", type=int, default=100)
    parser.add_argument("--trainer", type=int, default=1)
    parser.add_argument("--generator", type=int, default=1)
    options = parser.parse_args()
    if options.what == "write":
        write(options.folder / "policy", SIZES[options.millions])
        return
    if options.what == "facts":
        (options.folder / "facts.json").write_text(
            json.dumps(facts(options.folder / "policy")), "utf-8"
        )
        return
    goes_on = options.what == "resume"
    run(
        build(options.folder / "policy", options.generator),
        steps=STEPS + (MORE_STEPS if goes_on else 0),
        ranks={"trainer": options.trainer},
        runs=options.folder,
        quiet=True,
        resume=options.folder / "latest" if goes_on else None,
    )


if __name__ == "__main__":
    main()
