"""The script's line that an operation's texts name."""

import functools
import inspect
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed import c10d_logger

import hvdlite as hvd
from hvdlite import sites


def here():
    """The caller's line, as a site."""
    frame = inspect.currentframe().f_back
    return f"test_sites.py:{frame.f_lineno}"


def test_it_is_the_caller_s_line():
    assert sites.site() == here()
    found = [sites.site() for _ in range(3)]
    assert found == [f"test_sites.py:{inspect.currentframe().f_lineno - 1}"] * 3


def test_two_calls_in_one_line_and_in_two_functions_are_told_apart():
    def one():
        return sites.site()

    def two():
        return sites.site()

    assert one() != two()
    assert (one(), one()) == (one(), one())


@c10d_logger._exception_logger
def wrapped_by_torch():
    return sites.site()


def compiled_in(file, source, **names):
    """A function `call` of a module with that file."""
    exec(compile(source, file, "exec"), names)
    return names["call"]


@pytest.mark.parametrize(
    "file",
    [
        torch.__file__,
        dist.__file__,
        hvd.__file__,
        functools.__file__,
        "<frozen runpy>",
        "<eval_with_key>.3",
    ],
)
def test_frames_of_libraries_are_passed_over(file):
    call = compiled_in(file, "def call(f):\n    return f()", site=sites.site)
    assert call(sites.site) == here()


@pytest.mark.parametrize(
    ("file", "site"),
    [
        ("/home/me/train.py", "train.py:3"),
        ("train.py", "train.py:3"),
        ("<stdin>", "<stdin>:3"),
        (inspect.getfile(functools)[: -len("functools.py")] + "site-packages/lib/x.py", "x.py:3"),
    ],
)
def test_the_innermost_other_frame_counts(file, site):
    call = compiled_in(file, "def call(f):\n\n    return f()")
    assert call(sites.site) == site


def test_a_thread_without_a_frame_of_the_script_has_none():
    found = []
    # Only frames of the standard library: the target is a function of hvdlite.
    thread = threading.Thread(target=compiled_in(hvd.__file__, CALL), args=(found, sites.site))
    thread.start()
    thread.join()
    assert found == [""]


CALL = "def call(found, site):\n    found.append(site())"


def test_a_wrapper_of_torch_leaves_the_line_of_its_caller():
    assert wrapped_by_torch().startswith("test_sites.py:")


def test_what_is_remembered_stays_bounded():
    sites._texts.clear()
    for number in range(sites._MOST_TEXTS + 10):
        call = compiled_in(f"made{number}.py", "def call(f):\n    return f()")
        assert call(sites.site) == f"made{number}.py:2"
    assert len(sites._texts) <= sites._MOST_TEXTS


def lines_in_errors():
    """Each rank calls each operation on a line of its own, with another shape."""
    hvd.init()
    one, two = torch.ones(1, 2), torch.ones(1, 3)
    calls = {
        "allreduce": lambda x: hvd.allreduce(x, op=hvd.Sum),
        "allreduce_async_": lambda x: hvd.allreduce_async_(x, name="a"),
        "grouped_allreduce": lambda x: hvd.grouped_allreduce([x, x]),
        "allgather": hvd.allgather,
        "broadcast": lambda x: hvd.broadcast(x, 0),
        "alltoall": lambda x: hvd.alltoall(torch.cat([x, x])),
        "reducescatter": lambda x: hvd.reducescatter(torch.cat([x, x])),
        "broadcast_parameters": lambda x: hvd.broadcast_parameters({"a": x}, 0),
    }
    found = {}
    for name, call in calls.items():
        try:
            handle = call(one if hvd.rank() == 0 else two)
            hvd.synchronize(handle)
        except hvd.HorovodInternalError as error:
            found[name] = str(error)
    return found


@pytest.mark.ranks(2)
def test_errors_of_operations_name_the_scripts_line(world):
    first, second = world.run(lines_in_errors)
    assert first == second
    assert len(first) == 8
    for text in first.values():
        assert text.count(" (test_sites.py:") == 2, text
