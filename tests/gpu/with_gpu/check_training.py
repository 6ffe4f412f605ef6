"""Training with DistributedOptimizer on a GPU gives what it gives on the CPU."""

import torch

import hvdlite as hvd

STEPS = 10


def train(device, **options):
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)
    )
    model.double().to(device)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), **options)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 * step + hvd.rank())
        samples = torch.randn(16, 6, generator=generator, dtype=torch.float64).to(device)
        loss = (model(samples) - samples.sum(1, keepdim=True)).square().mean()
        loss.backward()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
        optimizer.step()
        optimizer.zero_grad()
    return torch.tensor(losses), torch.cat(
        [p.detach().cpu().reshape(-1) for p in model.parameters()]
    )


def compare(**options):
    (losses, params), (expected, others) = train("cuda", **options), train("cpu", **options)
    problems = []
    if not torch.allclose(losses, expected):
        problems.append(f"losses {losses} for {expected}")
    if not torch.allclose(params, others):
        problems.append(f"parameters differ by {(params - others).abs().max()}")
    everyones = hvd.allgather(params[None], name="parameters")
    if not torch.equal(everyones, everyones[:1].expand_as(everyones)):
        problems.append("the ranks' parameters differ")
    return problems


def mixed_precision():
    """autocast and GradScaler, with a step that is skipped."""
    model = torch.nn.Linear(8, 1).cuda()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    before = model.weight.detach().clone()
    for step in range(4):
        samples = torch.ones(4, 8, device="cuda") * (float("inf") if step == 1 else 1.0)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(samples).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    problems = [] if model.weight.isfinite().all() else ["not finite"]
    return problems + (["nothing was learnt"] if torch.equal(before, model.weight) else [])


hvd.init()
found = {
    "average": compare(),
    "predivided, in groups": compare(gradient_predivide_factor=2.0, num_groups=2),
    "Adasum": compare(op=hvd.Adasum),
    "mixed precision": mixed_precision(),
}
assert not any(found.values()), found
