"""Several hosts on one machine, in namespaces of the kernel."""

from .host import Command, Host, NoHosts, hosts
from .opened import Opened, opened

__all__ = ["Command", "Host", "NoHosts", "Opened", "hosts", "opened"]
