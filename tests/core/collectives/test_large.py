"""Tensors of more bytes than a signed 32-bit number counts."""

import pytest
import torch

import hvdlite as hvd

BYTES = (1 << 31) + 3
STEP = 1 << 28


def reduce_more_than_2_gib():
    hvd.init()
    # A pattern of an odd length, so that bytes that went astray by a power of two show.
    pattern = torch.arange(251, dtype=torch.uint8)
    tensor = (pattern + hvd.rank()).repeat(BYTES // 251 + 1)[:BYTES].contiguous()
    hvd.allreduce_(tensor, op=hvd.Sum)
    size = hvd.size()
    expected = (pattern * size + size * (size - 1) // 2).repeat(STEP // 251 + 2)
    wrong = []
    for begin in range(0, BYTES, STEP):
        piece = tensor[begin : begin + STEP]
        if not torch.equal(piece, expected[begin % 251 :][: piece.numel()]):
            wrong.append(begin)
    assert not wrong


@pytest.mark.timeout(240)
@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1")
@pytest.mark.wide
@pytest.mark.above_mpi  # a message is a segment at most
def test_a_tensor_of_more_than_2_to_the_31_bytes_is_reduced(world):
    world.run(reduce_more_than_2_gib, limit_s=200)
