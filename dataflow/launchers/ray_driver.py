"""A driver of Ray for one run, in a process of its own: Ray has threads, and who forks must have
none.

python -m dataflow.launchers.ray_driver FD
"""

import contextlib
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dataflow.errors import DataflowError, GraphError, RunError
from dataflow.launchers.ray_agent import RayHostAgent
from dataflow.launchers.ray_bundles import CPU, GPU, BundleRequest, asked, cannot_be_had
from dataflow.launchers.ray_messages import RAY, AgentEnded, Connect, Connected, PlaceAgents, Wrong
from dataflow.system.addresses import own_address
from dataflow.system.child import die_with_parent
from dataflow.system.messages import Channel

_SEND_S = 10.0
_END_S = 3.0
_TURN_S = 0.2


class RayDriver:
    """Has Ray keep an agent on each host.

    consumes: what the launcher wants
    produces: what came of it; agents that ended
    waits for: the launcher, for long; Ray, up to `wait_s`
    unblocked by: either; the launcher's end, with which the actors and their agents end too
    """

    def __init__(self, end: socket.socket) -> None:
        self._channel: Channel[Any] = Channel(end, RAY, _SEND_S)
        self._wish: Connect | None = None
        self._run: PlaceAgents | None = None
        self._until = 0.0
        """When the group has to be placed."""
        self._asked: BundleRequest | None = None
        self._group: PlacementGroup | None = None
        self._watches: dict[Any, Any] = {}
        """Actors, by what their `watch` is to bring."""

    def run(self) -> None:
        """Until the launcher is gone."""
        try:
            while True:
                if self._channel.readable(_TURN_S):
                    for message in self._channel.arrived():
                        self._apply(message)
                self._look()
        except EOFError:
            pass
        except Exception as error:
            answer = (
                str(error)
                if isinstance(error, DataflowError)
                else f"Ray says: {type(error).__name__}: {error}"
            )
            with contextlib.suppress(OSError):
                self._channel.send(Wrong(answer))
        finally:
            self._end()

    def _apply(self, message: Connect | PlaceAgents) -> None:
        match message:
            case Connect():
                self._wish = message
                self._connect(message)
            case PlaceAgents():
                assert self._asked is not None and self._wish is not None, "it connects first"
                self._run, self._until = message, time.monotonic() + self._wish.wait_s
                bundles = [dict(self._asked.bundle)] * self._asked.hosts
                self._group = placement_group(bundles, strategy="STRICT_SPREAD", name=message.name)

    def _connect(self, wish: Connect) -> None:
        try:
            ray.init(
                address=wish.address,
                runtime_env=dict(wish.runtime_env) or None,
                log_to_driver=False,
                logging_level="ERROR",
                configure_logging=True,
            )
        except (ConnectionError, ValueError, TimeoutError) as error:
            first = str(error).strip().splitlines()[0]
            raise RunError(
                f"there is no Ray cluster at '{wish.address}': {first}; start one with ray start,"
                " or name its address"
            ) from error
        self._asked = asked(
            ray.nodes(),
            hosts=wish.hosts,
            cpus=wish.cpus,
            gpus=wish.gpus,
            resources=_numbers(wish.resources),
        )
        self._channel.send(
            Connected(
                hosts=self._asked.hosts, listen=own_address("", f"tcp://{_cluster(wish.address)}")
            )
        )

    def _start(self, run: PlaceAgents, wanted: BundleRequest) -> None:
        """Have an actor in each bundle of the group, which is there."""
        cpus, gpus = int(wanted.bundle[CPU]), int(wanted.bundle.get(GPU, 0))
        extra = {name: amount for name, amount in wanted.bundle.items() if name not in (CPU, GPU)}
        agent_actor = ray.remote(max_restarts=-1, max_task_retries=-1)(RayHostAgent)
        for number in range(wanted.hosts):
            actor = agent_actor.options(
                num_cpus=cpus,
                num_gpus=gpus,
                resources=extra,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, number),
            ).remote(run.scheduler, run.folder, run.keys, cpus, gpus)
            self._watches[actor.watch.remote()] = actor

    def _look(self) -> None:
        """Start the agents once they have a place; tell of those that have ended; one that Ray
        starts again has not.
        """
        if (
            self._run is not None
            and self._group is not None
            and self._asked is not None
            and self._wish is not None
        ):
            if self._group.wait(0.1):
                self._start(self._run, self._asked)
                self._run = None
            elif time.monotonic() >= self._until:
                raise RunError(cannot_be_had(self._asked, ray.nodes(), _free(), self._wish.wait_s))
        for watch in ray.wait(list(self._watches), timeout=0)[0] if self._watches else ():
            actor = self._watches.pop(watch)
            try:
                notice = ray.get(watch)
            except ray.exceptions.RayError as error:
                notice = f"Ray gives an agent up: {str(error).strip().splitlines()[-1]}"
            if notice:
                self._channel.send(AgentEnded(notice))
            del actor

    def _end(self) -> None:
        """Let go of group and actors, whose agents were asked to end; if this process is killed,
        Ray does it.
        """
        with contextlib.suppress(Exception):
            watches = list(self._watches)
            _, late = (
                ray.wait(watches, num_returns=len(watches), timeout=_END_S) if watches else ([], [])
            )
            for watch in late:
                ray.kill(self._watches[watch])
            if self._group is not None:
                ray.util.remove_placement_group(self._group)
            ray.shutdown()


def _cluster(address: str) -> str:
    """Where it is, as host:port."""
    if address.startswith("ray://"):
        return address.removeprefix("ray://").partition("?")[0]
    return str(ray.get_runtime_context().gcs_address)


def _free() -> Mapping[str, Mapping[str, float]]:
    """What nobody uses, by node; nothing where Ray does not say it, as to a client outside of the
    cluster.
    """
    with contextlib.suppress(Exception):
        return dict(ray._private.state.available_resources_per_node())
    return {}


def _numbers(plain: Any) -> dict[str, float]:
    try:
        return {str(name): float(amount) for name, amount in plain.items()}
    except (TypeError, ValueError):
        raise GraphError(
            f"resources of Ray are numbers by name, but got {plain!r}; write {{'rack-1': 1}}"
        ) from None


if __name__ == "__main__":
    die_with_parent()
    RayDriver(socket.socket(fileno=int(sys.argv[1]))).run()
