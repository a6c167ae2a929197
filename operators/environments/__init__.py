"""Environments of other systems as episodes, as they are: an adapter for each system."""

from operators.environments.declaration import environment

__all__ = ["environment"]
