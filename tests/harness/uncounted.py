"""What begins to count the time of steps, in a process that runs other tests, too."""

import contextlib

import pytest
from torch.utils.data import dataloader

from hvdlite.observe import loading, summary, waits


@contextlib.contextmanager
def uncounted():
    """Counting has not begun, and ends with this."""
    base = dataloader._BaseDataLoaderIter
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(base, "__next__", base.__next__)
        for module, name in ((summary, "_summary"), (loading, "_counted"), (waits, "_counted")):
            patched.setattr(module, name, None)
        patched.setattr(waits, "observed", waits.observed)
        yield
