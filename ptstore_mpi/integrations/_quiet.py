"""Silence for jobs: n ranks would print every progress bar and warning n times.

Owns nothing; puts the library's settings back when it is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR

from transformers import logging


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from writing progress bars and warnings to stderr."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(ERROR)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
