"""What takes seconds says so, in the logger "onepass": a compiler that runs at a line's first use.

At level INFO. Where standard error is a terminal, or ``ONEPASS_LOG`` names a level, messages are written there as well;
a program that sets up logging gets them as any other's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator

__all__ = ["say_by_default", "taking_seconds"]

logger = logging.getLogger("onepass")
UNSAID = 0.5
"""Seconds."""


class _StandardError(logging.Handler):
    """Writes where nobody else does."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            with contextlib.suppress(OSError, ValueError):  # closed
                sys.stderr.write(f"onepass: {record.getMessage()}\n")


def is_on_terminal() -> bool:
    """Whether standard error is one, which may be closed, or not there."""
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:
        return False


def write_from(name: str) -> None:
    """Messages of this level and above, to standard error."""
    level = logging.getLevelNamesMapping().get(name.upper())
    if level is not None:
        logger.setLevel(level)
        logger.addHandler(_StandardError())


def say_by_default() -> None:
    """For a command: where the environment says nothing, messages are written, be it to a terminal or not."""
    if "ONEPASS_LOG" not in os.environ and not logger.handlers:
        write_from("info")


@contextlib.contextmanager
def taking_seconds(what: str) -> Iterator[None]:
    """Says what is compiled where it takes longer than the disk cache would, and how long it took."""
    said = threading.Event()

    def say() -> None:
        said.set()
        logger.info("compiling %s, once: it is kept in the disk cache", what)

    timer = threading.Timer(UNSAID, say)
    timer.daemon = True
    began = time.perf_counter()
    with contextlib.suppress(RuntimeError):  # the interpreter ends
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if said.is_set():
            logger.info("%s took %.1f s", what, time.perf_counter() - began)


write_from(os.environ.get("ONEPASS_LOG") or ("info" if is_on_terminal() else ""))
