"""Environments of other systems as episodes, as they are: an adapter for each system."""

from operators.environments.declaration import environment
from operators.environments.trl_form import trl_environment

__all__ = ["environment", "trl_environment"]
