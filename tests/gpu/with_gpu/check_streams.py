"""What is queued on a GPU stays in order, and the host waits for nothing but the agreement."""

import os

import torch

import hvdlite as hvd
from tests.gpu.with_gpu.checking import DEVICE, ON_GPU, check, needs, run_checks, start

# About a second on a GPU of these years.
CYCLES = 1_500_000_000


# Staged, the host waits for the copy.
IS_STAGED = os.environ.get("HVDLITE_GPU_COLLECTIVES") == "staged"


@check
def an_input_may_be_filled_after_its_collective_was_started():
    needs(ON_GPU, "a GPU")
    # The first one sets NCCL up, for which the host waits.
    hvd.allreduce(torch.zeros(1, device=DEVICE))
    late = torch.cuda.Stream()
    other = torch.cuda.Stream()
    tensor = torch.zeros(100_000, device=DEVICE)
    late.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(late):
        torch.cuda._sleep(CYCLES)
        tensor.fill_(float(hvd.rank() + 1))
        filled = torch.cuda.Event()
        filled.record()
        handle = hvd.allreduce_async(tensor, name="late", op=hvd.Sum)
    with torch.cuda.stream(other):
        result = hvd.synchronize(handle)
        assert IS_STAGED or not filled.query(), "the host has waited for the device"
        doubled = result * 2
    torch.cuda.current_stream().wait_stream(other)
    expected = hvd.size() * (hvd.size() + 1)
    assert doubled.eq(expected).all(), f"{doubled[:3]} for {expected}"


@check
def inputs_and_results_may_be_dropped_at_once_and_their_memory_reused():
    for i in range(100):
        handles = [
            hvd.allreduce_async(torch.full((50_000,), float(i + n), device=DEVICE), op=hvd.Sum)
            for n in range(4)
        ]
        for _ in range(8):
            torch.full((50_000,), -1.0, device=DEVICE)
        for n, handle in enumerate(handles):
            result = hvd.synchronize(handle)
            assert result.eq((i + n) * hvd.size()).all(), f"{i} {n}: {result[:3]}"


@check
def ranks_may_start_operations_in_opposite_orders():
    order = list(range(20))
    if hvd.rank() % 2:
        order.reverse()
    handles = {
        n: hvd.allreduce_async(torch.full((n + 1,), float(n), device=DEVICE), name=f"o{n}")
        for n in order
    }
    for n in order:
        assert hvd.synchronize(handles[n]).eq(n).all(), n


@check
def a_handle_may_be_polled():
    handle = hvd.allgather_async(torch.full((3,), float(hvd.rank()), device=DEVICE), name="polled")
    while not hvd.poll(handle):
        pass
    expected = [float(rank) for rank in range(hvd.size()) for _ in range(3)]
    assert hvd.synchronize(handle).tolist() == expected


@check
def an_operation_that_is_pending_at_the_end_is_launched_all_the_same():
    hvd.allreduce_async(torch.ones(1000, device=DEVICE), name="last")
    hvd.shutdown()
    hvd.init()


start()
run_checks()
