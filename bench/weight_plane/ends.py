"""The two ends of a system of the weight-plane bench, and those that tell the reader through a
pipe.
"""

from abc import ABC, abstractmethod
from typing import Protocol

# ruff: noqa: B027 - most ends have nothing to do in some of the methods
import torch

from bench.weight_plane.cases import Seat


class TrainerEnd(Protocol):
    """The trainer's end."""

    def publish(self, version: int) -> None:
        """Send the tensors of the seat, or begin to."""

    def poll(self) -> None:
        """Its turn between two steps. Never waits."""

    def settle(self, timeout_s: float) -> None:
        """Wait until the tensors may change; the last version has been taken."""

    def close(self) -> None:
        """End it."""


class ReaderEnd(Protocol):
    """The reader's end."""

    def take(self) -> bool:
        """Its turn between two steps: whether the parameters of the seat hold a new version now.
        Waits for none.
        """

    def wait(self, timeout_s: float) -> bool:
        """The same, but wait for one."""

    def close(self) -> None:
        """End it."""


class Announcing(ABC):
    """A trainer's end that has done all when `publish` returns, and tells the reader of it through
    the pipe.
    """

    def __init__(self, seat: Seat) -> None:
        """Take the seat."""
        self.seat = seat

    def publish(self, version: int) -> None:
        """Hand over, and tell."""
        self.hand_over()
        self.seat.words.send(version)

    @abstractmethod
    def hand_over(self) -> None:
        """Put the tensors where the reader will find them."""

    def poll(self) -> None:
        """Nothing to answer."""

    def settle(self, timeout_s: float) -> None:
        """They may."""

    def close(self) -> None:
        """Nothing is held."""


class Told(ABC):
    """A reader's end that hears of versions through the pipe."""

    def __init__(self, seat: Seat) -> None:
        """Take the seat."""
        self.seat = seat

    def take(self) -> bool:
        """Load the version that was told of, if one was."""
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> bool:
        """Load the version that will be told of."""
        if not self.seat.words.poll(timeout_s):
            return False
        self.seat.words.recv()
        self.load()
        return True

    @abstractmethod
    def load(self) -> None:
        """Bring the version into the parameters."""

    def put(self, state: dict[str, torch.Tensor]) -> None:
        """Copy a state dict into the parameters."""
        with torch.no_grad():
            for name, parameter in self.seat.tensors.items():
                parameter.copy_(state[name])

    def close(self) -> None:
        """Nothing is held."""
