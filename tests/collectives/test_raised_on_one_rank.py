"""What looks at its arguments before it meets the other ranks: where that raises on one rank, the
others get an error that says so, and wait for nobody."""

import os

import pytest
import torch

import hvdlite as hvd


class Boom(Exception):
    def __str__(self):
        raise RuntimeError("it can't say")


class NoIndex:
    def __index__(self):
        raise RuntimeError("no index")


class NoRepr:
    def __repr__(self):
        raise RuntimeError("no repr")


class NoPickle:
    def __init__(self, error):
        self._error = error

    def __reduce__(self):
        raise self._error


class NoPath:
    def __fspath__(self):
        raise RuntimeError("no path")


class NoState(torch.optim.SGD):
    def state_dict(self):
        raise RuntimeError("no state")


def breaks(*things, error=None):
    yield from things
    raise error or RuntimeError("it broke")


def freed():
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def without_memory():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9)
    (param,) = optimizer.param_groups[0]["params"]
    optimizer.state[param]["momentum_buffer"] = freed()
    return optimizer


def cases():
    """What is called, with what on rank 1 and on the others, what it raises there, and the end of
    what the others are told."""
    p = torch.nn.Parameter(torch.ones(3))
    good = torch.optim.SGD([p], lr=0.1)
    told = "failed on rank 1: RuntimeError: "
    sets = [0], "add_process_set " + told
    params = [("a", torch.ones(3))], "broadcast_parameters " + told
    add, remove = hvd.add_process_set, hvd.remove_process_set
    yield add, breaks(0), *sets, RuntimeError, "it broke"
    yield add, breaks(error=TypeError("no")), [0], "TypeError: no", TypeError, ""
    yield add, breaks(error=Boom()), [0], "Boom: <exception str() failed>", Boom, ""
    yield add, [0, NoIndex()], *sets, RuntimeError, "no index"
    yield add, [NoRepr()], *sets, RuntimeError, "no repr"
    yield add, [10**5000], [0], "failed on rank 1: ValueError: ", ValueError, ""
    yield remove, NoRepr(), hvd.ProcessSet([0]), told, RuntimeError, "no repr"
    broadcast = lambda given: hvd.broadcast_parameters(given, 0)  # noqa: E731
    yield broadcast, breaks(("a", torch.ones(3))), *params, RuntimeError, "it broke"
    yield broadcast, [("a", freed())], params[0], "'a': float32[3] has no memory", ValueError, ""
    yield broadcast, {"a": 3}, params[0], "'a' is int, expected a tensor", ValueError, ""
    state = lambda given: hvd.broadcast_optimizer_state(given, 1)  # noqa: E731
    yield state, NoState([p], lr=0.1), good, told, RuntimeError, "no state"
    yield state, torch.optim.LBFGS([p]), good, "does not support LBFGS", ValueError, ""
    yield state, without_memory(), good, "float32[3] has no memory", ValueError, ""
    for call in (hvd.allgather_object, lambda given: hvd.broadcast_object(given, 1)):
        told = "rank 1's object can't be sent: KeyError: 3"
        yield call, NoPickle(KeyError(3)), None, told, KeyError, "3"
        told = "rank 1's object can't be sent: KeyboardInterrupt"
        yield call, NoPickle(KeyboardInterrupt()), None, told, KeyboardInterrupt, ""
    told = "failed on rank 1: KeyboardInterrupt"
    yield add, breaks(error=KeyboardInterrupt()), [0], told, KeyboardInterrupt, ""


def raised_on_rank_1():
    hvd.init()
    first = hvd.add_process_set([0])
    number_of_first = first.process_set_id
    hvd.remove_process_set(first)
    wrong = []
    for number, (call, odd, usual, told, kind, text) in enumerate(cases()):
        mine = hvd.rank() == 1
        try:
            call(odd if mine else usual)
            wrong.append((number, "nothing was raised"))
        except BaseException as error:
            if type(error) is not (kind if mine else hvd.HorovodInternalError):
                wrong.append((number, repr(error)))
            elif mine and text and str(error).strip("'") != text:
                wrong.append((number, text, str(error)))
            elif not mine and told not in str(error):
                wrong.append((number, told, str(error)))
    # All are where they were before, and can go on.
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()
    assert hvd.add_process_set([0]).process_set_id == number_of_first + 1
    return wrong


@pytest.mark.ranks(3)
@pytest.mark.hosts("1,1")
def test_what_one_rank_raises_in_a_call_that_all_make_is_an_error_on_every_rank(world):
    assert not any(world.run(raised_on_rank_1))


def sets_at_init():
    hvd.init()
    rank = hvd.rank()
    hvd.shutdown()
    try:
        hvd.init(process_sets=breaks([0]) if rank == 1 else [[0]])
    except (RuntimeError, hvd.HorovodInternalError) as error:
        assert not hvd.is_initialized()
        return type(error).__name__, str(error)


@pytest.mark.ranks(2)
@pytest.mark.mpis("mpich")
def test_process_sets_that_raise_at_init_are_an_error_on_every_rank(world):
    assert world.run(sets_at_init) == [
        ("HorovodInternalError", "init failed on rank 1: RuntimeError: it broke"),
        ("RuntimeError", "it broke"),
    ]


def device_that_is_missing():
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
    hvd.shutdown()  # the case before may have left a world
    os.environ["HVDLITE_GPU"] = "999" if rank == 1 else "auto"
    with pytest.raises((ValueError, hvd.HorovodInternalError)) as caught:
        hvd.init()
    assert not hvd.is_initialized()
    os.environ["HVDLITE_GPU"] = "auto"
    hvd.init()  # which also frees what the first one has left
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1")
def test_a_device_that_one_rank_does_not_have_is_an_error_on_every_rank_and_init_can_come_again(
    world,
):
    (other, told), (own, text) = world.run(device_that_is_missing)
    assert (other, own) == ("LaunchError", "ValueError")
    assert text.startswith("HVDLITE_GPU=999: this process sees ")
    assert told == f"init failed on rank 1: {text}"


def timelines():
    hvd.init()
    with pytest.raises(ValueError, match=r"can't write .*: no path"):
        hvd.start_timeline(NoPath())
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()


@pytest.mark.ranks(2)
@pytest.mark.mpis("mpich")
def test_a_path_that_raises_is_an_error_on_every_rank(world):
    world.run(timelines)
