"""TensorBoard's summaries, written by one rank."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hvdlite.world import world
from hvdrun.for_hvdlite import open_folder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter as TorchWriter

# The methods of torch.utils.tensorboard.SummaryWriter. Not asked of the class: ranks that do not
# write need no TensorBoard.
METHODS = (
    *("add_audio", "add_custom_scalars", "add_custom_scalars_marginchart"),
    *("add_custom_scalars_multilinechart", "add_embedding", "add_figure", "add_graph"),
    *("add_histogram", "add_histogram_raw", "add_hparams", "add_image", "add_image_with_boxes"),
    *("add_images", "add_mesh", "add_onnx_graph", "add_pr_curve", "add_pr_curve_raw"),
    *("add_scalar", "add_scalars", "add_tensor", "add_text", "add_video"),
    *("close", "flush", "get_logdir"),
)


class SummaryWriter:
    """`torch.utils.tensorboard.SummaryWriter` on this rank; on the others its methods do nothing.

    Any rank may make and use it, alone too; nothing is sent. So write values that are the same on
    all ranks, or average them first (`average_metrics`).

    Args:
        log_dir: The folder, made if it is missing; None: as in PyTorch, `runs/` and time and host.
        rank: The rank that writes; only there TensorBoard must be installed.
        arguments, options: The other arguments of PyTorch's.

    Raises:
        ImportError: On the rank that writes, TensorBoard is missing.
        PermissionError: On that rank, the folder is a symlink of another user.

    Example:
        >>> from hvdlite.recipes import SummaryWriter
        >>> with SummaryWriter("runs/digits", rank=-1) as writer:  # no rank writes
        ...     writer.add_scalar("loss", 0.5, 1)
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        *arguments: Any,
        rank: int = 0,
        **options: Any,
    ) -> None:
        self._writer: TorchWriter | None = None
        self.log_dir = None if log_dir is None else os.fspath(log_dir)
        if world.rank() != rank:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter as TorchWriter
        except ImportError as error:
            raise ImportError(
                f"SummaryWriter on rank {rank}: TensorBoard can't be imported ({error}); "
                "install it where this rank runs: pip install tensorboard"
            ) from error
        if self.log_dir is not None:
            os.close(open_folder(self.log_dir, 0o777))
        self._writer = TorchWriter(self.log_dir, *arguments, **options)
        self.log_dir = self._writer.log_dir

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        writer = self.__dict__.get("_writer")
        if writer is not None:
            return getattr(writer, name)
        if name in METHODS:
            return _nothing
        raise AttributeError(f"SummaryWriter has no method {name!r}")

    def __enter__(self) -> SummaryWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _nothing(*_: Any, **__: Any) -> None:
    pass
