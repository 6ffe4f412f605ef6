"""What hvdrun says about ranks that wait, and where the ranks are in their Python code."""

import pytest

from hvdrun.reports.looks import Frame, Look, Process
from hvdrun.reports.whereabouts import (
    ENDED,
    FAILED,
    HVD_INIT,
    MPI_INIT,
    NOT_STARTED,
    Seen,
    Stall,
    entries,
    read_stall,
)

CWD = "/home/me"


def frame(file, line, function, library=""):
    return Frame(file, line, function, library)


MAIN = (frame("/home/me/train.py", 20, "main"), frame("/home/me/train.py", 30, "<module>"))
RUNPY = (frame("<frozen runpy>", 88, "_run_code", "Python"),)
ALLREDUCE = (
    frame("/venv/lib/hvdlite/collectives/handles.py", 160, "synchronize", "hvdlite"),
    frame("/venv/lib/hvdlite/collectives/allreduce.py", 95, "allreduce", "hvdlite"),
)
LOADER = (
    frame("/usr/lib/python3.11/selectors.py", 415, "select", "Python"),
    frame("/venv/lib/torch/utils/data/dataloader.py", 1291, "_try_get_data", "torch"),
    frame("/venv/lib/torch/utils/data/dataloader.py", 1400, "__next__", "torch"),
)


def look(pid, frames, state="S", why=""):
    return Look(1.0, (Process(pid, 1, state, 2.0, "python train.py", True),), frames, why)


def seen(pid, frames, host="server1", state="S", why=""):
    return Seen(host, look(pid, None), look(pid, frames, state, why))


@pytest.mark.parametrize(
    ("text", "stall"),
    [
        (
            (
                "allreduce 'x' has waited 60 s for rank 1 on server2 (which has called no"
                " collective yet); called by rank 0; do all ranks take the same path through the"
            ),
            Stall("allreduce 'x'", (1,), (0,)),
        ),
        (
            (
                "allreduce 'x' (train.py:12) still waits, after 120 s, for rank 1 on a (which last"
                " finished barrier 'y' 3 s ago), rank 7 on rank (which has been in broadcast 'for'"
                " for 5 s) and 3 more on b; called by ranks 0, 2-4; do all ranks run the same"
            ),
            Stall("allreduce 'x' (train.py:12)", (1, 7), (0, 2, 3, 4)),
        ),
        (
            (
                "allreduce 'x' has waited 62 s for server2, which does not answer; called by ranks"
                " 0, 1; is that host cut off, or are its processes stopped?"
            ),
            Stall("allreduce 'x'", (), (0, 1)),
        ),
        (
            (
                "allreduce 'x' has waited 60 s for rank 1 on a (which last finished barrier 'y'"
                " 3 s ago); called by ranks 0, 2-4, ...; do all ranks take the same path through"
            ),
            Stall("allreduce 'x'", (1,), (0, 2, 3, 4)),
        ),
        (
            "allreduce 'x' has made no progress for 60 s, after 3 of 10 pieces; it waits within",
            Stall("allreduce 'x'"),
        ),
        ("\x1b[31mnonsense", Stall("?[31mnonsense")),
        (
            "x has waited 60 s for rank 9 on a, rank 1 on a, rank 1 on b; called by ranks "
            + ("0-999999," * 100 + ";"),
            Stall("x", (1,), tuple(range(8))),
        ),
        ("", Stall("")),
    ],
)
def test_a_report_of_the_stall_check_names_the_operation_and_its_ranks(text, stall):
    assert read_stall(text, 8) == stall


def test_ranks_at_the_same_place_are_one_entry_and_calls_of_a_library_one_line():
    found = {
        1: seen(7, (*LOADER, *MAIN, *RUNPY), host="server2"),
        0: seen(5, ALLREDUCE + MAIN),
        2: seen(6, ALLREDUCE + MAIN, host="server2"),
        3: seen(8, ALLREDUCE + MAIN[:1]),
    }
    assert "\n".join(entries(found, CWD)) == (
        "    rank 1 on server2 sleeps: python train.py (process 7); it waits for its DataLoader\n"
        "        selectors.py:415 in select\n"
        "        torch/utils/data/dataloader.py:1291 in _try_get_data, and 1 more call of torch\n"
        "        train.py:20 in main\n"
        "        train.py:30 in <module>\n"
        "    ranks 0,2 on server1, server2\n"
        "        hvdlite/collectives/allreduce.py:95 in allreduce\n"
        "        train.py:20 in main\n"
        "        train.py:30 in <module>\n"
        "    rank 3 on server1 sleeps: python train.py (process 8)\n"
        "        hvdlite/collectives/allreduce.py:95 in allreduce\n"
        "        train.py:20 in main"
    )


def test_a_rank_that_is_missing_is_shown_apart_from_those_that_wait():
    found = {rank: seen(5 + rank, ALLREDUCE + MAIN) for rank in range(3)}
    lines = entries(found, CWD, apart=(1,))
    assert [line for line in lines if line.startswith("    rank")] == [
        "    ranks 0,2 on server1",
        "    rank 1 on server1 sleeps: python train.py (process 6)",
    ]


def test_ranks_without_a_stack_are_described_one_by_one_and_those_that_were_not_seen_together():
    found = {
        0: Seen("server1"),
        1: seen(7, (), state="T"),
        2: seen(8, (), why="it has not imported hvdlite"),
        3: Seen("server1", None, Look(1.0, (), (), "it has closed the file for its stack")),
        4: Seen("server2", note=NOT_STARTED),
        5: Seen("server1", note=ENDED),
        6: Seen("server3", note=NOT_STARTED),
    }
    assert list(entries(found, CWD, rest=9)) == [
        "    rank 0 on server1: the host does not answer",
        (
            "    rank 1 on server1 is stopped (`kill -CONT 7` there lets it go on): python train.py"
            " (process 7)"
        ),
        "    rank 2 on server1 sleeps: python train.py (process 8); it has not imported hvdlite",
        "    rank 3 on server1 has just ended",
        "    ranks 4,6 on server2, server3: not started",
        "    rank 5 on server1: ended with exit code 0",
        "    and 9 more ranks",
    ]


def test_a_rank_whose_init_has_failed_is_shown_apart_from_others_at_the_same_place():
    found = {rank: seen(5 + rank, MAIN[:1]) for rank in range(3)}
    found[1] = found[1]._replace(note=FAILED)
    place = "        train.py:20 in main"
    assert list(entries(found, CWD)) == [
        "    ranks 0,2 on server1",
        place,
        f"    rank 1 on server1 sleeps: python train.py (process 6); {FAILED}",
        place,
    ]


@pytest.mark.parametrize(
    ("command", "where", "more"),
    [
        ("python train.py", HVD_INIT, "; it has loaded MPI; it has not imported hvdlite"),
        (
            "bash run.sh",
            HVD_INIT,
            ("; it has loaded MPI; it has not imported hvdlite: no process of it is named python"),
        ),
        ("python train.py", MPI_INIT, "; it has loaded MPI"),  # it need not import hvdlite
        ("python train.py", "", "; it has not imported hvdlite"),
    ],
)
def test_of_a_rank_without_a_stack_it_is_said_why(command, where, more):
    process = Process(7, 1, "S", 2.0, command, True)
    found = {0: Seen("a", now=Look(1.0, (process,), (), "it has not imported hvdlite"))}
    (line,) = entries(found, CWD, where=where)
    assert line == f"    rank 0 on a sleeps (2.0 s of CPU so far): {command} (process 7){more}"


def test_one_rank_that_was_not_asked_is_no_ranks():
    assert list(entries({}, CWD, rest=1)) == ["    and 1 more rank"]


def test_an_entry_names_some_of_its_hosts():
    many = {number: seen(number, MAIN, host=f"host{number}") for number in range(20)}
    assert next(entries(many, CWD)).endswith(" host6, host7 and 12 more hosts")


def test_where_a_rank_last_waited_is_no_place_that_it_shares_with_others():
    last = "it last waited for hvdlite here:"
    found = {0: seen(5, MAIN), 1: seen(7, MAIN, state="T", why=last), 2: seen(6, MAIN)}
    stopped = found[1].now._replace(stopped_s=75.5)
    found[1] = found[1]._replace(now=stopped)
    places = "        train.py:20 in main\n        train.py:30 in <module>"
    assert "\n".join(entries(found, CWD)) == (
        f"    ranks 0,2 on server1\n{places}\n"
        "    rank 1 on server1 is stopped, for 1 min 15 s now (`kill -CONT 7` there lets it go on):"
        f" python train.py (process 7); {last}\n{places}"
    )


def test_a_dataset_of_the_script_that_the_loader_calls_is_the_scripts():
    dataset = frame("/home/me/data.py", 3, "__getitem__")
    found = {0: seen(5, (dataset, *LOADER[1:], *MAIN))}
    assert "DataLoader" not in "".join(entries(found, CWD))


@pytest.mark.parametrize(
    ("file", "library", "cwd", "shown"),
    [
        ("/home/me/a/train.py", "", "/home/me", "a/train.py"),
        ("/home/meme/train.py", "", "/home/me", "/home/meme/train.py"),
        ("/train.py", "", "/", "/train.py"),
        ("<string>", "", "/home/me", "<string>"),
        ("/venv/site-packages/six.py", "six", "/home/me", "six.py"),
    ],
)
def test_a_path_is_as_short_as_it_is_clear(file, library, cwd, shown):
    found = {0: seen(5, (frame(file, 1, "f", library),))}
    assert list(entries(found, cwd))[-1] == f"        {shown}:1 in f"
