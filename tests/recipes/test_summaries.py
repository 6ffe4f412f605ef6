"""TensorBoard's summaries, written by one rank."""

import inspect
import os
import sys

import pytest

import hvdlite as hvd
from hvdlite.recipes import SummaryWriter, summaries
from tests.harness.needs import lacking


def writes(folder, rank):
    hvd.init()
    own = os.path.join(folder, f"of rank {hvd.rank()}")
    with SummaryWriter(own, rank=rank, flush_secs=1) as writer:
        for step in range(3):
            writer.add_scalar("loss", 1 / (step + 1), step)
        writer.add_text("note", "text")
        writer.flush()
    return os.path.isdir(own)


@pytest.mark.ranks(2)
def test_one_rank_writes_and_the_others_do_nothing(world, tmp_path):
    needs_tensorboard()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert world.run(writes, str(tmp_path), 1) == [False, True]
    events = EventAccumulator(str(tmp_path / "of rank 1")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [0, 1, 2]
    values = [event.value for event in events.Scalars("loss")]
    assert values == pytest.approx([1, 1 / 2, 1 / 3])


def test_the_writer_of_the_other_ranks_has_the_same_methods():
    needs_tensorboard()
    from torch.utils.tensorboard import SummaryWriter as TorchWriter

    methods = {
        name
        for name, _ in inspect.getmembers(TorchWriter, inspect.isfunction)
        if not name.startswith("_")
    }
    assert set(summaries.METHODS) == methods


def without_tensorboard(folder):
    hvd.init()
    names = [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]
    kept = {name: sys.modules.pop(name) for name in [*names, "tensorboard"] if name in sys.modules}
    sys.modules["tensorboard"] = None  # as where it is not installed
    try:
        writer = SummaryWriter(folder)
    except ImportError as error:
        return str(error)
    else:
        writer.add_scalar("loss", 1.0)
        with pytest.raises(AttributeError, match="SummaryWriter has no method 'add_skalar'"):
            writer.add_skalar("loss", 1.0)
        return writer.log_dir
    finally:
        del sys.modules["tensorboard"]
        sys.modules.update(kept)


@pytest.mark.ranks(2)
def test_without_tensorboard_the_rank_that_writes_says_what_to_install(world, tmp_path):
    error, other = world.run(without_tensorboard, str(tmp_path))
    assert error.startswith("SummaryWriter on rank 0: TensorBoard can't be imported (")
    assert error.endswith("install it where this rank runs: pip install tensorboard")
    assert other == str(tmp_path)


def needs_tensorboard():
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        lacking("tensorboard is not installed")
