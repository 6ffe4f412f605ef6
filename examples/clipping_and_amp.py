"""Gradient clipping and mixed precision, written as for one process.

    hvdrun -np 2 python examples/clipping_and_amp.py --dtype float16

When backward() returns, the gradients are those averaged over all ranks. So every rank clips by
the same norm, and every rank's GradScaler sees the same overflow and skips the same step.
"""

import argparse

import torch
from digits_data import DigitsNet, load_digits
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import hvdlite as hvd

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and rank")
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--max-norm", type=float, default=1.0, help="gradients are clipped to this")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="what autocast computes in"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    hvd.init()
    torch.manual_seed(0)
    device = torch.device(args.device)  # of several GPUs, init has chosen this rank's

    digits, test_digits = load_digits()
    sampler = DistributedSampler(digits, hvd.size(), hvd.rank())
    loader = DataLoader(digits, batch_size=args.batch_size, sampler=sampler)

    model = DigitsNet().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    dtype = DTYPES[args.dtype]
    autocast = torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)
    # float16 gradients underflow below 6e-8: the loss is scaled up, and the gradients down again.
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            with autocast:
                loss = cross_entropy(model(images.to(device)), labels.to(device))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = clip_grad_norm_(model.parameters(), args.max_norm)
            scaler.step(optimizer)
            scaler.update()
        mean = hvd.allreduce(loss.detach(), name="loss").item()
        if hvd.rank() == 0:
            print(
                f"Epoch {epoch + 1}/{args.epochs}: loss of the last step {mean:.4f}, "
                f"norm before clipping {norm.item():.3f}, loss scale {scaler.get_scale():.0f}",
                flush=True,
            )

    images, labels = (tensor.to(device) for tensor in test_digits.tensors)
    with torch.no_grad(), autocast:
        hits = (model(images).argmax(dim=1) == labels).sum().item()
    if hvd.rank() == 0:
        print(f"Test accuracy in {args.dtype}: {100 * hits / len(labels):.2f} %")


if __name__ == "__main__":
    main()
