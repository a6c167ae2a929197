"""What an engine holds of its device is given back while others have it, and taken again."""

from __future__ import annotations

import torch

from operators.engine.decode import Engine
from operators.models.shelf import Shelf, return_freed_memory


def put_aside(engine: Engine, shelf: Shelf, *, refilled: bool) -> None:
    """Give back keys and values, packed weights, captured steps and weights; live rows wait as parked ones do.

    refilled: the weight plane fills `engine.tensors` again before anybody reads them, so that they need no place on
    the shelf. No step may be made before `Shelf.back` and `Engine.adopted`.
    """
    with torch.inference_mode():
        engine.park_all()
    engine.pages.forget()
    if engine.graphed is not None:
        engine.graphed.replays.forget()
    if engine.fused is not None:
        engine.fused.let_go()
    engine.cache.drop()
    shelf.park(_tensors(engine, refilled), forget=engine.tensors.values() if refilled else ())
    return_freed_memory()


def _tensors(engine: Engine, refilled: bool) -> list[torch.Tensor]:
    """Of the model; without those that a version arrives in, where it arrives in main memory."""
    every = [*engine.model.parameters(), *engine.model.buffers()]
    stays = {id(each) for each in engine.tensors.values()} if not refilled and engine.device.type == "cpu" else set()
    return [each for each in every if id(each) not in stays]
