"""examples/imagenet_resnet.py: the recipe for large batches, on images that are at hand."""

import importlib
import shutil

import pytest
import torch
from PIL import Image

from tests.examples.checkpoints import last_step, trained
from tests.examples.conftest import EXAMPLES

SMALL = ["--image-size", "8", "--schedule", "cosine", "--epochs", "5", "--warmup-epochs", "1"]
STEPS = 5 * 22

pytestmark = pytest.mark.wide_in("mpich")


def checkpoints(folder):
    return ["--checkpoint-format", str(folder / "checkpoint-{epoch}.pt")]


@pytest.fixture(scope="module")
def whole(hvdrun, tmp_path_factory):
    """On two ranks, from the beginning to the end."""
    folder = tmp_path_factory.mktemp("whole")
    options = [*SMALL, "--batches-per-allreduce", "2", "--batch-size", "16", "--fp16-allreduce"]
    run = hvdrun(2, "imagenet_resnet.py", *options, *checkpoints(folder))
    assert run.code == 0, run
    return run, folder, options


def test_two_ranks_learn_with_accumulated_gradients_and_16_bit_sums(whole):
    run, folder, _ = whole
    assert run.stdout.count("Epoch ") == 5
    # By the processor's kernels, which round: 79 on one. An untrained network has 10.
    assert float(run.find(r"^Test accuracy on 2 rank\(s\): (\S+) %$")) >= 65, run
    assert last_step(folder) == STEPS
    assert len(list(folder.glob("*.pt"))) == 3


@pytest.mark.wide
def test_ended_in_an_epoch_and_started_again_equals_uninterrupted(
    hvdrun, preempted, whole, tmp_path
):
    _, folder, options = whole
    options = [*options, *checkpoints(tmp_path)]
    ended = preempted("Epoch 1/", 2, "imagenet_resnet.py", *options)
    step = last_step(tmp_path)
    assert f"Ended from outside: saved after step {step}" in ended.stdout, ended
    assert 22 < step < STEPS
    shutil.copytree(tmp_path, tmp_path / "one rank", ignore=shutil.ignore_patterns("one*"))

    resumed = hvdrun(2, "imagenet_resnet.py", *options)
    assert resumed.code == 0, resumed
    assert trained(tmp_path) == trained(folder)

    other = hvdrun(1, "imagenet_resnet.py", *options, *checkpoints(tmp_path / "one rank"))
    assert other.code == 1
    assert (
        "begun with 64 images per step, now 32 on each of 1 ranks; choose --batch" in other.stderr
    )
    options += ["--batch-size", "32", *checkpoints(tmp_path / "one rank")]
    other = hvdrun(1, "imagenet_resnet.py", *options)
    assert other.code == 0, other
    assert last_step(tmp_path / "one rank") == STEPS


def striped(folder, count):
    """Images of 24 x 20: plain, with vertical and with horizontal stripes."""
    draw = torch.Generator().manual_seed(0)
    for name, rows in {
        "a plain": slice(0, 0),
        "vertical": (slice(None), slice(None, None, 4)),
        "very horizontal": slice(None, None, 4),
    }.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            values = 60 * torch.rand((20, 24), generator=draw)
            values[rows] += 190
            Image.fromarray(values.byte().numpy()).save(folder / name / f"{number}.png")


@pytest.mark.wide
@pytest.mark.parametrize("mpi", ["openmpi"], indirect=True)
def test_it_learns_by_adasum_from_folders_of_images(hvdrun, tmp_path):
    striped(tmp_path / "train", 20)
    striped(tmp_path / "test", 5)
    run = hvdrun(
        2,
        "imagenet_resnet.py",
        *("--train-dir", str(tmp_path / "train"), "--val-dir", str(tmp_path / "test")),
        *("--batch-size", "5", "--use-adasum", "--epochs", "6", "--warmup-epochs", "0"),
        *("--schedule", "cosine", "--workers", "1", "--expect-accuracy", "80"),
        *checkpoints(tmp_path / "checkpoints"),
    )
    assert run.code == 0, run


@pytest.fixture
def image_data(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("image_data")


def test_an_image_is_varied_by_its_number_and_the_epoch_alone(image_data, tmp_path):
    striped(tmp_path, 2)
    train, again = image_data.Folder(tmp_path, 16, seed=1), image_data.Folder(tmp_path, 16, seed=1)
    assert [train[index][1] for index in range(6)] == [0, 0, 1, 1, 2, 2]
    assert train[4][0].shape == (3, 16, 16)
    assert torch.equal(train[4][0], again[4][0])
    before = train[4][0]
    train.set_epoch(1)
    assert not torch.equal(train[4][0], before)


def test_a_test_image_is_the_middle_square(image_data, tmp_path):
    (tmp_path / "only").mkdir()
    image = Image.new("RGB", (30, 10), "black")
    image.paste("white", (10, 0, 20, 10))
    image.save(tmp_path / "only" / "image.png")
    square, label = image_data.Folder(tmp_path, 10, seed=None)[0]
    assert label == 0
    assert torch.equal(square, ((1 - image_data.MEAN) / image_data.DEVIATION).expand(3, 10, 10))


def test_a_folder_without_images_is_named(image_data, tmp_path):
    with pytest.raises(SystemExit, match="expected a folder of images for each class, found no"):
        image_data.Folder(tmp_path, 16, seed=None)


@pytest.mark.parametrize(
    ("train", "test", "text"),
    [
        ("train", None, "^--train-dir without --val-dir: give both, or neither for the digits$"),
        (None, "test", "^--val-dir without --train-dir: give both"),
    ],
)
def test_one_folder_without_the_other_is_an_error_and_no_training_on_digits(
    image_data, tmp_path, train, test, text
):
    folders = [name and tmp_path / name for name in (train, test)]
    with pytest.raises(SystemExit, match=text):
        image_data.load_images(*folders, size=16, seed=0)
