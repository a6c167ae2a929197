"""Generator: turns prompts into rollouts of a language model whose weights may change midway."""

from __future__ import annotations

from dataclasses import dataclass

from dataflow.runtime import Context, Runtime
from operators.engine.knobs import GeneratorKnobs


@dataclass(frozen=True, eq=False)
class Generator(GeneratorKnobs):
    """Samples `group_size` rollouts of every prompt with the model's newest weights.

    Rollouts are decoded together, one token each per step, from a KV-cache in pages; a slot that a
    finished rollout leaves is refilled at the next step, and the rollouts of a group share the
    pages of their prompt.

    Its knobs: `operators.engine.knobs.GeneratorKnobs`.

    >>> from dataflow import Graph, Model
    >>> from operators import Generator, Prompts
    >>> generator = Generator(Model("policies/sums"), group_size=8, max_tokens=64)
    >>> rollouts = generator(Graph("sums").source(Prompts(["2+2=", "3+4="])))
    >>> {"completion", "tokens", "logprobs", "versions"} <= set(rollouts.columns)
    True
    """

    def preload(self) -> None:
        """Import torch, the model's code and the runtime."""
        import operators.engine.make
        import operators.generation.runtime
        from operators.models.loading import preload

        if self.tensor_parallel > 1:
            import operators.engine.parallel.launch  # noqa: F401
        preload(self.model)

    def build(self, context: Context) -> Runtime:
        """Load the model and make the engine. Raises ModelError when either cannot be."""
        from operators.generation.runtime import GeneratorRuntime

        return GeneratorRuntime(self, context)
