"""A network in memory for the core's own exchanges between up to 64 hosts (simulation.c), and the
cases that tests of their results and of their costs share."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path

import pytest
import torch

from hvdlite import _core
from tests.harness.compiled import compiled, linked, sources

RING, DIRECT, DOUBLING, GATHER, CHAIN, PAIRWISE, HALF_RING, HALF_DIRECT = range(8)
HALVES = {"half of the ring": HALF_RING, "half of the direct exchange": HALF_DIRECT}
ALLREDUCES = {"ring": RING, "direct": DIRECT, "recursive doubling": DOUBLING}
HOSTS = (*range(2, 18), 24, 31, 32, 33, 63, 64)
FEW_HOSTS = (2, 3, 4, 7, 16, 33, 64)
ACTIVE = 4  # steps of a pairwise exchange that are under way at once
ANSWERS = (
    "well",
    "no memory",
    "stuck",
    "a receive of another size",
    "a message without receiver",
    "a buffer that was written before its message had left",
)

by_algorithm = pytest.mark.parametrize("algorithm", ALLREDUCES.values(), ids=ALLREDUCES)
by_half = pytest.mark.parametrize("half", HALVES.values(), ids=HALVES)
by_hosts = pytest.mark.parametrize("hosts", HOSTS)
by_few_hosts = pytest.mark.parametrize("hosts", FEW_HOSTS)


def library(folder: Path) -> ctypes.CDLL:
    parts = [
        "base/schedule",
        "net/exchange",
        "net/direct",
        "net/pairwise",
        "net/streams",
        "net/wire",
    ]
    own = Path(__file__).with_name("simulation.c")
    objects = map(compiled, [own, *sources(*parts, "kernels/reduce*")])
    return ctypes.CDLL(str(linked(folder / "simulation.so", objects, "-shared")))


class Network:
    """What went over it: `messages` and `bytes` by sender and receiver; and in how many `ticks`, in
    each of which a message may go from every host to every other one."""

    def __init__(self, simulation: ctypes.CDLL, hosts: int) -> None:
        self._simulation = simulation
        self.hosts = hosts
        self.messages = torch.zeros((hosts, hosts), dtype=torch.int64)
        self.bytes = torch.zeros((hosts, hosts), dtype=torch.int64)
        self.ticks = 0

    def run(
        self,
        algorithm,
        buffers,
        inputs=(),
        tables=(None, None, None, None),
        op=_core.SUM,
        divisor=1,
        root=0,
        segment_bytes=64,
        seed=0,
    ):
        """In place over `buffers`, one of each host. seed 0: everything in step."""
        dtype = getattr(_core, str(buffers[0].dtype).removeprefix("torch.").upper())
        ticks = ctypes.c_uint64()
        addresses = ctypes.c_void_p * self.hosts
        answer = self._simulation.simulate(
            *(algorithm, self.hosts, dtype, op, ctypes.c_int64(divisor)),
            *(ctypes.c_size_t(buffers[0].numel()), root, ctypes.c_size_t(segment_bytes)),
            addresses(*(buffer.data_ptr() for buffer in buffers)),
            addresses(*(given.data_ptr() for given in inputs or buffers)),
            (ctypes.c_void_p * 4)(
                *(table.data_ptr() if table is not None else 0 for table in tables)
            ),
            ctypes.c_uint64(seed),
            *(ctypes.c_void_p(counted.data_ptr()) for counted in (self.messages, self.bytes)),
            ctypes.byref(ticks),
        )
        assert ANSWERS[answer] == "well"
        self.ticks = ticks.value


def rounds(hosts):
    """log2 of the largest power of two, and how many hosts are beyond it."""
    whole = hosts.bit_length() - 1
    return whole, hosts - 2**whole


def random_floats(hosts, count, dtype=torch.float32):
    """Sums of these depend on their order."""
    generator = torch.Generator().manual_seed(hosts * 1000 + count)
    values = torch.randn((hosts, count), generator=generator, dtype=torch.float64)
    return list((values * 10.0 ** (values * 2).round()).to(dtype))


def cut(tensor, hosts):
    """The hosts' chunks: whole cache lines but for the last one, the first ones a line longer."""
    lines = tensor.split(64 // tensor.element_size())
    parts = torch.arange(len(lines)).tensor_split(hosts)
    return [torch.cat([tensor[:0], *(lines[line] for line in part)]) for part in parts]


def tables_of(sizes, item_bytes):
    sizes_bytes = item_bytes * torch.tensor(sizes)
    return None, None, sizes_bytes.cumsum(0) - sizes_bytes, sizes_bytes


def chunks_of_owners(hosts, count, item_bytes):
    """Host h owns the chunk that the ring's first half completes there: the next host's."""
    starts = [0, *itertools.accumulate(map(len, cut(torch.empty(count), hosts)))]
    owned = [(host + 1) % hosts for host in range(hosts)]
    begins = torch.tensor([item_bytes * starts[chunk] for chunk in owned])
    sizes = torch.tensor([item_bytes * (starts[chunk + 1] - starts[chunk]) for chunk in owned])
    return None, None, begins, sizes


def gather_case(hosts, sizes):
    """Buffers with the own part in place; offsets and sizes in bytes; the result."""
    sizes = torch.tensor(sizes)
    offsets = sizes.cumsum(0) - sizes
    whole = torch.arange(int(sizes.sum())).remainder(251).to(torch.uint8)
    buffers = [torch.zeros_like(whole) for _ in range(hosts)]
    for buffer, begin, size in zip(buffers, offsets.tolist(), sizes.tolist(), strict=True):
        buffer[begin : begin + size] = whole[begin : begin + size]
    return buffers, (None, None, offsets, sizes), whole


def pairwise_case(hosts, size_of):
    """Host a sends size_of(a, b) bytes to b, each 1 + (a * 16 + b) mod 250."""
    sent = torch.tensor([[size_of(a, b) for b in range(hosts)] for a in range(hosts)])
    tables = [each.contiguous() for each in (sent.cumsum(1) - sent, sent)]
    tables += [each.contiguous() for each in (sent.T.cumsum(1) - sent.T, sent.T)]

    def parts(pairs):
        values = [torch.full((size_of(a, b),), 1 + (a * 16 + b) % 250) for a, b in pairs]
        return torch.cat(values).to(torch.uint8)

    members = range(hosts)
    inputs = [parts((host, peer) for peer in members) for host in members]
    expected = [parts((peer, host) for peer in members) for host in members]
    return inputs, tables, expected, sent


WHOLES = {"ring": (RING, HALF_RING), "direct": (DIRECT, HALF_DIRECT)}
