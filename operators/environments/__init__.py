"""Environments of other systems as episodes, as they are: an adapter for each system, and a pool of their sessions."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from operators.environments.declaration import environment

__all__ = ["environment"]


def __getattr__(name: str) -> Any:
    """What is exported, imported when it is asked for: episodes lend sessions of the pool, and stand below the rest."""
    if name not in __all__:
        raise AttributeError(f"module 'operators.environments' has no attribute '{name}'; it has {__all__}")
    from operators.environments import declaration

    return getattr(declaration, name)
