"""What an engine holds beside its weights is given back while others have its device."""

from __future__ import annotations

import torch

from operators.engine.decode import Engine


@torch.inference_mode()
def put_aside(engine: Engine) -> list[torch.Tensor]:
    """Free keys and values, packed weights and captured steps; live rows wait as parked ones do.
    Returns the model's tensors, which stay unread until `Engine.adopted`; make no step before it.

    Returns the model's tensors, which nobody reads until `Engine.adopted`; no step may be made
    before it.
    """
    engine.park_all()
    engine.pages.forget()
    if engine.graphed is not None:
        engine.graphed.replays.forget()
    if engine.fused is not None:
        engine.fused.let_go()
    engine.cache.drop()
    return [*engine.model.parameters(), *engine.model.buffers()]
