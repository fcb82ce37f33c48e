"""Runs that fail on purpose, without their tracebacks in the output of a test that fails."""

import logging
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def no_logs() -> Generator[None]:
    """Log nothing."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
