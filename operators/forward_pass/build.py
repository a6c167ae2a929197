"""Makes the runtime that a forward operator declares, on one rank or as the first of several;
imports torch."""

from __future__ import annotations

import torch

from dataflow.runtime import Context
from operators.forward_pass.knobs import ForwardKnobs
from operators.forward_pass.reading import reading_of
from operators.forward_pass.runtime import ForwardRuntime
from operators.models.loading import load_merged


def build(declaration: ForwardKnobs, context: Context) -> ForwardRuntime:
    """Load model and tokenizer onto the device of `context`. Raises ModelError when they cannot be
    used."""
    if context.device == "cpu":
        torch.set_num_threads(context.threads)
    if context.ranks > 1:
        from operators.forward_pass.parallel.launch import led

        reading, merged, context = led(declaration, context)
        return ForwardRuntime(declaration, context, reading, merged)
    module, merged = load_merged(declaration.model, device=context.device)
    return ForwardRuntime(
        declaration, context, reading_of(declaration, context.node, module, is_alone=True), merged
    )
