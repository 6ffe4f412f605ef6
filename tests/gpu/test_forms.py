"""All forms of the collectives give on GPU tensors what they give on tensors in host memory."""

import functools
import gc

import pytest
import torch

import hvdlite as hvd
from tests.gpu.forms import CALLS, ranks_values
from tests.gpu.stand_in import count_starts, new_queue, on_gpu

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.hosts("2,1")]

routes = pytest.mark.parametrize("route", ["group", "staged"])


FLAT = {"grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async"}


def flat(result):
    return list(result) if isinstance(result, (list, tuple)) else [result]


def call_all(route):
    queue = new_queue(route)
    starts = count_starts(queue)
    problems = []
    for form, call in CALLS.items():
        expected = flat(call(lambda tensor: tensor, f"{form} on the host"))
        before = len(starts)
        got = flat(call(on_gpu, form))
        # The flat buffer of a group is a new tensor, which does not pretend to be on a GPU.
        if len(starts) == before and form not in FLAT:
            problems.append(f"{form}: not by the GPU queue")
        for a, b in zip(got, expected, strict=True):
            if a.dtype != b.dtype or not torch.equal(a, b):
                problems.append(f"{form}: {a} for {b}")
    assert not problems, problems


@routes
def test_every_form_gives_what_it_gives_on_the_host(world, route):
    world.run(call_all, route)


def gradient(call, to):
    given = to(ranks_values(hvd.size() * 2, 2)).requires_grad_()
    result = call(given)
    weights = torch.arange(result.numel(), dtype=torch.float32).reshape(result.shape)
    (result * weights).sum().backward()
    return given.grad


DIFFERENTIABLE = {
    "allreduce": functools.partial(hvd.allreduce, name="d", prescale_factor=0.5),
    "broadcast": functools.partial(hvd.broadcast, root_rank=1, name="d"),
    "allgather": functools.partial(hvd.allgather, name="d"),
    "alltoall": functools.partial(hvd.alltoall, name="d"),
    "reducescatter": functools.partial(hvd.reducescatter, name="d", op=hvd.Sum),
    "grouped_allreduce": lambda t: torch.cat(hvd.grouped_allreduce([t, 2 * t], name="d")),
}


def differentiate(route):
    new_queue(route)
    problems = []
    for form, call in DIFFERENTIABLE.items():
        expected = gradient(call, lambda tensor: tensor)
        got = gradient(call, on_gpu)
        if not torch.equal(got, expected):
            problems.append((form, got, expected))
    assert not problems, problems


@routes
def test_the_gradients_of_the_differentiable_forms_are_the_same(world, route):
    world.run(differentiate, route)


def work_in_place():
    new_queue()
    size = hvd.size()
    problems = []
    plain = ranks_values(5)
    if hvd.allreduce_(tensor := on_gpu(plain), name="a", op=hvd.Sum) is not tensor:
        problems.append("another tensor")
    expected = torch.arange(5.0) * size * size + size * (size - 1) / 2
    if not torch.equal(plain, expected):
        problems.append(f"the memory: {plain}")
    # A parameter, and one that inference mode has made.
    leaf = on_gpu(torch.ones(3)).requires_grad_()
    hvd.allreduce_(leaf, name="leaf", op=hvd.Sum)
    if not leaf.requires_grad or leaf.tolist() != [size] * 3:
        problems.append(f"leaf: {leaf}")
    with torch.inference_mode():
        made = on_gpu(torch.ones(3))
        hvd.allreduce_(made, name="made", op=hvd.Sum)
        given = hvd.allreduce(made, name="given")
        if made.tolist() != [size] * 3 or given.tolist() != [size] * 3:
            problems.append(f"inference mode: {made} {given}")
    saved = on_gpu(torch.ones(3)).requires_grad_()
    product = saved * saved
    middle = product * 1
    square = (middle**2).sum()
    hvd.allreduce_(middle.detach(), name="saved")
    try:
        square.backward()
        problems.append("autograd has not seen the change")
    except RuntimeError as error:
        if "inplace" not in str(error):
            problems.append(str(error))
    for bad in (
        on_gpu(torch.ones(3, 4)).t(),
        on_gpu(torch.zeros(2, dtype=torch.cfloat)).conj().imag,
    ):
        try:
            hvd.allreduce_(bad, name="bad")
            problems.append("no error")
        except ValueError as error:
            if "can't be changed in place" not in str(error):
                problems.append(str(error))
    assert not problems, problems


def test_in_place_is_the_memory_itself_and_autograd_knows(world):
    world.run(work_in_place)


def mix_on_different_ranks():
    new_queue()
    tensor = ranks_values(4)
    if hvd.rank() == 1:
        tensor = on_gpu(tensor)
    texts = []
    for call in (hvd.allreduce, hvd.allgather):
        try:
            call(tensor, name="mixed")
        except hvd.HorovodInternalError as error:
            texts.append(str(error))
    assert hvd.allreduce(on_gpu(torch.ones(2)), op=hvd.Sum).tolist() == [hvd.size()] * 2
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2
    return tuple(texts)


def test_tensors_in_other_places_on_other_ranks_are_a_disagreement(world):
    (texts,) = set(world.run(mix_on_different_ranks))
    assert len(texts) == 2
    for text in texts:
        assert "a tensor in host memory" in text
        assert "a tensor on a GPU" in text


def mix_in_one_job():
    """Both kinds in flight, unnamed, in one sequence."""
    new_queue()
    handles = []
    for i in range(12):
        to = on_gpu if i % 3 else lambda tensor: tensor
        handles.append(hvd.allreduce_async(to(torch.full((i + 1,), float(i))), op=hvd.Sum))
    del to
    gc.collect()
    order = range(12) if hvd.rank() else reversed(range(12))
    return {i: hvd.synchronize(handles[i]).tolist() for i in order}


def test_tensors_on_the_host_and_on_gpus_go_in_one_job(world):
    for got in world.run(mix_in_one_job):
        assert got == {i: [i * world.size] * (i + 1) for i in range(12)}


def refuse():
    from hvdlite.world.process import gpu_pinning

    new_queue()
    gpu_pinning.refusal = "no GPU was chosen"
    try:
        hvd.allreduce(on_gpu(torch.ones(2)))
    except ValueError as error:
        return str(error)
    finally:
        gpu_pinning.refusal = ""


@pytest.mark.ranks(2)
def test_a_rank_without_a_chosen_gpu_refuses_at_the_call(world):
    assert set(world.run(refuse)) == {"no GPU was chosen"}
