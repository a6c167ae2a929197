"""What travels of a model that one rank holds whole."""

from collections.abc import Mapping

import torch

from transport.weights.encoding import SCALE, Encoding
from transport.weights.layout.flat import FlatLayout
from transport.weights.layout.from_torch import layout_of
from transport.weights.tensor_encoder import Encoder


def encoder_of(encoding: Encoding, tensors: Mapping[str, torch.Tensor]) -> Encoder:
    """Of its versions."""
    return Encoder(encoding, layout_of(tensors, [0]), 0, tensors)


def flat_layout(encoding: Encoding, tensors: Mapping[str, torch.Tensor]) -> FlatLayout:
    """As a reader gets it."""
    return encoding.layout(layout_of(tensors, [0])).flat(0)


@torch.no_grad()
def decode(travelled: Mapping[str, torch.Tensor], destinations: Mapping[str, torch.Tensor]) -> None:
    """Fill `destinations` with the numbers, rounded to their dtypes, that tensors under the same
    names stand for.

    KeyError where one of them has not travelled.
    """
    for name, into in destinations.items():
        values, scale = travelled[name], travelled.get(name + SCALE)
        into.copy_(values if scale is None else values.float().mul_(scale))
