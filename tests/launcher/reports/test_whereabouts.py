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


def without_stack(command):
    process = Process(7, 1, "S", 2.0, command, True)
    return {0: Seen("a", now=Look(1.0, (process,), (), "it has not imported hvdlite"))}


WAIT = {rank: seen(5 + rank, ALLREDUCE + MAIN) for rank in range(3)}
LAST = seen(7, MAIN, state="T", why="it last waited for hvdlite here:")
# What was seen, and how it is asked for.
ENTRIES = {
    "ranks at the same place are one entry, and calls of a library one line": (
        {
            1: seen(7, (*LOADER, *MAIN, *RUNPY), host="server2"),
            0: seen(5, ALLREDUCE + MAIN),
            2: seen(6, ALLREDUCE + MAIN, host="server2"),
            3: seen(8, ALLREDUCE + MAIN[:1]),
        },
        {},
    ),
    "the missing rank 1 is apart from those that wait": (WAIT, {"apart": (1,)}),
    "without a stack each alone; those that were not seen together": (
        {
            0: Seen("server1"),
            1: seen(7, (), state="T"),
            2: seen(8, (), why="it has not imported hvdlite"),
            3: Seen("server1", None, Look(1.0, (), (), "it has closed the file for its stack")),
            4: Seen("server2", note=NOT_STARTED),
            5: Seen("server1", note=ENDED),
            6: Seen("server3", note=NOT_STARTED),
        },
        {"rest": 9},
    ),
    "init has failed on rank 1": ({**WAIT, 1: WAIT[1]._replace(note=FAILED)}, {}),
    "one rank was not asked": ({}, {"rest": 1}),
    "where rank 1 was last is no place that it shares": (
        {
            0: seen(5, MAIN),
            1: LAST._replace(now=LAST.now._replace(stopped_s=75.5)),
            2: seen(6, MAIN),
        },
        {},
    ),
    "why there is no stack": (without_stack("python train.py"), {"where": HVD_INIT}),
    "why there is none of bash": (without_stack("bash run.sh"), {"where": HVD_INIT}),
    "MPI_Init needs no hvdlite": (without_stack("python train.py"), {"where": MPI_INIT}),
    "not waiting in init": (without_stack("python train.py"), {}),
}


def test_the_words_say_where_the_ranks_are(snapshot):
    texts = {name: entries(found, CWD, **how) for name, (found, how) in ENTRIES.items()}
    lines = [line for name, text in texts.items() for line in (f"=== {name}", *text, "")]
    snapshot("whereabouts", "\n".join(lines))


def test_an_entry_names_some_of_its_hosts():
    many = {number: seen(number, MAIN, host=f"host{number}") for number in range(20)}
    assert next(entries(many, CWD)).endswith(" host6, host7 and 12 more hosts")


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
