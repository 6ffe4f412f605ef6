"""Context parallel: each rank has a part of every sequence, and keys and values go round.

torch 2.13's `context_parallel` replaces CUDA's attention kernels only. Here its ring calls the
kernel of CPUs, in an autograd function as DTensor would.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.nn.functional import scaled_dot_product_attention

from tests.distributed.training import in_a_group

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
SEQUENCE = 2


def backward_kernel(grad_out, query, key, value, out, logsumexp, is_causal):
    return BACKWARD(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(context, query, key, value):
        group = dist.group.WORLD
        out, logsumexp = ring._templated_ring_attention(
            group, SEQUENCE, FORWARD, query, key, value, is_causal=True, dropout_p=0.0
        )
        context.save_for_backward(query, key, value, out, logsumexp)
        return out

    @staticmethod
    def backward(context, grad):
        return ring._templated_ring_attention_backward(
            dist.group.WORLD,
            SEQUENCE,
            backward_kernel,
            grad.contiguous(),
            "grad_out",
            *context.saved_tensors,
            is_causal=True,
        )


@in_a_group
def attends_in_a_ring(rank, size, rotate):
    ring._cp_options.convert_to_f32 = False
    ring._cp_options.enable_load_balance = False
    ring.set_rotate_method(rotate)
    init_device_mesh("cpu", (size,))
    torch.manual_seed(10)
    wholes = [
        torch.randn(2, 3, 4 * size, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)
    ]
    wanted = scaled_dot_product_attention(*wholes, is_causal=True)
    wanted.square().sum().backward()

    def own(whole):
        return whole.detach().chunk(size, SEQUENCE)[rank].contiguous()

    parts = [own(whole).requires_grad_() for whole in wholes]
    found = RingAttention.apply(*parts)
    found.square().sum().backward()
    torch.testing.assert_close(found.detach(), own(wanted), rtol=1e-9, atol=1e-12)
    for part, whole in zip(parts, wholes, strict=True):
        torch.testing.assert_close(part.grad, own(whole.grad), rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(2, 4)
@pytest.mark.wide_in(4)
@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
def test_ring_attention_and_its_gradients_are_those_of_one_process(world, tmp_path, rotate):
    world.run(attends_in_a_ring, tmp_path, rotate)
