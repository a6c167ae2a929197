"""What runs in an actor of Ray: the agent of its host, as a child, watched."""

import os
import subprocess
import tempfile
from pathlib import Path

from dataflow.agent.environment import AgentEnvironment
from dataflow.launchers.ray_bundles import host_name
from dataflow.system.child import die_with_parent, program
from dataflow.system.files import tail


class RayHostAgent:
    """Ray starts it anew, on another host if need be, when its process or its host has gone."""

    def __init__(self, scheduler: str, folder: str, keys: bytes, cpus: int, gpus: int) -> None:
        """Start the agent; it ends with this process. scheduler, folder: see `Joining`."""
        import ray

        self._host = host_name(ray.nodes(), ray.get_runtime_context().get_node_id())
        pipe, end = os.pipe()
        os.write(end, keys)
        os.close(end)
        environment = AgentEnvironment(
            scheduler=scheduler,
            folder=folder,
            keys=f"fd:{pipe}",
            host=self._host,
            address=ray.util.get_node_ip_address(),
            cpus=str(cpus),
            gpus=str(gpus),
        )
        handle, name = tempfile.mkstemp(prefix="dataflow-agent-")
        self._said = Path(name)
        self._agent = program(
            "dataflow.agent",
            keep=[pipe],
            environment=environment.to_environ(),
            stdin=subprocess.DEVNULL,
            stdout=handle,
            stderr=handle,
            preexec_fn=die_with_parent,
        )
        os.close(pipe)
        os.close(handle)

    def watch(self) -> str:
        """Wait for the agent's end; what is to be said of it, nothing where it came with the
        run's.
        """
        status = self._agent.wait()
        last_line = tail(self._said).strip().rpartition("\n")[2]
        self._said.unlink(missing_ok=True)
        if not status:
            return ""
        words = last_line or "it said nothing"
        return f"the agent of host '{self._host}' {self._agent.state}: {words}"
