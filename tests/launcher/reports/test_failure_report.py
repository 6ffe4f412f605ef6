import errno
import signal
import time

import pytest

from hvdrun.errors import (
    CommandNotFound,
    HostSetupError,
    LaunchError,
    MpirunFailed,
    SshFailed,
    UsageError,
    exit_codes,
)
from hvdrun.reports.failure_report import (
    Failure,
    aborted,
    daemon_failed,
    duration,
    first_failure,
    had_left,
    host_without_words,
    interrupted,
    last_lines,
    left_early,
    left_improperly,
    missing_program,
    not_started,
    rank_failed,
    run_on,
    unreachable,
)

TRACEBACK = b"""\
warning: nothing special
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    1 / 0
ZeroDivisionError: division by zero
"""


def test_the_report_says_who_where_how_when_and_its_traceback():
    at = time.mktime((2026, 11, 21, 20, 48, 31, 0, 0, -1))
    failure = Failure(1, "server2", "code 3", 12.34, at=at)
    assert rank_failed(failure, last_lines(TRACEBACK), [1], 4) == (
        "hvdrun: rank 1 on server2 ended with exit code 3 after 12.3 s (at 20:48:31); the other 3"
        " ranks were ended\n"
        "hvdrun: its last lines on stderr:\n"
        "    Traceback (most recent call last):\n"
        '      File "train.py", line 3, in <module>\n'
        "        1 / 0\n"
        "    ZeroDivisionError: division by zero"
    )


def test_without_a_traceback_the_report_says_where_the_rank_last_waited():
    failure = Failure(1, "server2", "signal 9", 12.34)
    where = "train.py:12 in main"
    last = f"hvdrun: it last waited for hvdlite in {where}"
    for said in ([], ["its words"]):
        assert rank_failed(failure, said, [1], 4, True, where).splitlines()[-1] == last
    assert last not in rank_failed(failure, last_lines(TRACEBACK), [1], 4, True, where)
    assert last not in rank_failed(failure, [], [1], 4)


@pytest.mark.parametrize(
    ("ended", "code", "text"),
    [
        ("code 3", 3, "ended with exit code 3"),
        ("signal 11", 139, "was ended by SIGSEGV (Segmentation fault)"),
        ("signal 9", 137, "was ended by SIGKILL (Killed) (kill -9, or a batch system)"),
        ("oom 9", 137, "was ended by SIGKILL (Killed), sent by the kernel's out-of-memory killer"),
    ],
)
def test_the_exit_code_is_that_of_the_rank(ended, code, text):
    failure = Failure(0, "server1", ended, 1.0)
    assert failure.exit_code == code
    assert text in str(failure)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(4.25, "4.2 s"), (59.9, "59.9 s"), (185.9, "3 min 05 s"), (26 * 3600 + 200, "26 h 03 min")],
)
def test_a_long_time_is_told_in_minutes_and_hours(seconds, text):
    assert duration(seconds) == text


def test_that_others_said_the_same_is_told():
    text = rank_failed(Failure(1, "here", "code 1", 1.0), last_lines(TRACEBACK), [0, 1, 2, 5], 8)
    assert "its last lines on stderr (the same on ranks 0-2,5):\n    Traceback" in text


IMPROPER = """
prterun has exited due to process rank 3 with PID 29156 on node vm exiting
improperly. There are three reasons this could occur:
""".splitlines()


def test_the_rank_that_left_without_finalize_is_known_by_the_words_of_open_mpi():
    assert left_improperly(IMPROPER) == 3
    assert (
        left_improperly(["prterun noticed that process rank 3 with PID 1 on node vm exited"])
        is None
    )


def test_a_rank_that_left_in_mid_job_is_named():
    error = left_early(3, "server2", 4.2)
    assert isinstance(error, MpirunFailed)
    assert str(error).startswith("rank 3 on server2 ended with exit code 0 after 4.2 s, in mid-job")


def test_that_a_rank_had_left_before_the_failure_is_told():
    text = had_left(3, "server2", 61.0)
    assert text.startswith("hvdrun: rank 3 on server2 had ended with exit code 0 after 1 min 01 s")


@pytest.mark.parametrize(("left", "who"), [(1, "1 other rank still runs"), (3, "3 other ranks")])
def test_that_others_run_on_without_a_rank_is_told(left, who):
    text = run_on(0, "server1", left, 60.0)
    assert text.startswith("hvdrun: rank 0 on server1 ended with exit code 0 1 min 00 s ago, and")
    assert who in text


def test_ctrl_c_is_answered_by_a_line():
    assert interrupted(signal.SIGINT, None, 4, 3.0) == (
        "hvdrun: Ctrl-C: the 4 ranks have 3 s to end; a second Ctrl-C kills them at once"
    )
    assert interrupted(signal.SIGTERM, None, 1, 20.0) == (
        "hvdrun: SIGTERM: the rank has 20 s to end; a second SIGTERM kills it at once"
    )
    assert interrupted(signal.SIGINT, signal.SIGINT, 4, 3.0).startswith("hvdrun: Ctrl-C again: ")


def test_the_hosts_whose_ranks_have_not_started_are_listed():
    error = not_started([("server2", 2, "ssh has not connected"), ("server3", 1, "")], 30.0)
    assert str(error).splitlines()[:3] == [
        "the job has not started within 30 s (--start-timeout):",
        "    server2: 2 ranks not started: ssh has not connected",
        "    server3: 1 rank not started",
    ]


def test_without_a_traceback_the_last_ten_lines_are_shown():
    said = "".join(f"line {i}\n" for i in range(50)).encode()
    assert last_lines(said) == [f"line {i}" for i in range(40, 50)]
    assert last_lines(b"\r 10%\r 20%\nover\n\n") == [" 20%", "over"]


def test_the_rank_that_called_abort_under_mpich_is_known_by_its_words():
    said = b"Abort(7) on node 1 (rank 1 in comm 0): application called MPI_Abort(...)\n"
    assert aborted({0: b"Abort, they said\n", 1: said}) == (1, "code 7")
    assert aborted({0: b"fine\n"}) is None


@pytest.mark.parametrize(
    "said",
    [
        b"ssh: Could not resolve hostname server9: Name or service not known\r\n",
        b"ssh: connect to host server2 port 22: Connection refused\r\n",
        b"Host key verification failed.\r\n",
        b"bob@server2: Permission denied (publickey).\r\n",
    ],
)
def test_what_ssh_said_is_the_message(said):
    error = unreachable("server2", said, "/venv/bin/python")
    assert isinstance(error, SshFailed)
    assert said.decode().strip() in str(error)


@pytest.mark.parametrize(
    ("stderr", "stdout", "words"),
    [
        (b"", b"", "nothing was printed"),
        (b"", b"Welcome\nThis account is currently not available.\n", "This account is currently"),
        (b"Connection to server2 closed.\r\n", b"", "Connection to server2 closed."),
    ],
)
def test_a_login_that_runs_something_else_is_not_said_to_lack_an_installation(
    stderr, stdout, words
):
    error = unreachable("server2", stderr, "/venv/bin/python", stdout)
    assert isinstance(error, HostSetupError)
    assert words in str(error)
    assert "`ssh server2 echo fine` must print `fine`" in str(error)
    assert "same installation" not in str(error)
    assert "could not connect" not in str(error)


def test_a_host_without_the_interpreter_is_told_from_one_that_is_not_reached():
    said = b"bash: line 1: /venv/bin/python: No such file or directory\n"
    error = unreachable("server2", said, "/venv/bin/python")
    assert isinstance(error, HostSetupError)
    assert "/venv/bin/python: No such file or directory" in str(error)


def test_a_daemon_that_is_missing_is_named_with_its_host():
    error = daemon_failed("server2", 127, b"bash: orted: command not found\n")
    assert isinstance(error, HostSetupError)
    assert "server2" in str(error)
    assert "orted: command not found" in str(error)
    assert "every host needs the same MPI" in str(error)


def test_a_daemon_that_is_there_and_fails_is_not_said_to_be_another():
    error = daemon_failed("server2", 213, b"")
    assert "ended there with exit code 213: it printed nothing; `hvdrun --check`" in str(error)
    assert "same MPI" not in str(error)


def test_a_program_that_is_missing_is_told_from_one_that_cannot_be_run():
    missing = missing_program("tarin.py", 2, "server2", errno.ENOENT)
    assert isinstance(missing, CommandNotFound)
    assert "'tarin.py' was not found on server2 (rank 2)" in str(missing)
    denied = missing_program("./train.py", 0, "server1", errno.EACCES)
    assert "Permission denied" in str(denied)


def test_every_cause_has_an_exit_code_of_its_own_between_64_and_79():
    kinds = LaunchError.__subclasses__()
    codes = [kind.code for kind in kinds]
    assert len(set(codes)) == len(kinds)
    assert all(64 <= code <= 79 for code in codes)
    assert all(kind.cause and f"{kind.code}  {kind.cause}" in exit_codes() for kind in kinds)
    assert UsageError.code == 64


LOST = """
[server1:00000] *** An error occurred in Socket closed
[server1:00000] *** reported by process [3216572417,0]
[server1:00000] *** on a NULL communicator
[server1:00000] *** Unknown error
""".splitlines()
CALLED = [line.replace("a NULL communicator", "communicator MPI_COMM_WORLD") for line in LOST]


@pytest.mark.parametrize(
    ("endings", "said", "first"),
    [
        ([(1, 2.0, False), (0, 1.0, False)], [], 0),  # by time, not by arrival
        ([(0, 1.0, False), (2, 1.1, False)], LOST, 2),
        ([(0, 1.0, False), (2, 1.1, True)], LOST, 2),
        ([(0, 1.0, False), (2, 1.1, True)], CALLED, 0),
        ([(0, 1.0, False), (2, 0.9, True)], [], 0),
        ([(0, 1.0, False)], LOST, 0),
        ([], LOST, None),
    ],
)
def test_the_first_failure_is_the_one_that_the_others_are_a_consequence_of(endings, said, first):
    failures = [Failure(rank, "here", "code 14", at, late) for rank, at, late in endings]
    found = first_failure(failures, said)
    assert (found and found.rank) == first


@pytest.mark.parametrize(
    ("started", "ended", "lost"),
    [
        ({0, 1, 2, 3}, {1}, "b"),  # rank 1 was told that the connection to b closed
        ({0, 1, 2, 3}, {1, 2}, None),
        ({0, 1, 2, 3}, set(), "a"),
        ({0, 1}, {1}, None),  # b's never came up
    ],
)
def test_a_host_whose_ranks_all_go_without_a_word_is_lost(started, ended, lost):
    assert host_without_words({"a": range(2), "b": range(2, 4)}, started, ended) == lost


def test_a_host_that_srun_cannot_reach_is_not_sshs_fault():
    said = b"srun: error: Unable to create step for job 7: Requested node configuration is not\n"
    error = unreachable("n2", said, "/venv/bin/python")
    assert isinstance(error, SshFailed)
    assert "n2 can't be reached by srun: srun could not start anything there (srun: er" in str(
        error
    )
    assert "`srun --overlap -N1 -w n2 true` must work in this job" in str(error)
    # This one has reached it.
    said = b"python: no such file\nsrun: error: n2: task 0: Exited with exit code 127\n"
    error = unreachable("n2", said, "/venv/bin/python")
    assert isinstance(error, HostSetupError)
    assert "same installation at the same path" in str(error)
