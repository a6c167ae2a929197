"""Environments of other systems as episodes, as they are: an adapter for each system, and a pool of their sessions."""

from operators.environments.trl_form import trl_environment

__all__ = ["trl_environment"]
