"""DistributedOptimizer on GPUs trains as one process does on the joined batch."""

import unittest

import torch
from torch import nn

import hvdlite as hvd
from tests.gpu.with_gpu.checking import DEVICE, ON_GPU, check, error_of, needs, run_checks, start
from tests.gpu.with_gpu.training import (
    assert_same,
    assert_trains_as_one_process,
    batch,
    everyones,
    loss_of,
    net,
    sgd,
    train,
    wrap,
)


@check
def sgd_trains_as_one_process():
    assert_trains_as_one_process()


@check
def fused_adamw_trains_as_one_process():
    assert_trains_as_one_process(lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True))


@check
def capturable_adam_trains_as_one_process():
    needs(ON_GPU, "a GPU")
    assert_trains_as_one_process(lambda params: torch.optim.Adam(params, capturable=True))


@check
def parts_of_the_optimizer_train_as_one_process():
    assert_trains_as_one_process(shard=True)


@check
def float16_on_the_wire_trains_nearly_so():
    assert_trains_as_one_process(tolerance=2e-3, compression=hvd.Compression.fp16)


@check
def bfloat16_on_the_wire_trains_nearly_so():
    assert_trains_as_one_process(tolerance=2e-2, compression=hvd.Compression.bf16)


@check
def a_compiled_model_trains_as_one_process():
    model, alone = net(), net()
    # On the CPU its C++ takes a minute to compile.
    compiled = torch.compile(model, backend="inductor" if ON_GPU else "aot_eager")
    train(model, wrap(model), [batch(hvd.rank())], forward=compiled)
    train(alone, sgd(alone.parameters()), everyones())
    assert_same(model, alone)


@check
def a_forward_in_a_cuda_graph_trains_as_one_process():
    needs(ON_GPU, "a GPU")
    model, alone = net(), net()
    optimizer = wrap(model)
    x, y = batch(hvd.rank())
    graph = torch.cuda.make_graphed_callables(model, (x.clone(),))
    train(model, optimizer, [(x, y)], forward=graph)
    train(alone, sgd(alone.parameters()), everyones())
    assert_same(model, alone)


@check
def weighted_batches_count_by_their_rows():
    model, alone = net(), net()
    optimizer = wrap(model)
    rows = [4 * rank + 3 for rank in range(hvd.size())]
    own = batch(hvd.rank(), rows[hvd.rank()])
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.set_weight(len(own[0]))
        loss_of(model, own).backward()
        optimizer.step()
    every = [batch(rank, count) for rank, count in enumerate(rows)]
    joined = tuple(torch.cat(parts) for parts in zip(*every, strict=True))
    train(alone, sgd(alone.parameters()), [joined], steps=3)
    assert_same(model, alone)


@check
def gradients_of_two_passes_are_added():
    model, alone = net(), net()
    optimizer, other = wrap(model, backward_passes_per_step=2), sgd(alone.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        other.zero_grad()
        for half in range(2):
            loss_of(model, batch(10 * half + hvd.rank())).backward()
            for rank in range(hvd.size()):
                (loss_of(alone, batch(10 * half + rank)) / hvd.size()).backward()
        optimizer.step()
        other.step()
    assert_same(model, alone)


@check
def reduced_gradients_are_clipped():
    model, alone = net(), net()

    def clip(net):
        return lambda: nn.utils.clip_grad_norm_(net.parameters(), 0.1)

    train(model, wrap(model), [batch(hvd.rank())], before_step=clip(model))
    train(alone, sgd(alone.parameters()), everyones(), before_step=clip(alone))
    assert_same(model, alone)


def scaled(model, optimizer, ranks):
    """Steps with GradScaler; in the second, rank 0 alone has infinite gradients."""
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**8)
    dtype = torch.float16 if ON_GPU else torch.bfloat16
    for step in range(4):
        optimizer.zero_grad()
        for rank in ranks:
            x, y = batch(rank, dtype=torch.float32)
            if step == 1 and rank == 0:
                x[0, 0] = float("inf")
            with torch.autocast(DEVICE, dtype=dtype):
                out = model(x).float()
            scaler.scale((out - y).square().mean() / len(ranks)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


@check
def grad_scaler_skips_a_step_on_every_rank_if_one_has_infinite_gradients():
    model, alone = net(torch.float32), net(torch.float32)
    scale = scaled(model, wrap(model), [hvd.rank()])
    expected = scaled(alone, sgd(alone.parameters()), range(hvd.size()))
    assert scale == expected == 2.0**7, (scale, expected)
    # Per batch the same arithmetic; only the mean of float32 gradients is made in another order.
    assert_same(model, alone, 1e-5)


@check
def a_parameter_that_one_rank_does_not_use_gets_the_others_gradient():
    models = [net(), net()]
    extras = [nn.Linear(32, 8, dtype=torch.float64, device=DEVICE) for _ in models]
    for extra in extras:
        nn.init.constant_(extra.weight, 0.1)
        nn.init.zeros_(extra.bias)
    model, alone = (nn.ModuleList(pair) for pair in zip(models, extras, strict=True))
    optimizer, other = wrap(model), sgd(alone.parameters())

    def loss(both, rank):
        x, y = batch(rank)
        out = both[0](x) + (both[1](x) if rank == 0 else 0.0)
        return (out - y).square().mean()

    for _ in range(3):
        optimizer.zero_grad()
        other.zero_grad()
        loss(model, hvd.rank()).backward()
        for rank in range(hvd.size()):
            (loss(alone, rank) / hvd.size()).backward()
        optimizer.step()
        other.step()
    assert_same(model, alone)


@check
def sparse_gradients_train_as_one_process():
    def embedding():
        torch.manual_seed(0)
        return nn.Embedding(50, 8, sparse=True, dtype=torch.float64).to(DEVICE)

    def rows(rank):
        return torch.tensor([rank, 30, 37], device=DEVICE)

    model, alone = embedding(), embedding()
    optimizer = wrap(model, torch.optim.SparseAdam)
    other = torch.optim.SparseAdam(alone.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        other.zero_grad()
        model(rows(hvd.rank())).square().sum().backward()
        every = torch.cat([rows(rank) for rank in range(hvd.size())])
        (alone(every).square().sum() / hvd.size()).backward()
        optimizer.step()
        other.step()
    assert_same(model, alone)


@check
def channels_last_parameters_train_as_one_process():
    def convolution():
        torch.manual_seed(0)
        return nn.Conv2d(3, 8, 3, dtype=torch.float64).to(DEVICE, memory_format=torch.channels_last)

    def images(rank):
        generator = torch.Generator().manual_seed(rank)
        values = torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64)
        return values.to(DEVICE, memory_format=torch.channels_last)

    model, alone = convolution(), convolution()
    train(model, wrap(model), [(images(hvd.rank()), torch.tensor(0.5, device=DEVICE))])
    every = [(images(rank), torch.tensor(0.5, device=DEVICE)) for rank in range(hvd.size())]
    train(alone, sgd(alone.parameters()), every)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert_same(model, alone)


@check
def two_optimizers_in_one_backward_train_as_one_process():
    def pair():
        return nn.ModuleDict({"a": net(), "b": net()})

    def forward(both):
        return lambda x: both["a"](x) + 2 * both["b"](x)

    def optimizers(both, wrapped):
        made = []
        for name, make in (("a", sgd), ("b", torch.optim.Adam)):
            inner = make(both[name].parameters())
            named = [(f"{name}.{key}", p) for key, p in both[name].named_parameters()]
            made.append(hvd.DistributedOptimizer(inner, named) if wrapped else inner)
        return made

    def steps(both, used, batches):
        for _ in range(3):
            for optimizer in used:
                optimizer.zero_grad()
            for one in batches:
                (loss_of(forward(both), one) / len(batches)).backward()
            for optimizer in used:
                optimizer.step()

    model, alone = pair(), pair()
    steps(model, optimizers(model, True), [batch(hvd.rank())])
    steps(alone, optimizers(alone, False), everyones())
    assert_same(model, alone)


@check
def optimizer_state_is_broadcast():
    model = net()
    optimizer = sgd(model.parameters())
    train(model, optimizer, [batch(hvd.rank())])
    hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=hvd.size() - 1)
    alone = net()
    other = sgd(alone.parameters())
    train(alone, other, [batch(hvd.size() - 1)])
    assert_same(model, alone, 0.0)
    for ours, theirs in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert torch.equal(ours["momentum_buffer"], theirs["momentum_buffer"])


@check
def parameters_and_state_are_found_equal_after_training():
    model = net()
    optimizer = wrap(model)
    train(model, optimizer, [batch(hvd.rank())])
    assert hvd.check_parameters(model, optimizer) == []


@check
def parameters_that_differ_are_named():
    needs(hvd.size() > 1, "several ranks")
    model = net()
    with torch.no_grad():
        model[2].weight[3, 5] += hvd.rank()
    text = error_of(lambda: hvd.check_parameters(model))
    assert "2.weight" in text, text


@check
def a_whole_step_in_a_cuda_graph_is_refused_or_trains():
    """The last one, as a capture that fails leaves much behind."""
    needs(ON_GPU, "a GPU")
    model, alone = net(), net()
    optimizer = wrap(model, lambda params: torch.optim.SGD(params, lr=0.05))
    own = batch(hvd.rank())
    train(model, optimizer, [own], steps=3)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            train(model, optimizer, [own], steps=1)
    except Exception as error:
        raise unittest.SkipTest(f"refused: {type(error).__name__}: {error}"[:200]) from error
    graph.replay()
    torch.cuda.synchronize()
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.05), everyones(), steps=4)
    assert_same(model, alone)


start()
run_checks()
