"""Environments of other systems as episodes, as they are: an adapter for each system, and a pool of their sessions."""

from operators.environments.declaration import environment

__all__ = ["environment"]
