"""Cases that run in jobs with servers."""

import functools

import hvdlite as hvd


def in_a_job(case):
    """The decorated case runs on the workers, after `init`; a server serves them, and returns
    'served'. Needs the knob HVDLITE_SERVERS."""

    @functools.wraps(case)
    def run(*args, **kwargs):
        hvd.shutdown()
        try:
            hvd.init()
        except SystemExit as ended:
            assert ended.code == 0
            return "served"
        try:
            return case(*args, **kwargs)
        finally:
            hvd.shutdown()

    return run


def servers(count):
    """Knobs."""
    return {"HVDLITE_SERVERS": str(count)}
