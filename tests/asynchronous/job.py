"""Cases that run in jobs with servers."""

import functools

import hvdlite as hvd
from hvdlite.world import world

SERVED = "served"


def in_a_job(case):
    """The decorated case runs on the workers, after `init`; a server serves them, and returns
    SERVED. Needs the knob HVDLITE_SERVERS, if there are to be servers."""

    @functools.wraps(case)
    def run(*args, **kwargs):
        hvd.shutdown()
        try:
            hvd.init()
            return case(*args, **kwargs)
        except SystemExit as ended:
            return SERVED if ended.code == 0 else ended.code
        finally:
            hvd.shutdown()
            world.servers_have_ended = False  # this process outlives the job

    return run


def servers(count):
    """Knobs."""
    return {"HVDLITE_SERVERS": str(count)}


def of_workers(results):
    """The results of the workers, in their order."""
    return [result for result in results if result != SERVED]
