"""Images of classes, from a folder or from scikit-learn's wheel. Nothing here knows of hvdlite."""

import importlib.util
from pathlib import Path

import torch
from digits_data import load_digits
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

# Of the red, green and blue values of ImageNet's images.
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}

Sample = tuple[Tensor, int]


class Images(Dataset[Sample]):
    """Each item is float32[3, size, size] and its class.

    In training an image is varied. What an epoch makes of it follows from the seed, the epoch and
    the image's number, so that it is the same on whichever rank it is looked at.
    """

    size: int
    classes: int
    seed: int | None  # None: no variation
    epoch = 0

    def __len__(self) -> int:
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def draw(self, index: int, count: int) -> list[float]:
        """So many numbers between 0 and 1; without variation 0.5."""
        if self.seed is None:
            return [0.5] * count
        place = (self.seed * 100_003 + self.epoch) * len(self) + index
        return torch.rand(count, generator=torch.Generator().manual_seed(place)).tolist()


class Folder(Images):
    """A folder for each class, in the order of their names, with images of any size."""

    def __init__(self, path: Path, size: int, seed: int | None) -> None:
        if importlib.util.find_spec("PIL") is None:
            raise SystemExit("folders of images are read with Pillow: pip install pillow")
        folders = sorted(folder for folder in path.iterdir() if folder.is_dir())
        self.files = [
            (file, number)
            for number, folder in enumerate(folders)
            for file in sorted(folder.rglob("*"))
            if file.suffix.lower() in ENDINGS
        ]
        if not self.files:
            raise SystemExit(f"{path}: expected a folder of images for each class, found no image")
        self.size, self.classes, self.seed = size, len(folders), seed

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        """A square of the image, enlarged or made smaller: its middle, or in training one of 30 to
        100 % of its shorter side at some place, and half of the time its mirror image."""
        import numpy as np
        from PIL import Image

        file, label = self.files[index]
        scale, left, top, mirrored = self.draw(index, 4)
        with Image.open(file) as image:
            side = min(image.size)
            if self.seed is not None:
                side = max(1, round(side * (0.3 + 0.7 * scale)))
            x, y = round((image.width - side) * left), round((image.height - side) * top)
            box = (x, y, x + side, y + side)
            square = image.convert("RGB").resize((self.size, self.size), box=box)
        values = torch.from_numpy(np.array(square)).permute(2, 0, 1) / 255
        if mirrored > 0.5:
            values = values.flip(2)
        return (values - MEAN) / DEVIATION, label


class Scans(Images):
    """The handwritten digits, enlarged; in training shifted by up to an eighth of the size."""

    def __init__(self, train: bool, size: int, seed: int | None) -> None:
        images, self.labels = load_digits()[0 if train else 1].tensors
        enlarged = interpolate(images, (size, size), mode="bilinear") - images.mean()
        self.images = enlarged / images.std()
        self.size, self.classes, self.seed = size, 10, seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        most = self.size // 8
        right, down = (round(most * (2 * at - 1)) for at in self.draw(index, 2))
        image = self.images[index].roll((down, right), (1, 2)).expand(3, -1, -1)
        return image, int(self.labels[index])


def load_images(
    train_folder: Path | None, test_folder: Path | None, size: int, seed: int
) -> tuple[Images, Images]:
    """The training images and the test images: of the folders, or without both the digits."""
    if train_folder is None and test_folder is None:
        return Scans(True, size, seed), Scans(False, size, None)
    if train_folder is None or test_folder is None:
        given, missing = ("--train-dir", "--val-dir")[:: 1 if test_folder is None else -1]
        raise SystemExit(f"{given} without {missing}: give both, or neither for the digits")
    return Folder(train_folder, size, seed), Folder(test_folder, size, None)
