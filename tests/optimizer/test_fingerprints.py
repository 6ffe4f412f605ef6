"""The bytes of tensors of any layout, and numbers that are others if one bit is another."""

import itertools
import zlib

import pytest
import torch

from hvdlite.optimizer.checks.fingerprints import bytes_of, digest, fingerprint, row_sums
from hvdlite.tensor_bytes import flat_bytes

LAYOUTS = {
    "one element of a column": lambda: torch.ones(1, 6)[:, 0],
    "one element, expanded": lambda: torch.ones(1).expand(4)[:1],
    "expanded": lambda: torch.tensor(1.0).expand(4),
    "no element": lambda: torch.ones(0, 6)[:, 0],
    "a number": lambda: torch.ones(3)[1],
    "a column": lambda: torch.arange(12.0).reshape(3, 4)[:, 1],
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).T,
    "from the middle": lambda: torch.arange(12.0)[3:7],
}


def of_bytes(number):
    return lambda tensor: number(bytes_of(tensor))


HASHES = {
    "fingerprint": of_bytes(fingerprint),
    "fingerprint on a device": of_bytes(lambda in_bytes: digest(row_sums(in_bytes).tolist())),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8])
def test_bytes_are_those_of_the_elements_in_their_order(make, dtype):
    tensor = make().to(dtype)
    found = flat_bytes(tensor)
    assert found.dtype == torch.uint8
    assert found.stride() == (1,)
    assert found.clone().view(dtype).tolist() == tensor.flatten().tolist()
    same = torch.tensor(tensor.tolist(), dtype=dtype)
    assert all(of(tensor) == of(same) for of in HASHES.values())


@pytest.mark.parametrize("of", HASHES.values(), ids=HASHES)
@pytest.mark.parametrize("count", [1, 7, (1 << 16) + 3, (1 << 22) + 5])
def test_a_hash_depends_on_every_bit_and_place(of, count):
    values = torch.randn(count)
    others = [-values, torch.zeros(count), -torch.zeros(count)]
    for place, bit in itertools.product({0, count // 2, count - 1}, (0, 31)):
        changed = values.clone()
        changed.view(torch.int32)[place] ^= -(1 << bit) if bit == 31 else 1 << bit
        others.append(changed)
    if count > 1:
        swapped = values.clone()
        swapped[[0, -1]] = values[[-1, 0]]
        others += [swapped, values.flip(0)]
    # One element's sign is its highest bit.
    different = {bytes(bytes_of(each).numpy()) for each in (values, *others)}
    assert len({of(each) for each in (values, *others)}) == len(different)
    assert of(values) == of(values.clone())


@pytest.mark.parametrize("of", HASHES.values(), ids=HASHES)
def test_every_flipped_bit_and_every_two_swapped_words_change_a_fingerprint(of):
    values = torch.randn(8)
    values[3] = values[5]
    found = {of(values)}
    in_bytes = values.view(torch.uint8)
    for byte, bit in itertools.product(range(32), range(8)):
        in_bytes[byte] ^= 1 << bit
        found.add(of(values))
        in_bytes[byte] ^= 1 << bit
    assert len(found) == 1 + 32 * 8
    for i, j in itertools.combinations(range(8), 2):
        values[[i, j]] = values[[j, i]]
        assert (of(values) in found) == ((i, j) == (3, 5))
        values[[i, j]] = values[[j, i]]


def numbers(index):
    """SplitMix64's finalizer, made odd."""
    mixed = (index + 1) * 0x9E3779B97F4A7C15 % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return (mixed ^ mixed >> 31) | 1


@pytest.mark.parametrize("size", [0, 1, 4, 4095, 4096, 12301])
def test_a_fingerprint_is_the_sum_that_its_module_says(size):
    """Hosts of another kind compute the same."""
    data = torch.randint(256, (size,), dtype=torch.uint8)
    words = [int.from_bytes(data[i : i + 4].tolist(), "little") for i in range(0, size, 4)]
    whole = words[: size // 4]
    rows = [whole[i : i + 1024] for i in range(0, len(whole), 1024)]
    sums = [sum(word * (numbers(i) % 2**32) for i, word in enumerate(row)) for row in rows]
    sums += words[size // 4 :]
    assert fingerprint(data) == sum(each * numbers(i) for i, each in enumerate(sums)) % 2**64


def test_in_a_fingerprint_each_byte_counts_in_another_way_at_any_address():
    """12,301 bytes are three rows and some bytes more."""
    data = torch.zeros(12_304, dtype=torch.uint8)[3:]
    found = set()
    for index in range(len(data)):
        data[index] = 1
        found.add(fingerprint(data))
        data[index] = 0
    assert len(found) == len(data)
    data.random_()
    assert fingerprint(data) == fingerprint(data.clone())


def test_one_other_fingerprint_or_two_swapped_ones_change_the_digest():
    numbers = [zlib.crc32(bytes([i])) for i in range(50)]
    for i, bit in itertools.product(range(50), range(64)):
        changed = [*numbers[:i], numbers[i] ^ (1 << bit), *numbers[i + 1 :]]
        assert digest(changed) != digest(numbers)
    assert len({digest(order) for order in itertools.permutations(numbers[:5])}) == 120


@pytest.mark.parametrize("of", HASHES.values(), ids=HASHES)
def test_there_is_a_hash_of_every_dtype_and_shape(of):
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.bool):
        for shape in ((), (3,), (2, 3), (2, 0)):
            ones = torch.ones(shape, dtype=dtype)
            assert of(ones) == of(ones.clone())
            assert of(ones) != of(torch.zeros_like(ones)) or not ones.numel()
    numbers = torch.randn(4, dtype=torch.complex64)
    assert of(numbers.conj()) == of(numbers.conj().resolve_conj()) != of(numbers)
    nan = torch.tensor([torch.nan])
    assert of(nan) == of(nan.clone())


def test_what_has_no_values_to_read_is_left_out():
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(4)
    for unreadable in (torch.ones(4, device="meta"), torch.ones(4, 4).to_sparse(), freed, fake):
        assert bytes_of(unreadable) is None
