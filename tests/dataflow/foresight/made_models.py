"""Models of which there is a config.json alone, and graphs that train them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dataflow import Graph, Model, scorer
from operators import Generator, Prompts, Trainer
from operators.credit import advantage

LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


@scorer
def reward(completion: str) -> float:
    return float(len(completion))


def made_model(folder: Path, config: Mapping[str, Any]) -> Model:
    """In a folder that is empty yet, with prompts beside it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder.parent / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    return Model(str(folder), dtype="bfloat16")


def wired(
    name: str,
    generator: Generator,
    trainer: Trainer,
    max_staleness: int,
    between: Callable[[Any], Any] = lambda rollouts: rollouts,
) -> Graph:
    """Prompts, rollouts, what comes between, a reward, and weights that go back."""
    g = Graph(name)
    prompts = Prompts(str(Path(generator.model.source).parent / "prompts.jsonl"))
    trainer(advantage(reward(between(generator(g.source(prompts))))))
    g.feedback(trainer.weights, generator, max_staleness=max_staleness)
    return g
