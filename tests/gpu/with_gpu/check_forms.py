"""Every form of the collectives on CUDA tensors gives what it gives in host memory."""

import torch

import hvdlite as hvd
from tests.core.oracles import DTYPES, case_of, mismatch, ops_of
from tests.gpu.forms import CALLS, ranks_values


def to_gpu(tensor):
    return tensor.cuda()


def forms():
    problems = []
    for form, call in CALLS.items():
        expected = call(lambda tensor: tensor, f"{form} on the host")
        got = call(to_gpu, form)
        pairs = zip([got], [expected], strict=True)
        if isinstance(expected, (list, tuple)):
            pairs = zip(got, expected, strict=True)
        for a, b in pairs:
            # The splits that come back with an alltoall are where the given ones were.
            if not a.is_cuda and form != "alltoall with splits":
                problems.append(f"{form}: the result is on {a.device}")
            if a.dtype != b.dtype or not torch.allclose(a.cpu(), b):
                problems.append(f"{form}: {a} for {b}")
    return problems


def sparse():
    given = ranks_values(4, 2)
    results = [
        hvd.sparse_allreduce_async(to(given).to_sparse(), name, hvd.Sum)().to_dense().cpu()
        for to, name in ((to_gpu, "sparse"), (lambda tensor: tensor, "sparse on the host"))
    ]
    return [] if torch.equal(*results) else [f"sparse: {results}"]


def dtypes_and_ops():
    problems = []
    for dtype in DTYPES:
        for op in ops_of(dtype):
            for count in (0, 1, 3001):
                given, expected = case_of(dtype, op, hvd.rank(), hvd.size(), count)
                name = f"{dtype} {op} {count}"
                got = hvd.allreduce(given.cuda(), name=name, op=getattr(hvd, op)).cpu()
                text = mismatch(got, expected, exact=dtype not in ("float16", "bfloat16"))
                problems += [f"{name}: {text}"] if text else []
    return problems


def disagreement():
    """An error on every rank, and the lane goes on."""
    if hvd.size() == 1:
        return []
    try:
        hvd.allreduce(torch.ones(3 + (hvd.rank() == 1), device="cuda"), name="bad")
    except hvd.HorovodInternalError as error:
        text = str(error)
    else:
        return ["no error"]
    problems = [] if "float32[4]" in text else [text]
    given = torch.ones(3)
    try:
        hvd.allreduce(given.cuda() if hvd.rank() else given, name="elsewhere")
        problems.append("no error")
    except hvd.HorovodInternalError as error:
        problems += [] if "a tensor in host memory" in str(error) else [str(error)]
    good = hvd.allreduce(torch.ones(3, device="cuda"), op=hvd.Sum)
    return problems + ([] if good.tolist() == [hvd.size()] * 3 else [f"afterwards {good}"])


def mixed():
    """Tensors here and there, in flight at once."""
    handles = [
        hvd.allreduce_async(torch.full((i + 1,), float(i), device=where), op=hvd.Sum)
        for i in range(30)
        for where in ("cpu", "cuda")
    ]
    order = list(range(len(handles)))
    if hvd.rank() % 2:
        order.reverse()
    results = {n: hvd.synchronize(handles[n]) for n in order}
    return [
        f"{n}: {result}"
        for n, result in results.items()
        if not result.eq(n // 2 * hvd.size()).all() or result.is_cuda != bool(n % 2)
    ]


hvd.init()
found = {check.__name__: check() for check in (forms, sparse, dtypes_and_ops, disagreement, mixed)}
assert not any(found.values()), found
