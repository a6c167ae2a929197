"""Structured logs: a line per event, in the run folder's logs."""

import logging
import os
import sys
from pathlib import Path
from typing import Any

import structlog

from dataflow.system.files import warn


def node_log(node: str) -> Any:
    """A node's log: where `log_to`, or the user, has said; else, as in a notebook, what is wrong
    goes to standard error, and nothing else is said.
    """
    if structlog.is_configured():
        return structlog.get_logger(node=node)
    logger = structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
    )
    return logger.bind(node=node)


def log_to(path: Path) -> None:
    """Send this process's logs, standard output and standard error to a file, for good; to nowhere,
    which is told before, where the disk refuses it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        warn(f"'{path}' cannot be opened: {error.strerror or error}; the run goes on without it")
        handle = os.open(os.devnull, os.O_WRONLY)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    # A notebook, or a test runner, may have put streams of its own in their place.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, force=True)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
