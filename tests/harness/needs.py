"""A test that needs what the machine lacks is skipped; in CI it fails."""

import os

import pytest


def lacking(reason: str) -> None:
    """Skips the test; where CI is set it fails, as there everything is installed that can be."""
    __tracebackhide__ = True
    if os.environ.get("CI"):
        pytest.fail(f"in CI nothing is skipped: {reason}", pytrace=False)
    pytest.skip(reason)
