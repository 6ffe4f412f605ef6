"""Every form of the collectives on CUDA tensors gives what it gives in host memory."""

import torch

import hvdlite as hvd
from tests.core.oracles import DTYPES, case_of, mismatch, ops_of
from tests.gpu.forms import CALLS, ranks_values
from tests.gpu.with_gpu.checking import DEVICE, check, error_of, needs, run_checks, start

# They return the received splits too, which are where the given ones were: on the host.
WITH_SPLITS = ("alltoall with splits", "alltoall_async")


def to_gpu(tensor):
    return tensor.to(DEVICE)


@check
def every_form_gives_what_it_gives_on_the_host():
    for form, call in CALLS.items():
        expected = call(lambda tensor: tensor, f"{form} on the host")
        got = call(to_gpu, form)
        pairs = [(got, expected)]
        if isinstance(expected, (list, tuple)):
            pairs = list(zip(got, expected, strict=True))
        where = [DEVICE] * len(pairs)
        if form in WITH_SPLITS:
            where = [DEVICE, "cpu"]
        for (a, b), device in zip(pairs, where, strict=True):
            assert a.device.type == device, (form, a.device)
            assert a.dtype == b.dtype, (form, a.dtype)
            assert torch.allclose(a.cpu(), b), (form, a, b)


@check
def a_sparse_tensor_gives_what_it_gives_on_the_host():
    given = ranks_values(4, 2)
    results = [
        hvd.sparse_allreduce_async(to(given).to_sparse(), name, hvd.Sum)().to_dense().cpu()
        for to, name in ((to_gpu, "sparse"), (lambda tensor: tensor, "sparse on the host"))
    ]
    assert torch.equal(*results), results


@check
def every_dtype_and_op_gives_the_closed_form():
    for dtype in DTYPES:
        for op in ops_of(dtype):
            for count in (0, 1, 3001):
                given, expected = case_of(dtype, op, hvd.rank(), hvd.size(), count)
                name = f"{dtype} {op} {count}"
                got = hvd.allreduce(to_gpu(given), name=name, op=getattr(hvd, op)).cpu()
                text = mismatch(got, expected, exact=dtype not in ("float16", "bfloat16"))
                assert not text, f"{name}: {text}"


@check
def a_disagreement_is_an_error_on_every_rank_and_the_next_operation_works():
    needs(hvd.size() > 1, "several ranks")
    text = error_of(lambda: hvd.allreduce(to_gpu(torch.ones(3 + (hvd.rank() == 1)))))
    assert "float32[4]" in text, text
    if DEVICE != "cpu":
        given = torch.ones(3, device=DEVICE if hvd.rank() else "cpu")
        text = error_of(lambda: hvd.allreduce(given))
        assert "a tensor in host memory" in text, text
    good = hvd.allreduce(to_gpu(torch.ones(3)), op=hvd.Sum)
    assert good.tolist() == [hvd.size()] * 3, good


@check
def tensors_on_the_host_and_the_device_are_in_flight_at_once():
    handles = [
        hvd.allreduce_async(torch.full((i + 1,), float(i), device=where), op=hvd.Sum)
        for i in range(30)
        for where in ("cpu", DEVICE)
    ]
    order = list(range(len(handles)))
    if hvd.rank() % 2:
        order.reverse()
    results = {n: hvd.synchronize(handles[n]) for n in order}
    for n, result in results.items():
        assert result.eq(n // 2 * hvd.size()).all(), (n, result)
        assert result.device.type == (DEVICE if n % 2 else "cpu"), (n, result.device)


start()
run_checks()
