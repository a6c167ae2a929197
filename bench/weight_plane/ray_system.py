"""Ray for the weight-plane bench; it is imported when an end is opened.

Both processes are drivers of one small cluster that the trainer starts, on loopback and with a
token that only they know; the reference to the weights goes through an actor, for a driver cannot
hand one to another.
"""

import os
import secrets
from importlib import import_module
from typing import Any

import torch

from bench.weight_plane.cases import PATIENCE_S, Seat
from bench.weight_plane.ends import Announcing, Told

NAMESPACE, MAILBOX = "bench", "mailbox"
STORE_VERSIONS = 3
"""Room in the object store."""


class _Mailbox:
    """The newest references, as an actor."""

    def put(self, references: list[Any]) -> None:
        self._references = references

    def take(self) -> list[Any]:
        return self._references


def _ray(token: str) -> Any:
    """Ray, told before its import where to listen and whom to admit."""
    # The variable is named after the systems where it is the default.
    os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    return import_module("ray")


class RayTrainer(Announcing):
    """Puts a state dict into the object store."""

    def __init__(self, seat: Seat) -> None:
        """Start Ray."""
        super().__init__(seat)
        token = secrets.token_hex(32)
        self._ray = _ray(token)
        context = self._ray.init(
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            namespace=NAMESPACE,
            _temp_dir=str(seat.folder),
            object_store_memory=STORE_VERSIONS * seat.case.nbytes + (256 << 20),
            logging_level="ERROR",
        )
        self._mailbox = self._ray.remote(num_cpus=0)(_Mailbox).options(name=MAILBOX).remote()
        self._ray.get(self._mailbox.put.remote([]), timeout=PATIENCE_S)
        seat.words.send((context.address_info["address"], token))

    def hand_over(self) -> None:
        """Put it, and post the reference."""
        reference = self._ray.put(self.state())
        self._ray.get(self._mailbox.put.remote([reference]), timeout=PATIENCE_S)

    def state(self) -> dict[str, Any]:
        """What is put."""
        return dict(self.seat.tensors)

    def close(self) -> None:
        """Stop Ray."""
        self._ray.shutdown()


class RayReader(Told):
    """Gets it from there."""

    def __init__(self, seat: Seat) -> None:
        """Connect."""
        super().__init__(seat)
        if not seat.words.poll(PATIENCE_S):
            raise TimeoutError(f"the trainer has not started Ray after {PATIENCE_S:g} s")
        address, token = seat.words.recv()
        self._ray = _ray(token)
        self._ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR"
        )
        self._mailbox = self._ray.get_actor(MAILBOX)

    def load(self) -> None:
        """Get it, and copy it into the parameters."""
        (reference,) = self._ray.get(self._mailbox.take.remote(), timeout=PATIENCE_S)
        self.put(self._ray.get(reference, timeout=PATIENCE_S))

    def close(self) -> None:
        """Leave the cluster."""
        self._ray.shutdown()


class RayNumpyTrainer(RayTrainer):
    """Puts numpy arrays."""

    def state(self) -> dict[str, Any]:
        """Arrays of the same memory."""
        return {name: tensor.numpy() for name, tensor in self.seat.tensors.items()}


class RayNumpyReader(RayReader):
    """Gets numpy arrays, views of the object store."""

    def put(self, state: dict[str, Any]) -> None:
        """Copy them into the parameters."""
        with torch.no_grad():
            for name, parameter in self.seat.tensors.items():
                parameter.numpy()[...] = state[name]
