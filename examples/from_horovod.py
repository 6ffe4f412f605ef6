"""A script for Horovod's PyTorch API. Its import line was changed, nothing else:

    import horovod.torch as hvd   ->   import hvdlite.torch as hvd

It uses what training scripts for Horovod use: a learning rate that is scaled by the number of
ranks and warmed up, DistributedSampler, compressed gradients, several backward passes per
allreduce, metrics averaged by name, state broadcast from rank 0.

    hvdrun -np 2 python examples/from_horovod.py --fp16-allreduce --batches-per-allreduce 2
"""

import argparse
import math

import torch
from digits_data import DigitsNet, load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import hvdlite.torch as hvd

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--batch-size", type=int, default=16, help="images per backward and rank")
parser.add_argument(
    "--batches-per-allreduce",
    type=int,
    default=1,
    help="backward passes on each rank before the gradients are allreduced",
)
parser.add_argument("--base-lr", type=float, default=0.01, help="learning rate of one rank")
parser.add_argument("--warmup-epochs", type=float, default=3)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument(
    "--fp16-allreduce", action="store_true", help="send the gradients as 16-bit floats"
)


def metric_average(value, name):
    """The mean of a number over all ranks."""
    return hvd.allreduce(torch.tensor(value), name=name).item()


def lr_factor(epoch, args):
    """What the base learning rate is multiplied by: up to the number of batches that one step
    averages during the warm-up, and a tenth of that in the last quarter."""
    scale = hvd.size() * args.batches_per_allreduce
    if epoch < args.warmup_epochs:
        return 1 + (scale - 1) * epoch / args.warmup_epochs
    return scale if epoch < 0.75 * args.epochs else 0.1 * scale


def train(epoch, model, optimizer, sampler, loader, args):
    model.train()
    sampler.set_epoch(epoch)
    loss_sum = 0.0
    for step, (images, labels) in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = args.base_lr * lr_factor(epoch + step / len(loader), args)

        optimizer.zero_grad()
        # One allreduce for several batches: the last batch of an epoch may have fewer parts.
        parts = math.ceil(len(images) / args.batch_size)
        for part in range(parts):
            rows = slice(part * args.batch_size, (part + 1) * args.batch_size)
            loss = cross_entropy(model(images[rows]), labels[rows]) / parts
            loss.backward()
            loss_sum += loss.item()
        optimizer.step()
    return metric_average(loss_sum / len(loader), "train_loss")


def test(model, loader):
    model.eval()
    loss = hits = count = 0
    with torch.no_grad():
        for images, labels in loader:
            scores = model(images)
            loss += cross_entropy(scores, labels, reduction="sum").item()
            hits += (scores.argmax(dim=1) == labels).sum().item()
            count += len(labels)
    return metric_average(loss / count, "test_loss"), metric_average(hits / count, "test_accuracy")


def main():
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(args.seed)

    train_digits, test_digits = load_digits()
    train_sampler = DistributedSampler(train_digits, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(
        train_digits,
        batch_size=args.batch_size * args.batches_per_allreduce,
        sampler=train_sampler,
    )
    test_sampler = DistributedSampler(test_digits, num_replicas=hvd.size(), rank=hvd.rank())
    test_loader = DataLoader(test_digits, batch_size=256, sampler=test_sampler)

    model = DigitsNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr, momentum=args.momentum)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=args.batches_per_allreduce,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(args.epochs):
        train_loss = train(epoch, model, optimizer, train_sampler, train_loader, args)
        test_loss, test_accuracy = test(model, test_loader)
        if hvd.rank() == 0:
            print(
                f"Epoch {epoch + 1}/{args.epochs}: train loss {train_loss:.4f}, "
                f"test loss {test_loss:.4f}, test accuracy {100 * test_accuracy:.2f} %",
                flush=True,
            )


if __name__ == "__main__":
    main()
