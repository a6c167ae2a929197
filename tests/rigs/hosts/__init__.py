"""Several hosts on one machine, in namespaces of the kernel."""

from .host import Command, Host, NoHosts, hosts

__all__ = ["Command", "Host", "NoHosts", "hosts"]
