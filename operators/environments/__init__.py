"""Environments of other systems as episodes, as they are: an adapter for each system."""

from operators.environments.declaration import environment
from operators.environments.trl_form import trl_environment, trl_environments, trl_rollout
from operators.environments.verifiers_form import verifiers_environment

__all__ = [
    "environment",
    "trl_environment",
    "trl_environments",
    "trl_rollout",
    "verifiers_environment",
]
