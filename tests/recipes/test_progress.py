"""A progress bar on rank 0, with tqdm and without."""

import io
import sys

import pytest
import tqdm

import hvdlite as hvd
from hvdlite.recipes import progress, progress_bar


def goes_through(path, without_tqdm):
    hvd.init()
    if without_tqdm:
        # As where it is not installed.
        kept, sys.modules["tqdm"] = sys.modules["tqdm"], None
    try:
        with open(path + str(hvd.rank()), "w+") as file:
            with progress_bar(range(3), desc="train", file=file) as bar:
                items = []
                for item in bar:
                    items.append(item)
                    bar.set_postfix(loss=0.25)
            by_hand = progress_bar(total=4, file=file, unit="step")
            by_hand.update(4)
            by_hand.write("said", file=file)
            by_hand.close()
            file.seek(0)
            return items, bar.n, len(by_hand), by_hand.n, file.read()
    finally:
        if without_tqdm:
            sys.modules["tqdm"] = kept


@pytest.mark.ranks(2)
@pytest.mark.parametrize("without_tqdm", [False, True])
def test_only_rank_0_shows_a_bar_and_all_go_through_the_same(world, tmp_path, without_tqdm):
    shown, quiet = world.run(goes_through, str(tmp_path / "out"), without_tqdm)
    assert shown[:4] == quiet[:4] == ([0, 1, 2], 3, 4, 4)
    assert quiet[4] == ""
    assert "train: " in shown[4]
    assert "loss=0.25" in shown[4]
    assert "said\n" in shown[4]


def test_the_bars_without_output_have_the_methods_of_tqdm_that_scripts_use():
    names = [name for name in vars(progress.QuietBar) if not name.startswith("_")]
    assert len(names) >= 10
    for name in names:
        assert hasattr(tqdm.tqdm, name) or name in ("iterable", "total")


def test_the_plain_bar_shows_a_line_now_and_then_and_one_at_the_end():
    now = [100.0]
    file = io.StringIO()
    bar = progress.PlainBar(range(4), desc="test", unit="batch", file=file, clock=lambda: now[0])
    for _ in bar:
        now[0] += 6.0
    assert file.getvalue().splitlines() == [
        "test: 2/4 (50%) batch, 12 s, 0.1667 batch/s",
        "test: 4/4 (100%) batch, 24 s, 0.1667 batch/s",
    ]


def test_a_bar_without_iterable_says_so():
    bar = progress.QuietBar(total=3)
    with pytest.raises(
        TypeError, match=r"this progress bar has no iterable; call update\(\) on it"
    ):
        list(bar)
    with pytest.raises(TypeError, match="the total of this progress bar is not known"):
        len(progress.QuietBar(iter([])))
    assert list(progress.QuietBar(iter([1, 2]))) == [1, 2]
