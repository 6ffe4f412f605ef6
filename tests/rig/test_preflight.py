"""hvdrun reports hosts that it can not log in to before it starts anything there."""

import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.harness.busy import without_delays
from tests.harness.needs import lacking
from tests.harness.worlds import end_tree
from tests.launcher.preflight.test_preflight import EDITED_FACTS
from tests.rig.conftest import job
from tests.rig.preflight import ALL, BOTH, UNDER_ONE_MPI, only_finding

pytestmark = [pytest.mark.rig, pytest.mark.usefixtures("nothing_remembered")]

LIMIT_S = 60.0


@UNDER_ONE_MPI
@pytest.mark.parametrize(
    ("words", "cause", "remedy"),
    [
        (["-H", "server1:1,server9:1"], "the name is unknown here", "correct the name"),
        (["-H", BOTH, "-p", "2222"], "no ssh server listens there", "start sshd on server2"),
        (
            ["-H", "server1:1,nobody@server2:1"],
            "accepts none of the keys",
            "`ssh-copy-id nobody@server2`",
        ),
    ],
    ids=["name unknown", "refused", "no key"],
)
def test_ssh_that_fails_is_said_with_its_cause_and_remedy(hvdrun, files, words, cause, remedy):
    done = hvdrun("--start-timeout", "6", *words, "true")
    assert done.code == 70
    what, found, helps = only_finding(done, "server9" if "unknown" in cause else "server2")
    assert what == "ssh"
    assert cause in found
    assert remedy in helps


@UNDER_ONE_MPI
@pytest.mark.long
@pytest.mark.parametrize("changed", [True, False])
def test_a_host_key_that_changed_is_told_from_one_that_is_unknown(hvdrun, rig, files, changed):
    path = Path(rig("ssh-config").strip()).with_name("known_hosts")
    lines = path.read_text().splitlines()
    names, kind, _ = lines[1].split()
    assert names.startswith("server2,")
    lines[1] = f"{names} {kind} {lines[2].split()[2]}" if changed else ""
    rig.cover("server1", path, "\n".join(lines) + "\n")
    done = hvdrun("-H", BOTH, "true")
    assert done.code == 70
    what, found, helps = only_finding(done)
    assert what == "ssh"
    if changed:
        assert "its host key has changed" in found
        assert "`ssh-keygen -R server2`" in helps
    else:
        assert "its host key is not known here" in found
        assert "`ssh server2`" in helps


# ssh counts the seconds.
@UNDER_ONE_MPI
@pytest.mark.long
@pytest.mark.parametrize("how", ["kill", "cut"])
def test_a_host_that_is_down_is_said(hvdrun, rig, how):
    rig(how, "server2")
    done = hvdrun("-H", BOTH, "--start-timeout", "12", "true")
    assert done.code == 70
    what, found, helps = only_finding(done)
    assert what == "ssh"
    assert "it does not answer" in found or "the network has no route to it" in found
    assert "ping server2" in helps


# In one line, or in two where the second was found later.
NOT_READY = (
    "server2 (the name is unknown here)",
    "server3 (the connection was refused: no ssh server listens there)",
)


@UNDER_ONE_MPI
def test_hosts_are_waited_for_until_their_names_and_their_sshd_are_there(rig, python):
    names = rig.share / "names"
    all_names = rig("exec", "server1", "cat", "/etc/hosts")
    names.write_text(re.sub(r"(?m)^.*server2$", "", all_names))
    rig.cover("server1", Path("/etc/hosts"), names)
    hosts = rig.share / "late-hosts"
    hosts.write_text("server1 slots=1\nserver2 slots=1\nserver3 slots=1 port=2222\n")
    config = Path(rig("ssh-config").strip()).parents[1] / "server3" / "sshd_config"
    command = [python.with_name("hvdrun"), "--hostfile", hosts, "sh", "-c", "echo $RANK"]
    with job(rig.inside("server1", *command)) as hvdrun:
        said = ""
        while not all(text in said for text in NOT_READY):
            line = hvdrun.stderr.readline()
            assert line.startswith("hvdrun: waiting "), said + line
            said += line
        assert "hvdrun: waiting up to 60 s (--start-timeout) for server" in said
        names.write_text(all_names)
        sshd = subprocess.Popen(
            rig.inside("server3", shutil.which("sshd"), "-D", "-f", config, "-p", "2222")
        )
        try:
            said, complained = hvdrun.communicate(timeout=LIMIT_S)
        finally:
            end_tree(sshd)
    assert re.search(r"(?m)^hvdrun: all hosts have answered, after \d+ s\n", complained)
    assert (hvdrun.returncode, sorted(said.split())) == (0, ["0", "1", "2", "[0]", "[1]", "[2]"])


@UNDER_ONE_MPI
@pytest.mark.long
def test_a_shell_that_hangs_over_there_is_given_up(hvdrun, rig):
    # Debian's bash reads this file for sshd's commands, too. The loop ends with the connection.
    rig.cover("server2", Path("/root/.bashrc"), "while sleep 0.2; do echo wait || exit; done\n")
    done = hvdrun("-H", BOTH, "--start-timeout", "4", "true")
    assert done.code == 70
    what, found, helps = only_finding(done)
    assert (what, found) == ("ssh", "no answer within 4 s after ssh began")
    assert "start-up files" in helps


def login_shell(rig, host, shell):
    if not shutil.which(shell):
        lacking(f"this test needs {shell}: apt-get install {Path(shell).name}")
    accounts = Path("/etc/passwd").read_text()
    rig.cover(host, Path("/etc/passwd"), re.sub(r"(?m)^(root:.*:).*$", rf"\g<1>{shell}", accounts))


def forced_command(rig, host, command):
    keys = Path(rig("ssh-config").strip()).with_name("authorized_keys")
    rig.cover(host, keys, f'command="{command}" {keys.read_text()}')


@pytest.mark.long
def test_a_job_starts_whatever_the_login_shell_is(hvdrun, rig, python, files):
    login_shell(rig, "server2", "/usr/bin/fish")
    login_shell(rig, "server3", "/usr/bin/tcsh")
    config = Path("/etc/ssh/ssh_config")
    theirs = "RequestTTY force\nRemoteCommand echo hello\n"
    rig.cover("server1", config, theirs + rig("exec", "server1", "cat", config))
    done = hvdrun("-H", ALL, "hostname")
    assert done.code == 0, done
    assert sorted(done.stdout.splitlines()) == [f"[{i}] server{i + 1}" for i in range(3)]


@pytest.mark.long
def test_a_job_starts_after_start_up_files_that_read_or_set_things(hvdrun, rig, python, files):
    noise = "yes oh | head -c 300000 >&2"
    rig.cover("server2", Path("/root/.bashrc"), f"read answer; set -u; {noise}\n")
    forced_command(rig, "server3", r"exec sh -c \"$SSH_ORIGINAL_COMMAND\"")
    done = hvdrun("-H", ALL, "hostname")
    assert done.code == 0, done
    assert sorted(done.stdout.splitlines()) == [f"[{i}] server{i + 1}" for i in range(3)]
    assert "oh" not in done.stderr.split()


@UNDER_ONE_MPI
@pytest.mark.long
def test_a_login_that_runs_something_else_is_said_with_its_words(hvdrun, rig, python, files):
    login_shell(rig, "server2", "/usr/sbin/nologin")
    forced_command(rig, "server3", "echo only backups here")
    done = hvdrun("-H", ALL, "hostname")
    assert done.code == 71, done
    said = without_delays(done.stderr)
    rows = [re.split(r"  +", line.strip()) for line in said.splitlines()[3:]]
    assert [row[:3] for row in rows] == [
        ["server2", "login shell", "failed"],
        ["server3", "login shell", "failed"],
    ]
    assert "This account is currently not available" in rows[0][3]
    assert rows[1][3].endswith(
        "with exit code 0, and hvdrun's program did not start: it printed: only backups here"
    )
    assert "could not connect" not in done.stderr
    assert "same installation" not in done.stderr


@UNDER_ONE_MPI
@pytest.mark.long
def test_a_start_up_file_that_reads_all_input_is_said(hvdrun, rig, python):
    rig.cover("server2", Path("/root/.bashrc"), "cat > /dev/null\n")
    done = hvdrun("-H", BOTH, "--start-timeout", "8", "true")
    assert done.code == 71, done
    what, found, helps = only_finding(done)
    assert what == "login shell"
    assert found.endswith("a start-up file there reads standard input to its end")
    assert "returns if the shell is not interactive" in helps


@pytest.mark.long
def test_start_up_files_that_print_things_change_nothing(hvdrun, rig, python):
    noise = "printf 'Welcome to {}\\nhvdrun-host-agent'; echo 'Connection refused' >&2\n"
    rig.cover("server2", Path("/root/.bashrc"), noise)
    done = hvdrun("-H", BOTH, "hostname")
    assert done.code == 0, done
    assert sorted(done.stdout.splitlines()) == ["[0] server1", "[1] server2"]


@pytest.mark.long
def test_forwardings_in_the_users_configuration_are_not_in_the_way(hvdrun, rig, python, files):
    config = Path("/etc/ssh/ssh_config")
    theirs = (
        "ExitOnForwardFailure yes\nLocalForward 10.77.0.1:22 localhost:80\n"  # sshd has that port
    )
    rig.cover("server1", config, theirs + rig("exec", "server1", "cat", config))
    done = hvdrun("-H", BOTH, "hostname")
    assert done.code == 0, done
    assert sorted(done.stdout.splitlines()) == ["[0] server1", "[1] server2"]


@pytest.fixture
def ssh_stand_in(rig, monkeypatch):
    """ssh_stand_in(patterns and what is to replace them): counts what preflight asks, and changes
    the answers."""
    folder = rig.share / "stand-in"
    folder.mkdir(exist_ok=True)
    asked = rig.share / "asked"
    asked.write_text("")

    def stand_in(*edits):
        edited = shlex.join([sys.executable, str(EDITED_FACTS), *edits])
        text = f"""\
            #!/bin/sh
            case "$*" in
            *" host "*) echo asked >> {asked}; /usr/bin/ssh "$@" | {edited} ;;
            *) exec /usr/bin/ssh "$@" ;;
            esac
        """
        (folder / "ssh").write_text(textwrap.dedent(text))
        (folder / "ssh").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        return lambda: len(asked.read_text().splitlines())

    return stand_in


@UNDER_ONE_MPI
@pytest.mark.long
def test_slots_are_the_gpus_of_each_host_and_a_clock_that_is_wrong_is_said(hvdrun, ssh_stand_in):
    ssh_stand_in('"gpus": 0', '"gpus": 3', '"time_s": [0-9.]*', '"time_s": 1000000000.5')
    done = hvdrun("-H", "server1:1,server2", "hostname")
    assert done.code == 0, done
    assert sorted(done.stdout.splitlines()) == [
        *("[0] server1", "[1] server2", "[2] server2", "[3] server2"),
    ]
    assert re.search(
        r"(?m)^hvdrun: warning: server2: its clock is \d+ s behind; set it", done.stderr
    )


@UNDER_ONE_MPI
@pytest.mark.long
def test_good_answers_are_remembered_until_something_goes_wrong(hvdrun, rig, ssh_stand_in):
    asked = ssh_stand_in()
    counts = []
    for options in ([], [], ["--disable-cache"], []):
        assert hvdrun("-H", BOTH, *options, "true").code == 0
        counts.append(asked())
    assert counts == [1, 1, 2, 2]
    assert hvdrun("-H", BOTH, "sh", "-c", "exit 3").code == 3  # with what was remembered
    assert hvdrun("-H", BOTH, "true").code == 0
    assert asked() == 3
    rig.cover("server2", Path("/root/.bashrc"), "echo sorry >&2; exit 3\n")
    assert hvdrun("-H", BOTH, "true").code == 71
    assert asked() == 3
    done = hvdrun("-H", BOTH, "true")
    assert asked() == 4
    assert only_finding(done)[0] == "login shell"


@UNDER_ONE_MPI
@pytest.mark.long
def test_check_shows_all_findings_and_starts_nothing(hvdrun, rig):
    before = rig.files("server2")
    done = hvdrun("-H", "server1:1,server2:1,server9", "--check", "touch", "/tmp/made")
    assert done.code == 70
    assert rig.files("server2") == before
    rows = [re.split(r"  +", line.strip()) for line in done.stdout.splitlines()[2:]]
    verdicts = {(row[0], row[1]): row[2] for row in rows}
    assert verdicts.pop(("server9", "ssh")) == "failed"
    checked = {"ssh", "Python", "packages", "directory", "program", "cores, GPUs", "memory"}
    checked |= {"shared memory", "temporary files", "clock", "names"}
    assert {host: {what for name, what in verdicts if name == host} for host, _ in verdicts} == {
        "server1": checked,
        "server2": checked,
    }
    assert set(verdicts.values()) == {"ok"}
    done = hvdrun("-H", BOTH, "--check")
    assert done.code == 0
    for host, other in (("server1", "server2"), ("server2", "server1")):
        row = rf"(?m)^ {host} +connections +ok +TCP between it and {other}$"
        assert re.search(row, done.stdout), done
