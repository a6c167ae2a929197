"""Turns of a policy as ids that stand for themselves."""

import numpy as np

from dataflow.records import AnyArray
from dataflow.tokens.rollout_tokens import RolloutTokens


def encode(text: str) -> AnyArray:
    """An id for each letter."""
    return np.array([ord(letter) for letter in text], np.int32)


def drawn(*ids: int, version: int = 0) -> RolloutTokens:
    """What a policy of some version has said."""
    return RolloutTokens.drawn(np.array(ids), -np.ones(len(ids)), np.full(len(ids), version))
