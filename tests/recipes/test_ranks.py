"""What one rank does alone, or first."""

import os
import re

import pytest

import hvdlite as hvd
from hvdlite.recipes import only_rank, rank_first, rank_zero_print


def kinds_of_decorators():
    hvd.init()
    last = hvd.size() - 1

    @only_rank(0)
    def alone(value):
        """Its text."""
        return value, hvd.rank()

    @only_rank(last, broadcast=True)
    def shared():
        return {"rank": hvd.rank()}

    @only_rank(0, wait=True)
    def kept_here():
        return lambda: None  # can't be pickled by pickle, and need not

    calls = [alone("x")]
    if hvd.rank() == 0:
        calls.append(alone("again"))  # nobody need call it with the others
    return calls, shared(), callable(kept_here()), alone.__name__, alone.__doc__


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("1,1")
def test_a_function_runs_on_its_rank_only_and_its_result_goes_to_all_if_wanted(world):
    first, *others = world.run(kinds_of_decorators)
    last = {"rank": world.size - 1}
    assert first == ([("x", 0), ("again", 0)], last, True, "alone", "Its text.")
    assert others == [([None], last, False, "alone", "Its text.")] * (world.size - 1)


def fails_on_its_rank(how):
    hvd.init()

    @only_rank(1, **how)
    def write():
        raise OSError("no space")

    try:
        write()
    except (OSError, hvd.HorovodInternalError) as error:
        return type(error).__name__, str(error), hvd.allgather_object(hvd.rank())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", [{"wait": True}, {"broadcast": True}])
def test_a_failure_on_the_rank_is_an_error_on_all(world, how):
    other, own = world.run(fails_on_its_rank, how)
    assert own == ("OSError", "no space", [0, 1])
    assert other == (
        "HorovodInternalError",
        "fails_on_its_rank.<locals>.write (only_rank(1)) failed on rank 1: OSError: no space",
        [0, 1],
    )


def waits_for_a_file(path):
    hvd.init()

    @only_rank(1, wait=True)
    def write():
        with open(path, "w") as file:
            file.write("whole")

    write()
    with open(path) as file:
        return file.read()


@pytest.mark.ranks(2)
def test_the_others_wait_until_the_function_has_returned(world, tmp_path):
    assert world.run(waits_for_a_file, str(tmp_path / "file")) == ["whole"] * 2


def wrong_ranks():
    hvd.init()
    texts = []
    for options in {"rank": 7}, {"rank": -1, "wait": True}:
        with pytest.raises(ValueError, match="there is no rank") as info:
            only_rank(**options)(len)([])
        texts.append(str(info.value))
    with pytest.raises(ValueError, match="there is no rank 7"), rank_first(7):
        pass
    return texts


@pytest.mark.ranks(2)
def test_a_rank_that_is_not_there_is_an_error_at_the_call(world):
    texts = [
        "len (only_rank(7)): there is no rank 7 among the ranks [0, 1]",
        "len (only_rank(-1)): there is no rank -1 among the ranks [0, 1]",
    ]
    assert world.run(wrong_ranks) == [texts] * 2


def test_a_decorator_without_brackets_is_an_error():
    with pytest.raises(ValueError, match=re.escape("a decorator is written @only_rank(0)")):
        only_rank(print)


def writes_first(folder, options):
    hvd.init()
    path = os.path.join(folder, "data" + str(hvd.cross_rank() if options.get("per_host") else ""))
    with rank_first(**options):
        found = os.path.exists(path)
        if not found:
            with open(path, "x") as file:
                file.write("data")
    return found


@pytest.mark.ranks(3)
@pytest.mark.hosts("2,1")
@pytest.mark.parametrize("per_host", [False, True])
def test_the_first_rank_leaves_the_block_before_the_others_enter_it(world, tmp_path, per_host):
    found = world.run(writes_first, str(tmp_path), {"per_host": True} if per_host else {"rank": 1})
    if not per_host:
        assert found == [True, False, True]
    else:
        # On two hosts the first rank of each is first.
        assert found in ([False, True, True], [False, True, False])


def fails_first():
    hvd.init()
    entered = False
    try:
        with rank_first():
            entered = True
            raise OSError("no network")
    except (OSError, hvd.HorovodInternalError) as error:
        return entered, type(error).__name__, str(error)


@pytest.mark.ranks(2)
def test_the_others_do_not_enter_a_block_in_which_the_first_has_failed(world):
    text = "rank_first(0) failed on rank 0: OSError: no network"
    expected = [(True, "OSError", "no network"), (False, "HorovodInternalError", text)]
    assert world.run(fails_first) == expected


def prints(path):
    hvd.init()
    with open(path + str(hvd.rank()), "w") as file:
        rank_zero_print("epoch", 1, sep="=", file=file)
    with open(path + str(hvd.rank())) as file:
        return file.read()


@pytest.mark.ranks(2)
def test_rank_zero_print_prints_on_rank_0(world, tmp_path):
    assert world.run(prints, str(tmp_path / "out")) == ["epoch=1\n", ""]
