"""After the shutdown time of the stall check everything fails, everywhere with the same text."""

import os
import re
import time
from pathlib import Path

import pytest
import torch

import hvdlite as hvd
from tests.observing.reports import (
    DEADLINE_S,
    FAILS,
    GIVES_UP,
    NO_LIMIT,
    Said,
    host_of,
    plain,
    works_again,
)


def start(name, process_set=hvd.global_process_set):
    return hvd.allreduce_async(torch.ones(3), name=name, op=hvd.Sum, process_set=process_set)


def text_of(handle):
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.synchronize(handle)
    return plain(str(caught.value))


class Flag:
    """A rank raises it, the others see it without an operation. Made by all at the same place."""

    def __init__(self):
        self._path = Path(os.environ["HVDLITE_TEST_FOLDER"], f"flag of {os.getppid()}")
        self._path.unlink(missing_ok=True)
        hvd.barrier()

    def up(self):
        self._path.touch()

    def wait(self):
        deadline = time.monotonic() + DEADLINE_S
        while not self._path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)


def the_last_rank_stays_away(names, comes_later):
    """The texts with which operations fail on this rank, and the warnings before."""
    hvd.init()
    failed = Flag()
    said = Said()
    if hvd.rank() < hvd.size() - 1:
        texts = [text_of(handle) for handle in [start(name) for name in names]]
        failed.up()
    else:
        if comes_later:
            failed.wait()
        texts = [text_of(start("mine"))]
    texts += [text_of(start("next")), text_of(start("last"))]
    warnings = [line for line in said.lines() if " has waited " in line]
    assert not [line for line in said.lines() if NO_LIMIT in line]
    pattern = (
        rf"allreduce '({'|'.join([*names, 'mine'])})' has waited \d+ s for rank \d+ on "
        rf"{host_of(0)[:3]}.*; called by ranks? [-0-9, ]+{GIVES_UP}"
    )
    assert re.search(pattern, texts[0]), (pattern, texts[0])
    works_again()
    return texts, warnings


def rank_1_leaves_a_call_out():
    hvd.init()
    call = hvd.broadcast_parameters if hvd.rank() == 0 else hvd.allgather_object
    with pytest.raises(hvd.HorovodInternalError) as caught:
        call({"accuracy": torch.ones(1)}, *([0] if hvd.rank() == 0 else []))
    works_again()
    return plain(str(caught.value))


@pytest.mark.ranks(2)
@pytest.mark.wide_in("mpich")
def test_a_function_that_a_rank_leaves_out_matches_no_other_and_is_named(world):
    for text in world.run(rank_1_leaves_a_call_out, knobs=FAILS):
        assert "allgather 'broadcast_parameters #1'" in text


@pytest.mark.parametrize("comes_later", [False, True], ids=["late too", "later"])
@pytest.mark.ranks(3)
@pytest.mark.hosts("1,1,1", "2,1")
@pytest.mark.wide_in("mpich", "2,1")
def test_everything_fails_on_every_rank_with_the_same_text(world, comes_later):
    # Several at once: if two ranks decided, there would be two texts.
    names = [f"n{i}" for i in range(30)]
    results = world.run(the_last_rank_stays_away, names, comes_later, knobs=FAILS)
    texts = {text for texts, _ in results for text in texts}
    assert len(texts) == 1, texts
    # Before that they were reported, and went on.
    warned = [line.split("'")[1] for line in results[0][1]]
    assert warned
    assert set(warned) <= {*names, "mine"}
    assert len(set(warned)) == len(warned)


def one_of_two_sets():
    hvd.init()
    process_set = hvd.add_process_set([0, 1])
    failed = Flag()
    texts = []
    if hvd.rank() == 0:
        texts = [text_of(start("late", process_set))]
        failed.up()
    failed.wait()
    if hvd.rank() == 1:
        texts = [text_of(start("later", process_set))]
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    hvd.remove_process_set(process_set)
    return texts


@pytest.mark.ranks(3)
@pytest.mark.hosts("1,2")
@pytest.mark.wide_in("mpich")
def test_only_the_process_set_fails_in_which_a_rank_is_missing(world):
    first, second, third = world.run(one_of_two_sets, knobs=FAILS)
    assert first == second
    assert len(first) == 1
    assert third == []
    assert " has waited " in first[0]


def without_warnings():
    hvd.init()
    said = Said()
    text = text_of(start("late" if hvd.rank() == 0 else "other"))
    assert not [line for line in said.lines() if " has waited " in line]
    hvd.shutdown()
    return text


@pytest.mark.ranks(3)
@pytest.mark.wide_in("mpich")
def test_the_shutdown_time_counts_also_where_warnings_are_off(world):
    knobs = {"HVDLITE_STALL_CHECK_TIME_SECONDS": "0", "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "1"}
    assert len(set(world.run(without_warnings, knobs=knobs))) == 1


def a_layer_thawed_on_one_rank():
    hvd.init()
    torch.manual_seed(1)
    said, torch_model = Said(), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    named = list(torch_model.named_parameters())
    torch_model[1].requires_grad_(False)
    plain = torch.optim.SGD(torch_model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=named)
    texts = []
    for step in range(4):
        optimizer.zero_grad()
        if step == 3 and hvd.rank() == 1:
            torch_model[1].requires_grad_(True)
        try:
            torch_model(torch.ones(2)).sum().backward()
            optimizer.step()
        except hvd.HorovodInternalError as error:
            texts.append(str(error))
    hvd.shutdown()
    return texts, said.lines()


@pytest.mark.ranks(2)
def test_a_layer_that_one_rank_alone_has_thawed_is_told_by_its_parameters(world):
    found = world.run(a_layer_thawed_on_one_rank, knobs=FAILS)
    for (text,), lines in found:
        # Whichever operation was late first.
        assert "requires_grad" in text
        told = [line for line in lines if "now requires_grad=True: 1.weight and 1.bias" in line]
        assert any("rank 1 on" in line for line in told), lines
        words = re.compile(r"plan '|consistency|bucket\.|DistributedOptimizer\.|batches")
        assert not words.search("\n".join([text, *lines])), (text, lines)
