"""hvdrun on several hosts: where ranks run, their environment and input, and how jobs fail."""

import signal
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.harness.busy import without_delays
from tests.harness.programs import run_program
from tests.harness.worlds import ROOT
from tests.rig.conftest import WAITS, job

pytestmark = pytest.mark.rig

LIMIT_S = 60.0
WHERE = """
    from mpi4py import MPI
    import os
    comm = MPI.COMM_WORLD
    local = comm.Split_type(MPI.COMM_TYPE_SHARED)
    total = comm.allreduce(2**comm.rank)
    print(comm.rank, comm.size, os.uname().nodename, local.rank, local.size, total)
"""


def script(text):
    return ("-c", textwrap.dedent(text))


@pytest.mark.wide_in("mpich")
@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("server1:1,server2:2,server3:1", ["server1", "server2", "server2", "server3"]),
        ("server1:3,server2:1", ["server1", "server1", "server1", "server2"]),
        pytest.param(
            "server1:2,server2:2",
            ["server1", "server1", "server2", "server2"],
            marks=pytest.mark.wide,
        ),
        pytest.param(
            "server3:1,server2:2", ["server3", "server2", "server2"], marks=pytest.mark.wide
        ),
        pytest.param("10.77.0.1:1,10.77.0.2:1", ["server1", "server2"], marks=pytest.mark.wide),
    ],
)
def test_ranks_are_placed_host_by_host(hvdrun, python, hosts, expected):
    done = hvdrun("-H", hosts, python, *script(WHERE))
    assert done.code == 0, done
    size = len(expected)
    lines = [
        f"[{rank}] {rank} {size} {host} {expected[:rank].count(host)} {expected.count(host)}"
        f" {2**size - 1}"
        for rank, host in enumerate(expected)
    ]
    assert sorted(done.stdout.splitlines()) == lines, done


@pytest.mark.parametrize(
    "names",
    [
        ("job.1-worker-0", "job.1-worker-1", "job.1-worker-2"),
        ("server2", "server3", "server1"),
        pytest.param(("a.b", "a.c", "a"), marks=pytest.mark.wide),
    ],
)
def test_ranks_are_placed_whatever_the_hosts_call_themselves(rig, hvdrun, python, names):
    for number, name in enumerate(names, 1):
        rig.rename(f"server{number}", name)
    done = hvdrun("-H", "server1:1,10.77.0.2:2,server3:1", python, *script(WHERE))
    assert done.code == 0, done
    first, second, third = names
    assert sorted(done.stdout.splitlines()) == [
        f"[0] 0 4 {first} 0 1 15",
        f"[1] 1 4 {second} 0 2 15",
        f"[2] 2 4 {second} 1 2 15",
        f"[3] 3 4 {third} 0 1 15",
    ]


# The hosts' sshd has no IPv6: a stand-in for ssh goes to the host of the same number.
TO_SERVERS = """\
#!/bin/sh
for word; do
    shift
    case $word in
        fd77::*) word=server${word#fd77::} ;;
        node-*) word=server${word#node-} ;;
    esac
    set -- "$@" "$word"
done
exec /usr/bin/ssh "$@"
"""


@pytest.fixture
def to_servers(rig, monkeypatch):
    folder = rig.share / "to-servers"
    folder.mkdir(exist_ok=True)
    (folder / "ssh").write_text(TO_SERVERS)
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


NAME_SERVER = """
    import socket
    sock = socket.socket(type=socket.SOCK_DGRAM)
    sock.bind(("127.0.0.9", 53))
    print("[0] up", flush=True)
    while b"the-end" not in (asked := sock.recv(1000)):
        print(asked, flush=True)
"""
ASK_FOR_THE_END = """
    import socket
    socket.socket(type=socket.SOCK_DGRAM).sendto(b"the-end", ("127.0.0.9", 53))
"""


@pytest.mark.usefixtures("to_servers")
def test_no_name_server_is_asked_for_names_that_ssh_alone_knows(hvdrun, rig, python):
    """One that never answers: each question takes 10 s."""
    rig.cover("server1", Path("/etc/nsswitch.conf"), "passwd: files\nhosts: files dns\n")
    rig.cover("server1", Path("/etc/resolv.conf"), "nameserver 127.0.0.9\n")
    with job(rig.inside("server1", python, *script(NAME_SERVER)), ranks=1) as server:
        done = hvdrun("-H", "server1:1,node-2:1", python, *script(WHERE))
        rig("exec", "server1", "--", python, *script(ASK_FOR_THE_END))
        asked = server.stdout.read()
    assert sorted(done.stdout.splitlines()) == ["[0] 0 2 server1 0 1 3", "[1] 1 2 server2 0 1 3"]
    assert not asked


TAKES_ONE_HOST_FOR_ANOTHER = """
    import sys
    from hvdrun.__main__ import main
    from hvdrun.plan import command
    command.numbered_name = lambda *_: "localhost"
    sys.argv[1:] = ["-H", "server1:1,server2:2", "sleep", "60"]
    sys.exit(main())
"""


@pytest.mark.wide_in("openmpi")
def test_ranks_that_mpi_starts_on_another_host_than_planned_are_found(rig, python):
    command = rig.inside("server1", python, *script(TAKES_ONE_HOST_FOR_ANOTHER))
    done = run_program(command, LIMIT_S)
    assert done.code == 73, done
    assert "mpirun has started ranks 1-2 on server1 instead of server2; it has" in done.stderr


@pytest.mark.parametrize(
    ("own", "here", "says"),
    [
        ("127.0.1.1", "server1", ""),
        ("10.77.0.2", "10.77.0.1", ""),
        pytest.param("10.77.0.2", "localhost", "/etc/hosts gives server1", marks=pytest.mark.wide),
        ("10.77.0.2", "server1", "server1 is this machine's own name, but /etc/hosts gives it"),
    ],
)
def test_this_machines_name_has_an_address_that_no_interface_has(
    rig, hvdrun, python, own, here, says
):
    """Debian gives it 127.0.1.1; a cloned machine may have another's."""
    hosts = f"127.0.0.1 localhost\n{own} server1\n10.77.0.3 server3\n"
    rig.cover("server1", Path("/etc/hosts"), hosts)
    done = hvdrun("-H", f"{here}:1,10.77.0.2:1,server3:1", python, *script(WHERE))
    if says:
        assert done.code in (70, 71), done
        assert says in done.stderr
        return
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}] {rank} 3 server{rank + 1} 0 1 7" for rank in range(3)
    ], done


IN_A_FILE = """
    import sys
    from hvdrun.__main__ import main
    from hvdrun.plan import command
    command.MOST_BYTES = 0
    sys.exit(main())
"""
SHOW_FILES = """
    import glob, os
    print(os.uname().nodename, *(oct(os.stat(n).st_mode) for n in glob.glob("/tmp/hvdrun-hosts-*")))
"""


@pytest.mark.usefixtures("files")
def test_a_list_of_hosts_in_a_file_is_read_and_removed(rig, python):
    hosts = ("-H", "server1:1,root@server2:2,10.77.0.3:1")
    hvdrun = rig.inside("server1", python, *script(IN_A_FILE), *hosts)
    done = run_program([*hvdrun, python, *script(SHOW_FILES)], LIMIT_S)
    assert sorted(done.stdout.splitlines()) == [
        "[0] server1 0o100600",
        "[1] server2",
        "[2] server2",
        "[3] server3",
    ], done


INHERITED = {
    **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "9"),
    "MASTER_ADDR": "elsewhere",
    "OUTER": "job",
}


@pytest.mark.wide_in("mpich")
def test_on_several_hosts_the_place_in_another_job_is_replaced(hvdrun, monkeypatch):
    for name, value in INHERITED.items():
        monkeypatch.setenv(name, value)
    show = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $OUTER"
    done = hvdrun("-H", "server1:1,server2:2", "sh", "-c", show)
    places = ["0 3 0 1", "1 3 0 2", "2 3 1 2"]
    lines = [f"[{rank}] {place} server1 job" for rank, place in enumerate(places)]
    assert sorted(done.stdout.splitlines()) == lines, done


@pytest.mark.long
@pytest.mark.usefixtures("to_servers")
def test_hosts_may_be_named_by_their_ipv6_addresses(hvdrun, python):
    done = hvdrun("-H", "[fd77::2]:1,root@[fd77::3]:2", python, *script(WHERE))
    assert sorted(done.stdout.splitlines()) == [
        "[0] 0 3 server2 0 1 7",
        "[1] 1 3 server3 0 2 7",
        "[2] 2 3 server3 1 2 7",
    ], done


@pytest.mark.long
def test_two_names_of_a_machine_are_one_host(hvdrun, python):
    done = hvdrun("-H", "server2:1,10.77.0.2:1,server3:1", python, *script(WHERE))
    assert sorted(done.stdout.splitlines()) == [
        "[0] 0 3 server2 0 2 7",
        "[1] 1 3 server2 1 2 7",
        "[2] 2 3 server3 0 1 7",
    ], done


@pytest.mark.long
@pytest.mark.parametrize(
    ("variables", "nodes"),
    [
        ({"PBS_NODEFILE": "", "PBS_JOBID": "7.site", "PBS_ENVIRONMENT": "PBS_BATCH"}, "{0}{1}{0}"),
        ({"LSB_DJOB_HOSTFILE": "", "LSB_JOBID": "7", "LSF_BINDIR": "/none"}, "{0}{0}{1}"),
        ({"PE_HOSTFILE": "", "JOB_ID": "7", "SGE_ROOT": "/none", "ARC": "x"}, "{0} 2 q\n{1} 1 q\n"),
    ],
    ids=["PBS", "LSF", "SGE"],
)
def test_the_hosts_of_other_schedulers_are_found(
    hvdrun, rig, python, monkeypatch, variables, nodes
):
    one, other = ("server1", "server2") if " " in nodes else ("server1\n", "server2\n")
    (rig.share / "nodes").write_text(nodes.format(one, other))
    for name, value in variables.items():
        monkeypatch.setenv(name, value or str(rig.share / "nodes"))
    done = hvdrun(python, *script(WHERE))
    assert sorted(done.stdout.splitlines()) == [
        "[0] 0 3 server1 0 2 7",
        "[1] 1 3 server1 1 2 7",
        "[2] 2 3 server2 0 1 7",
    ], done


@pytest.mark.wide_in("openmpi")
def test_a_hostfile_says_where_too(hvdrun, rig):
    (rig.share / "hosts").write_text("# two hosts\nserver1 slots=1\nserver2 slots=2 max_slots=4\n")
    done = hvdrun("--hostfile", rig.share / "hosts", "sh", "-c", "hostname")
    assert sorted(done.stdout.splitlines()) == ["[0] server1", "[1] server2", "[2] server2"], done


def test_remote_ranks_have_the_same_folder_path_and_variables(rig, hvdrun, python, monkeypatch):
    temporary = rig.share / "temporary"
    temporary.mkdir(exist_ok=True)
    monkeypatch.setenv("ODD", 'a b;$x"\n,c:')
    monkeypatch.setenv("PATH", f"{python.parent}:/bin")
    monkeypatch.setenv("TMPDIR", str(temporary))
    function = "() {  echo loaded\n}"
    monkeypatch.setenv("BASH_FUNC_module%%", function)
    monkeypatch.setenv("V_DASH-NAME", "dash")
    names = ["ODD", "GIVEN", "PATH", "TMPDIR", "MASTER_ADDR", "RANK", "WORLD_SIZE", "LOCAL_RANK"]
    names += ["BASH_FUNC_module%%", "V_DASH-NAME"]
    code = f"import os; print(os.getcwd(), [os.environ.get(n) for n in {names}], sep='|')"
    done = hvdrun("-H", "server1:1,server2:2", "-x", "GIVEN=x=y z", "python", "-c", code)
    remote = done.of_rank(2).stdout.strip()
    folder, values = remote.split("|")
    assert folder == str(ROOT)
    expected = ['a b;$x"\n,c:', "x=y z", f"{python.parent}:/bin", None, "server1", "2", "3", "1"]
    expected += [function, "dash"]
    assert values == str(expected)


@pytest.mark.wide_in("openmpi")
def test_standard_input_reaches_a_rank_0_on_another_host(rig, python):
    command = rig.inside("server1", python.with_name("hvdrun"), "-H", "server2:1,server3:1")
    code = "import os, sys; print(os.environ['RANK'], len(sys.stdin.read()))"
    done = subprocess.run(
        [*command, python, "-c", code],
        input="x" * 300_000,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert sorted(done.stdout.splitlines()) == ["[0] 0 300000", "[1] 1 0"], done


FAILING = """
    from mpi4py import MPI
    import os, sys
    comm = MPI.COMM_WORLD
    if comm.rank == 2:
        print("the reason", file=sys.stderr, flush=True)
        {}
    comm.Barrier()
"""


@pytest.mark.wide_in("openmpi")
@pytest.mark.parametrize(
    ("end", "code", "how"),
    [
        pytest.param("os._exit(3)", 3, "ended with exit code 3", marks=pytest.mark.wide),
        pytest.param("comm.Abort(7)", 7, "ended with exit code 7", marks=pytest.mark.wide),
        ("os.kill(os.getpid(), 9)", 137, "was ended by SIGKILL"),
    ],
)
def test_a_rank_that_dies_on_the_other_host_ends_the_job(hvdrun, rig, python, end, code, how):
    before = rig.files("server2")
    done = hvdrun("-H", "server1:2,server2:2", python, *script(FAILING.format(end)))
    assert done.code == code, done
    report = done.stderr[done.stderr.rindex("hvdrun: rank") :]
    assert report.startswith(f"hvdrun: rank 2 on server2 {how}")
    assert "[2] the reason\n" in done.stderr
    assert "    the reason\n" in report or "its last lines on stderr are just above" in report
    rig.assert_nothing_left()
    assert rig.files("server2") == before


@pytest.mark.wide_in("mpich")
def test_an_exception_on_the_other_host_is_shown_last(hvdrun, python):
    text = "import os, time; os.environ['RANK'] == '1' and 1 / 0; time.sleep(60)"
    done = hvdrun("-H", "server1:1,server2:1", python, "-c", text)
    assert done.code == 1
    assert "hvdrun: rank 1 on server2 ended with exit code 1" in done.stderr
    *_, error, report, where = done.stderr.splitlines()
    assert error == "[1] ZeroDivisionError: division by zero"
    assert report.startswith("hvdrun: rank 1 on server2 ended with exit code 1")
    assert where == "hvdrun: its last lines on stderr are just above"


@pytest.fixture
def running(rig, python):
    """hvdrun on server1 with ranks that wait on two hosts."""
    hvdrun = [python.with_name("hvdrun"), "-H", "server1:1,server2:2", "--host-timeout", "6"]
    with job(rig.inside("server1", *hvdrun, python, "-c", WAITS), ranks=3) as process:
        yield process


@pytest.mark.wide_in("openmpi")
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.wide)], ids=str
)
def test_a_signal_leaves_nothing_on_any_host(running, rig, number):
    running.send_signal(number)
    assert running.wait(LIMIT_S) == 128 + number
    rig.assert_nothing_left()


def test_when_hvdrun_is_killed_nothing_stays_on_any_host(running, rig):
    # With it goes the command that runs it in server1.
    rig("exec", "server1", "pkill", "-KILL", "-f", "bin/hvdrun -H")
    running.wait(LIMIT_S)
    rig.assert_nothing_left()


# Where nothing is heard of it, the others wait for ten seconds.
@pytest.mark.wide_in("mpich")
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(["kill", "--loud"], marks=pytest.mark.wide),
        pytest.param(["cut"], marks=pytest.mark.wide),
        ["kill"],
    ],
    ids=" ".join,
)
def test_a_host_that_is_lost_ends_the_job_everywhere(running, rig, how):
    rig(how[0], "server2", *how[1:])
    assert running.wait(LIMIT_S) == 72
    said = without_delays(running.stderr.read())
    assert said.startswith("hvdrun: server2 is lost: ")
    rig.assert_nothing_left()
