"""Types of command-line options that several commands share."""

from __future__ import annotations

import argparse


def positive_int(text: str) -> int:
    """An option's value as an int of at least 1.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return value
