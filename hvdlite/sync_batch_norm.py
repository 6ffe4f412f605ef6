"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from hvdlite.collectives.allgather import allgather
from hvdlite.collectives.allreduce import allreduce
from hvdlite.collectives.posting import internal
from hvdlite.ops import Sum
from hvdlite.world.teams.process_sets import ProcessSet, global_process_set, team_of


class SyncBatchNorm(_BatchNorm):
    """BatchNorm1d, 2d and 3d whose mean and variance in training are those of all ranks' batches.

    The result, the gradients and the running statistics are those of torch's BatchNorm in one
    process with the whole batch. The ranks' batches may have different sizes, also be empty, on the
    CPU and on GPUs. For float16 and bfloat16 the statistics are in float32.

    In training `forward` is a collective of the ranks in `process_set`, and so is its backward if
    the input needs a gradient; every rank calls its layers in the same order. In eval mode nothing
    is sent.

    Example:
        >>> layer = hvd.SyncBatchNorm(3)
        >>> layer(torch.randn(4, 3)).shape
        torch.Size([4, 3])
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Arguments as those of torch's BatchNorm.

        momentum: None: the running statistics are the averages over all batches.
        process_set: The ranks that take part; registered at the first forward in training.
        """
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        self.process_set = process_set

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalizes `input` of shape (batch, num_features, ...), any floating-point dtype.

        Raises:
            ValueError: Another shape; one value for each feature on all ranks together.
            HorovodInternalError: The ranks' layers do not match; on every rank.
        """
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        team = team_of("SyncBatchNorm", self.process_set)
        if team.size == 1:
            return super().forward(input)
        output, mean, variance, count = _Normalize.apply(  # type: ignore[no-untyped-call]
            input,
            self.weight,
            self.bias,
            self.eps,
            self.process_set,
        )
        if self.track_running_stats and count:
            self._track(mean, variance * (count / (count - 1)))
        return output  # type: ignore[no-any-return]

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm: expected an input of shape (batch, {self.num_features}, ...), got "
                f"{list(input.shape)}"
            )
        if not input.is_floating_point():
            raise ValueError(f"SyncBatchNorm: expected floating-point numbers, got {input.dtype}")

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, unbiased_variance: torch.Tensor) -> None:
        """Updates the running statistics with this batch."""
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = self.momentum
        if factor is None:
            factor = 1.0 / float(self.num_batches_tracked)
        for running, new in (
            (self.running_mean, mean),
            (self.running_var, unbiased_variance),
        ):
            assert running is not None
            running.lerp_(new.to(running.dtype), factor)


def convert_sync_batchnorm(
    module: torch.nn.Module, process_set: ProcessSet = global_process_set
) -> torch.nn.Module:
    """Replaces every BatchNorm in `module` by a SyncBatchNorm, in place.

    Parameters and buffers stay the same objects, so an optimizer that has them keeps them; the
    modes (training or eval, requires_grad) and the devices stay too. A layer that is used in two
    places stays one layer. Nothing else changes.

    Args:
        module: Any module; or a BatchNorm itself.
        process_set: The ranks whose batches are one batch.

    Returns:
        `module`; if it is a BatchNorm itself, its replacement.

    Raises:
        ValueError: A lazy BatchNorm, which does not know its size yet.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        >>> model = hvd.convert_sync_batchnorm(model)
        >>> type(model[1]).__name__
        'SyncBatchNorm'
    """
    return _converted(module, process_set, {})


def _converted(
    module: torch.nn.Module, process_set: ProcessSet, done: dict[int, torch.nn.Module]
) -> torch.nn.Module:
    """done: by the id of a module, its replacement."""
    if id(module) in done:
        return done[id(module)]
    result = module
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        result = _replacement(module, process_set)
    done[id(module)] = result
    for name, child in module._modules.items():
        if child is not None:
            result._modules[name] = _converted(child, process_set, done)
    return result


def _replacement(module: _BatchNorm, process_set: ProcessSet) -> SyncBatchNorm:
    kept = (*module._parameters.values(), *module._buffers.values())
    if any(thing is not None and is_lazy(thing) for thing in kept):
        raise ValueError(
            f"convert_sync_batchnorm: {module} does not know its number of features yet; run the "
            "model once before you convert it"
        )
    result = SyncBatchNorm(
        module.num_features,
        module.eps,
        module.momentum,
        module.affine,
        module.track_running_stats,
        process_set,
        device="meta",
    )
    result._parameters.update(module._parameters)
    result._buffers.update(module._buffers)
    result.training = module.training
    return result


class _Normalize(torch.autograd.Function):
    """With n the number of values of a feature on all ranks, x the centered values, g the gradient
    of the output, and sums over all ranks:

        gradient of the input = weight / std · (g - sum(g) / n - x · sum(g · x) / (n · variance))

    where the variance includes eps. Forward makes one allgather: each rank's number of values, mean
    and sum of squares around its mean, which can't cancel. Backward makes one allreduce: sum(g) and
    sum(g · x). Both are in float64, since a float32 counts only to 2²⁴.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        process_set: ProcessSet,
    ) -> Any:
        values = _wide(input)
        dims = [d for d in range(input.dim()) if d != 1]
        count = input.numel() // input.shape[1] if input.shape[1] else 0
        own_mean = values.sum(dims) / max(count, 1)
        squares = (values - _along(own_mean, values)).square_().sum(dims)
        number = torch.tensor([count], dtype=torch.float64, device=input.device)
        own = torch.cat((number, own_mean.double(), squares.double()))
        sizes = [1, len(own_mean), len(own_mean)]
        name = internal("SyncBatchNorm", None, process_set)
        everything = allgather(own[None], name, process_set)
        counts, means, square_sums = torch.split(everything, sizes, dim=1)
        total = float(counts.sum())
        if total == 1:
            raise ValueError(
                "SyncBatchNorm: expected more than one value per feature in training, got "
                f"{list(input.shape)} on one rank and nothing on the others"
            )
        mean = (counts * means).sum(0) / max(total, 1.0)
        variance = square_sums.sum(0) + (counts * (means - mean).square()).sum(0)
        variance /= max(total, 1.0)
        mean_like, variance_like = mean.to(values.dtype), variance.to(values.dtype)
        ctx.save_for_backward(input, weight, mean_like, (variance + eps).rsqrt().to(values.dtype))
        ctx.arguments = dims, total, f"{name}.grad", process_set
        output = functional.batch_norm(
            input,
            mean_like,
            variance_like,
            None if weight is None else weight.to(values.dtype),
            None if bias is None else bias.to(values.dtype),
            training=False,
            eps=eps,
        )
        ctx.mark_non_differentiable(mean, variance)
        return output, mean, variance, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        input, weight, mean, inverse_std = ctx.saved_tensors
        dims, total, name, process_set = ctx.arguments
        grads, values = _wide(grad), _wide(input)
        centered = values - _along(mean, values)
        sums = torch.stack((grads.sum(dims), (grads * centered).sum(dims)))
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            means = allreduce(sums.double(), None, name, op=Sum, process_set=process_set)
            means /= max(total, 1.0)
            scale = inverse_std if weight is None else inverse_std * weight.to(values.dtype)
            shift, slope = means.to(values.dtype)
            slope = slope * scale * inverse_std.square()
            grad_input = torch.addcmul(
                grads * _along(scale, values) - _along(shift * scale, values),
                centered,
                _along(slope, values),
                value=-1,
            ).to(input.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (sums[1] * inverse_std).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = sums[0].to(grad.dtype if weight is None else weight.dtype)
        return grad_input, grad_weight, grad_bias, None, None


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the dtype in which it is summed."""
    return tensor.float() if tensor.itemsize < 4 else tensor


def _along(features: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One number per feature, in a shape that broadcasts with the input's."""
    return features.view(1, -1, *[1] * (like.dim() - 2))
