"""Chooses the engine that a generator declares: this project's own, on one rank or several, or
vLLM's.
"""

from __future__ import annotations

from dataflow.runtime import Context
from operators.engine.build import BuiltEngine, build_native
from operators.engine.knobs import GeneratorKnobs


def make_engine(declaration: GeneratorKnobs, context: Context) -> BuiltEngine:
    """Load model and tokenizer onto the device of `context`; with `tensor_parallel` above 1 this
    process is rank 0.

    Raises ModelError when they cannot be used.
    """
    if declaration.tensor_parallel > 1:
        from operators.engine.parallel.launch import make_parallel

        return make_parallel(declaration, context, declaration.tensor_parallel)
    if declaration.engine == "vllm":
        from operators.engine.vllm.build import build_vllm

        return build_vllm(declaration, context)
    return build_native(declaration, context)
