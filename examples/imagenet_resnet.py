"""Train a ResNet with large batches, by the recipe of Goyal et al. (2017): the learning rate grows
with the batch and is warmed up, no weight decay on biases and batch normalization, residuals that
begin at zero; with label smoothing, accumulated gradients, 16-bit sums or Adasum.

    hvdrun -np 2 python examples/imagenet_resnet.py
    hvdrun -np 32 -H … python examples/imagenet_resnet.py --train-dir imagenet/train \\
        --val-dir imagenet/validation --layers 50 --width 64 --image-size 224 --epochs 90 \\
        --warmup-epochs 5 --base-lr 0.0125 --workers 4 --log-dir logs

A folder of images has a folder for each class. Without one it trains a small network on
scikit-learn's digits. The options are those of Horovod's example for ImageNet, and some more. A run
that was ended goes on by the same command: after an epoch, or in its middle if hvdrun got TERM.
"""

import argparse
import sys
from pathlib import Path

import torch
from image_data import Images, load_images
from networks import STAGES, ResNet
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, MultiStepLR, SequentialLR
from torch.utils.data import DataLoader

import hvdlite as hvd
from hvdlite.recipes import (
    Checkpointer,
    DistributedSampler,
    GradualWarmup,
    Metric,
    SummaryWriter,
    progress_bar,
    rank_zero_print,
    scale_lr,
    set_seed,
)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--train-dir", type=Path, metavar="FOLDER", help="of training images")
    add("--val-dir", type=Path, metavar="FOLDER", help="of test images")
    add("--log-dir", type=Path, metavar="FOLDER", help="TensorBoard's files go there")
    add(
        "--checkpoint-format",
        type=Path,
        default=Path("imagenet_resnet/checkpoint-{epoch}"),
        metavar="PATH",
        help="checkpoints go into the folder of this path; its file name does not count",
    )
    add("--fp16-allreduce", action="store_true", help="send the gradients as 16-bit floats")
    add("--batches-per-allreduce", type=int, default=1, help="backward passes per step and rank")
    add("--use-adasum", action="store_true", help="combine gradients by Adasum, not their mean")
    add("--gradient-predivide-factor", type=float, default=1.0, help="divide before adding up")
    add("--batch-size", type=int, default=32, help="images per backward pass and rank")
    add("--val-batch-size", type=int, default=128, help="images per batch of a test")
    add("--epochs", type=int, default=10)
    add("--base-lr", type=float, default=0.05, help="learning rate of one rank and batch")
    add("--warmup-epochs", type=float, default=2)
    add(
        "--schedule",
        choices=["step", "cosine"],
        default="step",
        help="after the warm-up; step: a tenth of the rate after 30/90, 60/90 and 80/90 of "
        "--epochs, where Horovod's example has the epochs 30, 60 and 80",
    )
    add("--momentum", type=float, default=0.9)
    add("--wd", type=float, default=5e-5, help="weight decay")
    add("--label-smoothing", type=float, default=0.1)
    add("--layers", type=int, choices=STAGES, default=10)
    add("--width", type=int, default=16, help="channels of the first layer")
    add("--image-size", type=int, default=16)
    add("--workers", type=int, default=0, help="processes per rank that load images")
    add("--no-cuda", action="store_true", help="stay on the CPU")
    add("--seed", type=int, default=42)
    add("--expect-accuracy", type=float, default=0.0, metavar="PERCENT", help="else exit code 1")
    return parser.parse_args()


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    op = hvd.Adasum if args.use_adasum else hvd.Average
    passes = args.batches_per_allreduce
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    optimizer = torch.optim.SGD(
        [{"params": matrices, "weight_decay": args.wd}, {"params": vectors, "weight_decay": 0.0}],
        lr=scale_lr(args.base_lr, op=op, backward_passes_per_step=passes, loss_divided=True),
        momentum=args.momentum,
    )
    return hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=passes,
        op=op,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )


def make_scheduler(
    optimizer: torch.optim.Optimizer, args: argparse.Namespace, steps_per_epoch: int
) -> LRScheduler:
    """The rate of each step: warmed up; then a tenth at each of three places, or a cosine."""
    steps = args.epochs * steps_per_epoch
    warmup = round(args.warmup_epochs * steps_per_epoch)
    if args.schedule == "step":
        # The epochs 30, 60 and 80 of 90, and at the same parts of another number.
        milestones = [round(steps * epoch / 90) - warmup for epoch in (30, 60, 80)]
        after: LRScheduler = MultiStepLR(optimizer, milestones, gamma=0.1)
    else:
        after = CosineAnnealingLR(optimizer, max(1, steps - warmup))
    if warmup == 0:
        return after
    before = GradualWarmup(optimizer, args.base_lr, steps=warmup)
    return SequentialLR(optimizer, [before, after], [warmup])


def test(model: nn.Module, images: Images, args: argparse.Namespace) -> dict[str, float]:
    """The mean loss and the percentage of recognised images, of all images."""
    model.eval()
    # Each rank's batch normalization has seen other images: rank 0's counts.
    hvd.broadcast_parameters(dict(model.named_buffers()), root_rank=0)
    sampler = DistributedSampler(images, shuffle=False, even=False)  # no image counts twice
    metric = Metric("test")
    device = next(model.parameters()).device
    with torch.no_grad():
        for batch, labels in DataLoader(images, args.val_batch_size, sampler=sampler):
            scores, wanted = model(batch.to(device)), labels.to(device)
            hits = (scores.argmax(dim=1) == wanted).float().mean()
            loss = cross_entropy(scores, wanted)
            metric.update({"test loss": loss, "test accuracy": 100 * hits}, weight=len(batch))
    return dict(metric.compute())


def main() -> int:
    args = parse_args()
    hvd.init()
    set_seed(args.seed, per_rank=False)  # the first parameters are the same on every rank
    # Of several GPUs, init has chosen this rank's.
    device = torch.device("cuda" if torch.cuda.is_available() and not args.no_cuda else "cpu")
    images, test_images = load_images(args.train_dir, args.val_dir, args.image_size, args.seed)
    sampler = DistributedSampler(images, seed=args.seed)
    batch_size = args.batch_size * args.batches_per_allreduce
    loader = DataLoader(images, batch_size, sampler=sampler, num_workers=args.workers)

    model = ResNet(args.layers, images.classes, args.width, args.image_size).to(device)
    optimizer = make_optimizer(model, args)
    scheduler = make_scheduler(optimizer, args, len(loader))
    writer = SummaryWriter(args.log_dir, rank=0 if args.log_dir else -1)
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}
    begun = {"images_per_step": batch_size * hvd.size()}
    with Checkpointer(args.checkpoint_format.parent, **objects, begun=begun) as checkpointer:
        step = checkpointer.restore() or 0
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        if begun["images_per_step"] != batch_size * hvd.size():
            raise SystemExit(
                f"begun with {begun['images_per_step']} images per step, now {batch_size} on each "
                f"of {hvd.size()} ranks; choose --batch-size so that the product stays"
            )
        hvd.preempted()  # from here on TERM does not end the script
        for epoch in range(sampler.epoch, args.epochs):
            sampler.set_epoch(epoch)
            images.set_epoch(epoch)
            model.train()
            training = Metric("training")
            bar = progress_bar(total=len(loader), initial=step - epoch * len(loader), ncols=80)
            for batch, labels in loader:
                optimizer.zero_grad()
                parts = (tensor.split(args.batch_size) for tensor in (batch, labels))
                for part, wanted in zip(*parts, strict=True):
                    scores, wanted = model(part.to(device)), wanted.to(device)
                    loss = cross_entropy(scores, wanted, label_smoothing=args.label_smoothing)
                    # The parts add up to the mean over the batch, whose last one may be shorter.
                    (loss * (len(part) / len(batch))).backward()
                    training.update(loss.detach(), weight=len(part))
                optimizer.step()
                scheduler.step()
                sampler.advance(len(batch))
                step += 1
                bar.update()
                if hvd.preempted():
                    checkpointer.save(step)
                    rank_zero_print(f"Ended from outside: saved after step {step}")
                    return 0
            bar.close()
            means = {"training loss": training.compute()} | test(model, test_images, args)
            text = ", ".join(f"{name} {value:.4f}" for name, value in means.items())
            rank_zero_print(f"Epoch {epoch + 1}/{args.epochs}: {text}")
            for name, value in (means | {"lr": scheduler.get_last_lr()[0]}).items():
                writer.add_scalar(name, value, epoch + 1)
            sampler.set_epoch(epoch + 1)  # where this checkpoint goes on
            checkpointer.save(step)
    writer.close()
    percent = test(model, test_images, args)["test accuracy"]
    rank_zero_print(f"Test accuracy on {hvd.size()} rank(s): {percent:.2f} %")
    return int(percent < args.expect_accuracy)


if __name__ == "__main__":
    sys.exit(main())
