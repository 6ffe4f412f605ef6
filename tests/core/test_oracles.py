"""The closed forms equal a plain reduction of the inputs, and they catch a faulty one."""

import pytest
import torch

from tests.core import oracles

COUNT = 2003


def reduce(op, inputs):
    """In one process, in a type that holds everything."""
    if op == "Product":
        return inputs.prod(dim=0)
    if op in ("Min", "Max"):
        return getattr(inputs, f"a{op.lower()}")(dim=0)
    total = inputs.sum(dim=0)
    if op == "Sum":
        return total
    return total / len(inputs)


def as_wide(tensor):
    return tensor.double() if tensor.is_floating_point() else tensor.long()


CASES = [(dtype, op) for dtype in oracles.DTYPES for op in oracles.ops_of(dtype)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_the_closed_form_is_what_the_inputs_reduce_to(dtype, op, size):
    cases = [oracles.case_of(dtype, op, rank, size, COUNT) for rank in range(size)]
    inputs = torch.stack([as_wide(case[0]) for case in cases])
    if dtype == "bool":
        wanted = inputs.amax(dim=0) if op in ("Sum", "Max") else inputs.amin(dim=0)
    elif op == "Average" and dtype in oracles.INTEGERS:
        wanted = torch.div(inputs.sum(dim=0), size, rounding_mode="trunc")
    else:
        wanted = reduce(op, inputs)
    for _, expected in cases:
        assert expected.dtype == getattr(torch, dtype)
        assert torch.equal(expected, wanted.to(getattr(torch, dtype)))


@pytest.mark.parametrize("op", ["Sum", "Product"])
@pytest.mark.parametrize("dtype", oracles.FLOATS)
@pytest.mark.parametrize("size", [2, 3, 7])
def test_all_that_is_given_and_expected_is_exact(dtype, op, size):
    cases = [oracles.case_of(dtype, op, rank, size, COUNT) for rank in range(size)]
    inputs = torch.stack([case[0].double() for case in cases])
    assert torch.equal(cases[0][1].double(), reduce(op, inputs))


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize(("dtype", "op"), CASES)
@pytest.mark.parametrize("fault", ["a rank is dropped", "a rank is shifted"])
def test_a_faulty_reduction_differs_from_the_closed_form(dtype, op, size, fault):
    cases = [oracles.case_of(dtype, op, rank, size, COUNT) for rank in range(size)]
    inputs = torch.stack([as_wide(case[0]) for case in cases])
    if fault == "a rank is dropped":
        inputs = inputs[:-1] if op != "Average" else inputs * (torch.arange(size)[:, None] > 0)
    else:
        inputs[-1] = inputs[-1].roll(1)
    if dtype == "bool":
        op = {"Sum": "Max", "Product": "Min"}.get(op, op)
    got = reduce(op, inputs).to(getattr(torch, dtype))
    assert oracles.mismatch(got, cases[0][1])
