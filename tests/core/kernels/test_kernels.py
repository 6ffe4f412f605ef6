"""The kernels: every variant against one oracle, which takes one input after the other in torch."""

from __future__ import annotations

import itertools
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hvdlite import _core
from tests.core import oracles, sum_tree
from tests.core.oracles import DTYPES, FLOATS
from tests.harness.needs import lacking

CORE = Path(__file__).parents[3] / "hvdlite" / "_core"
DRIVER = Path(__file__).with_name("reduce_driver.c")
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"

SIXTEEN = (torch.float16, torch.bfloat16)
NUMS_OF_INPUTS = (1, 2, 3, 4, 5, 8)
# Around the groups of all variants (16 to 256 elements), and several of them.
COUNTS = (0, 1, 3, 15, 16, 33, 64, 127, 129, 256, 257, 515)
# (prescale, divisor, postscale): none; averages; factors that float32 holds; others, some of whose
# products a fused multiply-add would not round, or are denormal, or overflow.
SCALES = (
    (1.0, 1, 1.0),
    (1.0, 2, 1.0),
    (1.0, 3, 1.0),
    (0.25, 1, 1.0),
    (1.0, 1, 0.1),
    (0.3, 1, 1.0),
    (1 / 3, 4, -0.7),
    (-1.7, 7, 1e-30),
    (1e30, 3, 0.0),
    (1e-39, 1, 1e300),
    (float("nan"), 1, float("inf")),
)
GUARD = 64


@dataclass(frozen=True)
class Case:
    op: str
    inputs: tuple[Tensor, ...]
    scale: tuple[float, int, float]
    in_place: int | None  # the input that is the output as well
    offset: int  # elements from a cache line to each buffer
    factors: tuple[float, ...] = ()  # of each input, or none

    def __str__(self) -> str:
        dtype, count = self.inputs[0].dtype, len(self.inputs[0])
        pre, divisor, post = self.scale
        given = f"{len(self.inputs)} x {dtype}[{count}] * {pre} * {self.factors}"
        return f"{self.op} of {given}, / {divisor} * {post}, {self.in_place=}"


def some(dtype: torch.dtype, count: int, seed: int) -> Tensor:
    """Half of it any bits at all (NaN, infinities, denormals, the extremes), half small numbers."""
    draw = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=draw).bool()
    wild = torch.randint(0, 256, (count * dtype.itemsize,), generator=draw, dtype=torch.uint8)
    small = torch.randint(-800, 800, (count,), generator=draw)
    tame = small.to(dtype) if not dtype.is_floating_point else (small / 300).to(dtype)
    given = torch.where(torch.rand(count, generator=draw) < 0.5, wild.view(dtype), tame)
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    special = [info.max, info.min, 0]
    if isinstance(info, torch.finfo):
        special += [float("nan"), float("inf"), -float("inf"), -0.0, info.smallest_normal]
    for i, value in enumerate(special):  # all pairs of them, as the seeds differ
        given[(i * 7 + seed * (i + 1)) % 61 :: 61] = value
    return given


def cases(dtype: str, op: str) -> Iterator[Case]:
    number = 0
    for num_inputs in NUMS_OF_INPUTS:
        for count in COUNTS:
            inputs = tuple(
                some(getattr(torch, dtype), count, 100 * count + i) for i in range(num_inputs)
            )
            for in_place in (None, number % num_inputs):
                scale = SCALES[number % len(SCALES) if dtype != "bool" else 0]
                yield Case(op, inputs, scale, in_place, number % 4)
                number += 1


BITWISE = {"Band": torch.bitwise_and, "Bor": torch.bitwise_or, "Bxor": torch.bitwise_xor}


def ops_of(dtype: str) -> tuple[str, ...]:
    return oracles.ops_of(dtype) + (() if dtype in FLOATS else tuple(BITWISE))


def combined(op: str, a: Tensor, b: Tensor) -> Tensor:
    if op in BITWISE:
        return BITWISE[op](a, b)
    if a.dtype == torch.bool:
        return a | b if op in ("Sum", "Max") else a & b
    if op in ("Min", "Max"):
        return torch.where((a != a) | ((a < b) if op == "Min" else (a > b)), a, b)
    return a * b if op == "Product" else a + b


def scaled(x: Tensor, factor: float) -> Tensor:
    """torch's own `factor * tensor`; integers by way of float64, cut toward zero and to int64."""
    if factor == 1.0:
        return x
    if x.dtype.is_floating_point:
        return factor * x
    cut = (factor * x.double()).trunc().nan_to_num(0.0, float("inf"), -float("inf"))
    whole = torch.where(cut.abs() < 2.0**63, cut, torch.zeros_like(cut)).long()
    whole[cut >= 2.0**63] = torch.iinfo(torch.int64).max
    whole[cut <= -(2.0**63)] = torch.iinfo(torch.int64).min
    return whole.to(x.dtype)


def expected(case: Case) -> Tensor:
    dtype = case.inputs[0].dtype
    prescale, divisor, postscale = case.scale
    factors = case.factors or (1.0,) * len(case.inputs)
    parts = [
        scaled(x.float() if dtype in SIXTEEN else x, prescale * factor)
        for x, factor in zip(case.inputs, factors, strict=True)
    ]
    result = parts[0]
    for part in parts[1:]:
        result = combined(case.op, result, part)
    if dtype.is_floating_point:
        return scaled(result, postscale / divisor).to(dtype)
    if divisor != 1:
        result = torch.div(result.long(), divisor, rounding_mode="trunc").to(dtype)
    return scaled(result, postscale)


def bits(x: Tensor) -> Tensor:
    """Which NaN it is, is left open."""
    if x.dtype.is_floating_point:
        x = torch.where(x != x, torch.full_like(x, float("nan")), x)
    return x.view(torch.uint8)


def wrong(got: Tensor, case: Case) -> list[str]:
    right = expected(case)
    if torch.equal(bits(got), bits(right)):
        return []
    itemsize = right.dtype.itemsize
    at = int((bits(got) != bits(right)).nonzero()[0]) // itemsize
    given = [x[at].item() for x in case.inputs]
    return [f"{case}: [{at}] of {given} is {got[at].item()}, not {right[at].item()}"]


def guarded(x: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """A copy that begins `offset` elements after a cache line, and the memory around it."""
    memory = torch.full(((len(x) + 8) * x.dtype.itemsize + 3 * GUARD,), 0xA5, dtype=torch.uint8)
    begin = -memory.data_ptr() % GUARD + GUARD + offset * x.dtype.itemsize
    copy = memory[begin : begin + len(x) * x.dtype.itemsize].view(x.dtype)
    return copy.copy_(x), memory


def run_here(variant: str, case: Case) -> tuple[Tensor, bool]:
    """The result, and whether the memory around it is as it was."""
    inputs = [guarded(x, case.offset)[0] for x in case.inputs]
    given = case.inputs[0] if case.in_place is None else inputs[case.in_place]
    output, memory = guarded(given, case.offset)
    if case.in_place is not None:
        inputs[case.in_place] = output
    before = memory.clone()
    _core.reduce(
        variant,
        getattr(_core, str(output.dtype).removeprefix("torch.").upper()),
        getattr(_core, case.op.upper()),
        output.data_ptr(),
        tuple(x.data_ptr() for x in inputs),
        len(output),
        *case.scale,
        case.factors,
    )
    begin = output.data_ptr() - memory.data_ptr()
    end = begin + len(output) * output.dtype.itemsize
    kept = torch.equal(memory[:begin], before[:begin]) and torch.equal(memory[end:], before[end:])
    return output, kept


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["Sum", "Average", "Min", "Max", "Product", *BITWISE])
def test_every_variant_gives_the_bits_of_the_oracle(dtype, op):
    problems = []
    for case in cases(dtype, op) if op in ops_of(dtype) else ():
        for variant in _core.kernel_variants():
            got, kept = run_here(variant, case)
            problems += [f"{variant}: {text}" for text in wrong(got, case)]
            problems += [] if kept else [f"{variant}: {case} wrote beside its output"]
    assert problems == []


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_variant_multiplies_each_input_by_its_own_factor(dtype):
    problems = []
    for number, case in enumerate(cases(dtype, "Sum")):
        drawn = (64.0, 1 / 3, 0.0, 1e-9, 1e15, 1.0, 77.0, 0.1)
        factors = tuple(drawn[(number + i) % len(drawn)] for i in range(len(case.inputs)))
        weighted = replace(case, factors=factors)
        for variant in _core.kernel_variants():
            got, kept = run_here(variant, weighted)
            problems += [f"{variant}: {text}" for text in wrong(got, weighted)]
            problems += [] if kept else [f"{variant}: {weighted} wrote beside its output"]
    assert problems == []


@pytest.mark.parametrize("dtype", FLOATS)
def test_denormals_are_kept_in_a_thread_that_flushes_them(dtype):
    tiny = torch.finfo(getattr(torch, dtype)).smallest_normal
    given = torch.tensor([tiny, tiny / 2, -tiny / 4] * 50, dtype=getattr(torch, dtype))
    plain = Case("Sum", (given, -given / 2, given / 4), (1.0, 1, 1.0), None, 0)
    averaged = Case("Sum", (given, -given / 2, given / 4), (0.8, 3, 1.0), None, 0)
    assert 0 < expected(plain)[0] < tiny
    results = []
    torch.set_flush_denormal(True)
    try:
        for case in (plain, averaged):
            results += [(run_here(variant, case)[0], case) for variant in _core.kernel_variants()]
    finally:
        torch.set_flush_denormal(False)
    assert [text for got, case in results for text in wrong(got, case)] == []


def tree_of(num_inputs: int) -> bytes:
    """The sums of a tree over so many inputs that are complete with each of them."""
    if num_inputs == 1:
        return b"\0"
    middle = 1 << (num_inputs - 1).bit_length() - 1
    both = tree_of(middle) + tree_of(num_inputs - middle)
    return both[:-1] + bytes([both[-1] + 1])


@pytest.mark.parametrize(
    ("dtype", "to_dtype"),
    [
        *((dtype, dtype) for dtype in FLOATS),
        *((dtype, "float32") for dtype in ("float16", "bfloat16")),
        *(("float32", dtype) for dtype in ("float16", "bfloat16")),
    ],
)
def test_every_variant_adds_up_along_a_tree(dtype, to_dtype):
    numbers = [getattr(_core, each.upper()) for each in (dtype, to_dtype)]
    problems = []
    for op, count, num_inputs in itertools.product(
        ("Sum", "Product", "Min", "Max"), (0, 1, 63, 64, 129, 515), (1, 2, 4, 5, 7, 13)
    ):
        inputs = [
            guarded(some(getattr(torch, dtype), count, 100 * count + i), i % 3)[0]
            for i in range(num_inputs)
        ]
        scale = SCALES[(count + num_inputs) % len(SCALES)]
        total = sum_tree.combined(
            op, [scaled(x.float() if x.dtype in SIXTEEN else x, scale[0]) for x in inputs]
        )
        right = scaled(total, scale[2] / scale[1]).to(getattr(torch, to_dtype))
        for variant in _core.kernel_variants():
            output, memory = guarded(torch.zeros_like(right), num_inputs % 3)
            before = memory.clone()
            _core.reduce_tree(
                *(variant, *numbers, getattr(_core, op.upper()), output.data_ptr()),
                *(tuple(x.data_ptr() for x in inputs), tree_of(num_inputs), count, *scale),
            )
            if not torch.equal(bits(output), bits(right)):
                problems.append(f"{variant}: {op} of {num_inputs} x {dtype}[{count}]")
            output.zero_()
            before_output = output.data_ptr() - memory.data_ptr()
            before[before_output : before_output + output.nbytes] = 0
            if not torch.equal(memory, before):
                problems.append(f"{variant}: {op} of {num_inputs} wrote beside its output")
    assert problems == []


@pytest.mark.parametrize("merges", [b"\0\0", b"\0\2", b"\1\0", b"\0"])
def test_a_tree_that_is_none_is_refused(merges):
    with pytest.raises(ValueError, match="reduce_tree: an argument is out of its range"):
        _core.reduce_tree(
            *("baseline", _core.FLOAT32, _core.FLOAT32, _core.SUM, 0, (0, 0), merges, 0),
            *(1.0, 1, 1.0),
        )


def test_the_variants_end_with_the_one_for_any_cpu_and_begin_with_the_one_in_use():
    variants = _core.kernel_variants()
    assert variants[-1] == "baseline"
    assert variants[0] == _core.cpu_features()
    with pytest.raises(ValueError, match="no such variant"):
        _core.reduce("mmx", _core.FLOAT32, _core.SUM, 0, (0,), 0, 1.0, 1, 1.0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", BITWISE)
def test_bitwise_ops_refuse_floats(dtype, op):
    number = getattr(_core, dtype.upper())
    with pytest.raises(ValueError, match="no such variant, dtype, op"):
        _core.reduce("baseline", number, getattr(_core, op.upper()), 0, (0,), 0, 1.0, 1, 1.0)


# ---- other architectures ----


def encoded(case: Case) -> bytes:
    x = case.inputs[0]
    head = struct.pack(
        "7qdqd",
        getattr(_core, str(x.dtype).removeprefix("torch.").upper()),
        getattr(_core, case.op.upper()),
        len(case.inputs),
        len(x),
        x.dtype.itemsize,
        -1 if case.in_place is None else case.in_place,
        case.offset * x.dtype.itemsize,
        *case.scale,
    )
    return head + b"".join(given.view(torch.uint8).numpy().tobytes() for given in case.inputs)


@pytest.fixture(scope="module")
def arm_driver(tmp_path_factory):
    for command in (CROSS_COMPILER, EMULATOR):
        if not shutil.which(command):
            lacking(f"{command} is not installed: the kernels for ARM are not tested")
    driver = tmp_path_factory.mktemp("kernels") / "driver"
    # As setup.py compiles them.
    options = ["-std=c11", "-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-static"]
    sources = [DRIVER, *sorted(CORE.glob("kernels/reduce*.c"))]
    subprocess.run(
        [CROSS_COMPILER, *options, f"-I{CORE}", "-o", driver, *sources], check=True, timeout=120
    )
    return [EMULATOR, str(driver)]


@pytest.mark.wide
def test_arm_has_its_variant(arm_driver):
    said = subprocess.run(arm_driver, check=True, capture_output=True, timeout=60, text=True)
    assert said.stdout.split() == ["neon", "baseline"]


@pytest.mark.wide
@pytest.mark.parametrize("variant", ["neon", "baseline"])
def test_every_variant_of_arm_gives_the_bits_of_the_oracle(arm_driver, variant):
    every = [case for dtype in DTYPES for op in ops_of(dtype) for case in cases(dtype, op)]
    given = b"".join(map(encoded, every))
    run = subprocess.run(
        [*arm_driver, variant], check=True, input=given, capture_output=True, timeout=120
    )
    results = bytearray(run.stdout)
    problems, at = [], 0
    for case in every:
        x = case.inputs[0]
        size_bytes = len(x) * x.dtype.itemsize
        if size_bytes:
            got = torch.frombuffer(results, dtype=torch.uint8, offset=at, count=size_bytes)
            problems += wrong(got.view(x.dtype), case)
        at += size_bytes
    assert at == len(results)
    assert problems == []
