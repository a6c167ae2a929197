"""What runs in an actor of Ray: the agent of its host, as a child, watched."""

from dataflow.agent.environment import AgentEnvironment, ended_agent, start_agent
from dataflow.launchers.ray_bundles import host_name
from dataflow.system.child import die_with_parent


class RayHostAgent:
    """Ray starts it anew, on another host if need be, when its process or its host has gone."""

    def __init__(self, scheduler: str, folder: str, keys: bytes, cpus: int, gpus: int) -> None:
        """Start the agent; it ends with this process. scheduler, folder: see `Joining`."""
        import ray

        self._host = host_name(ray.nodes(), ray.get_runtime_context().get_node_id())
        environment = AgentEnvironment(
            scheduler=scheduler,
            folder=folder,
            keys="",
            host=self._host,
            address=ray.util.get_node_ip_address(),
            cpus=str(cpus),
            gpus=str(gpus),
        )
        self._agent = start_agent(environment, keys, words=True, preexec_fn=die_with_parent)

    def watch(self) -> str:
        """Wait for the agent's end; what is to be said of it, nothing where it came with the
        run's.
        """
        if not self._agent.wait():
            return ""
        return ended_agent(self._host, self._agent, self._agent.last_words)
