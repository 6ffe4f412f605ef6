"""Cases that run in jobs with servers."""

import functools

import torch

import hvdlite as hvd

SERVED = "served"


def in_a_job(case):
    """The decorated case runs on the workers, after `init`; a server serves them, and returns
    SERVED. Needs the knob HVDLITE_SERVERS."""

    @functools.wraps(case)
    def run(*args, **kwargs):
        hvd.shutdown()
        # Else torch's Adagrad warns that they are off, and here warnings are errors.
        torch.sparse.check_sparse_tensor_invariants.disable()
        try:
            hvd.init()
        except SystemExit as ended:
            return SERVED if ended.code == 0 else ended.code
        try:
            return case(*args, **kwargs)
        finally:
            hvd.shutdown()

    return run


def servers(count):
    """Knobs."""
    return {"HVDLITE_SERVERS": str(count)}


def of_workers(results):
    """The results of the workers, in their order."""
    return [result for result in results if result != SERVED]
