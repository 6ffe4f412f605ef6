"""Plans with owners, as the tests of ranks make them: one call each, and values whose sums depend
on their order."""

import torch

import hvdlite as hvd
from hvdlite import _core
from hvdlite.world import world as worlds

TO_OWNERS = {"all": _core.PLAN_TO_OWNERS, "host": _core.PLAN_TO_HOST_OWNERS}
UNITE = {"all": _core.PLAN_UNITE, "host": _core.PLAN_UNITE_ON_HOST}


def engine():
    return worlds.current().team.engine


def number_of(dtype):
    return getattr(_core, str(dtype).removeprefix("torch.").upper())


def plan_of(name, form, tensor, op=_core.SUM, prescale=1.0, postscale=1.0, output=None, **cut):
    to = tensor if output is None else output
    return engine().plan(
        *(name, number_of(tensor.dtype), op, tensor.data_ptr(), to.data_ptr(), tensor.numel()),
        *(prescale, postscale, (tensor, to)),
        form=form,
        **cut,
    )


def run(name, form, tensor, *factors, **options):
    """The text of its failure, or None."""
    return plan_of(name, form, tensor, *factors, **options).start(tensor).wait()


def own_of(tensor, form, *cut):
    return engine().owned(tensor.numel(), number_of(tensor.dtype), form, hvd.rank(), *cut)


def given(rank, count, dtype):
    """Sums of these depend on their order."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(count, generator=generator, dtype=torch.float64)
    return (values * 10.0 ** (values * 2).round().clamp(-3, 3)).to(dtype)


def bits(tensor):
    return tensor.view(torch.uint8).tolist()
