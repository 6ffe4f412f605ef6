"""Which GPU a rank uses, depending on the GPUs that the ranks of its host see."""

import pytest

from hvdlite.world.process.gpu_pinning import Choice, Visible, choose


def choices(knob, *local):
    return [choose(local, rank, knob) for rank in range(len(local))]


def devices(found):
    return [choice.device for choice in found]


def test_a_device_per_local_rank_where_there_are_that_many():
    assert devices(choices("auto", *[Visible(4)] * 4)) == [0, 1, 2, 3]
    assert devices(choices("auto", *[Visible(8)] * 2)) == [0, 1]


def test_the_first_where_each_rank_sees_one_device_of_its_own():
    assert devices(choices("auto", Visible(1, "GPU-a"), Visible(1, "GPU-b"))) == [0, 0]


@pytest.mark.parametrize(
    "local",
    [
        [Visible(1, "GPU-a"), Visible(1, "GPU-a")],
        [Visible(1), Visible(1)],
        [Visible(2)] * 3,
        [Visible(1, "GPU-a"), Visible(2)],
    ],
)
def test_otherwise_nothing_is_pinned_and_the_refusal_says_how_to_share_or_to_choose(local):
    for rank, choice in enumerate(choices("auto", *local)):
        assert choice.device is None
        assert f"is local rank {rank} of {len(local)} and sees" in choice.refusal
        assert "HVDLITE_GPU" in choice.refusal


def test_without_gpus_there_is_nothing_to_pin_and_nothing_to_refuse():
    assert choices("auto", *[Visible(0)] * 2) == [Choice(None)] * 2


def test_none_switches_it_off():
    assert choices("none", *[Visible(1, "GPU-a")] * 2) == [Choice(None)] * 2


def test_a_number_is_that_device_on_every_rank():
    assert devices(choices("0", *[Visible(1, "GPU-a")] * 2)) == [0, 0]


def test_a_device_that_is_not_there_is_an_error_that_names_the_knob():
    with pytest.raises(ValueError, match="HVDLITE_GPU=2: this process sees 2 devices"):
        choose([Visible(2)], 0, "2")
