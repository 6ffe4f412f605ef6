"""Train a small GPT on characters: accumulated gradients, bfloat16, clipping, checkpoints.

    hvdrun -np 2 python examples/char_gpt.py

The texts have different lengths, so that the ranks' batches have different numbers of characters.
With `set_weight` the gradient is the mean over all characters of all ranks and backward passes.

If TERM ends the job, as batch systems do it, each rank finds out in the same step and a checkpoint
is saved. The same command then goes on there, bit for bit; on another number of ranks too, with the
same order of texts.
"""

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from networks import GPT
from text_data import Paragraphs, load_paragraphs, together
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, SequentialLR
from torch.utils.data import DataLoader

import hvdlite as hvd
from hvdlite.recipes import (
    Checkpointer,
    DistributedSampler,
    GradualWarmup,
    Metric,
    rank_zero_print,
    set_seed,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--batch-size", type=int, default=48, help="texts per step, over all ranks together"
    )
    parser.add_argument(
        "--batches-per-allreduce", type=int, default=2, help="backward passes per step and rank"
    )
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate of AdamW")
    parser.add_argument("--warmup-steps", type=int, default=30)
    parser.add_argument("--max-norm", type=float, default=1.0, help="gradients are clipped to this")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="what autocast computes in"
    )
    parser.add_argument("--context", type=int, default=64, help="characters of the longest text")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--checkpoints", type=Path, default=Path("char_gpt"), metavar="FOLDER")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--log-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make_scheduler(optimizer: torch.optim.Optimizer, steps: int, warmup_steps: int) -> LRScheduler:
    """The rate of each step: warmed up, then a cosine down to 0."""
    warmup = GradualWarmup(optimizer, start_lr=0.0, steps=warmup_steps)
    # Where the warm-up is the whole training, the cosine begins after its last step.
    cosine = CosineAnnealingLR(optimizer, max(1, steps - warmup_steps))
    return SequentialLR(optimizer, [warmup, cosine], [warmup_steps])


def loss_of(model: GPT, texts: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, int]:
    """The mean over the characters of a batch, and how many these are."""
    given, wanted = texts
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        scores = model(given)
    loss = cross_entropy(scores.float().flatten(0, 1), wanted.flatten())
    return loss, int((wanted >= 0).sum())


def steps_of(loader: DataLoader[Tensor], passes: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The batches of each step; the last step of an epoch may have fewer."""
    batches = iter(loader)
    while step := list(itertools.islice(batches, passes)):
        yield step


def evaluate(model: GPT, texts: Paragraphs, dtype: torch.dtype) -> float:
    """The mean loss over all characters; each rank looks at its share of the texts."""
    metric = Metric("test")
    share = [texts[index] for index in range(hvd.rank(), len(texts), hvd.size())]
    with torch.no_grad():
        for start in range(0, len(share), 128):
            metric.update(*loss_of(model, together(share[start : start + 128]), dtype))
    return float(metric.compute())


def write(model: GPT, vocabulary: str, count: int) -> str:
    """A text of the model's own, at most as long as its context."""
    tokens = torch.full((1, 1), vocabulary.index("\n"))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        while tokens.shape[1] < min(count, model.context):
            odds = model(tokens)[0, -1].softmax(0)
            tokens = torch.cat([tokens, torch.multinomial(odds, 1, generator=draw)[None]], dim=1)
    return "".join(vocabulary[token] for token in tokens[0]).strip()


def main() -> None:
    args = parse_args()
    hvd.init()
    set_seed(args.seed, per_rank=False)  # the first parameters are the same on every rank
    dtype = DTYPES[args.dtype]
    texts, test_texts = load_paragraphs(args.context)
    sampler = DistributedSampler(texts, seed=args.seed)
    loader = DataLoader(
        texts,
        batch_size=max(1, args.batch_size // (hvd.size() * args.batches_per_allreduce)),
        sampler=sampler,
        collate_fn=together,
    )

    model = GPT(len(texts.vocabulary), args.context, args.layers, args.width, args.heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        backward_passes_per_step=args.batches_per_allreduce,
    )
    scheduler = make_scheduler(optimizer, args.steps, args.warmup_steps)
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}
    with Checkpointer(args.checkpoints, **objects) as checkpointer:
        step = checkpointer.restore() or 0
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.preempted()  # from here on TERM does not end the script
        metric = Metric("training")
        epoch, is_over, preempted = sampler.epoch, step >= args.steps, False
        while not is_over:
            sampler.set_epoch(epoch)
            for batches in steps_of(loader, args.batches_per_allreduce):
                optimizer.zero_grad()
                for batch in batches:
                    loss, characters = loss_of(model, batch, dtype)
                    optimizer.set_weight(characters)
                    loss.backward()
                    metric.update(loss.detach(), weight=characters)
                    sampler.advance(len(batch[0]))
                clip_grad_norm_(model.parameters(), args.max_norm)
                optimizer.step()
                scheduler.step()
                step += 1
                if step % args.log_every == 0:
                    mean = metric.compute()
                    rank_zero_print(f"Step {step}/{args.steps}: training loss {mean:.4f}")
                    metric.reset()
                preempted = hvd.preempted()
                is_over = preempted or step >= args.steps
                if is_over or step % args.save_every == 0:
                    checkpointer.save(step)
                if is_over:
                    break
            epoch += 1
    if preempted:
        rank_zero_print(f"Ended from outside: saved after step {step}; the same command goes on")
        return
    rank_zero_print(f"Test loss per character: {evaluate(model, test_texts, dtype):.4f}")
    rank_zero_print(write(model, texts.vocabulary, args.context))


if __name__ == "__main__":
    main()
