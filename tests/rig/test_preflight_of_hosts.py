"""hvdrun reports hosts that lack what a job needs before it starts anything there."""

import os
import re
import shlex
import shutil
import sys
import textwrap
from pathlib import Path

import pytest

from tests.harness.needs import lacking
from tests.harness.programs import run_program
from tests.rig.preflight import ALL, BOTH, UNDER_ONE_MPI, only_finding

pytestmark = [pytest.mark.rig, pytest.mark.usefixtures("nothing_remembered")]

LIMIT_S = 60.0


@pytest.fixture
def firewall(rig):
    """firewall(host, target): only ssh reaches the host; all else meets that target."""
    if not shutil.which("iptables", path=f"{os.environ['PATH']}:/usr/sbin:/sbin"):
        lacking("this test needs iptables: apt-get install iptables")
    shut = []

    def shut_off(host, target):
        shut.append(host)
        for rule in (
            "-i lo -j ACCEPT",
            "-m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
            "-p tcp --dport 22 -j ACCEPT",
            f"-p tcp -j {target}",
        ):
            rig("exec", host, "iptables", "-w", "-A", "INPUT", *rule.split())

    yield shut_off
    for host in shut:
        rig("exec", host, "iptables", "-w", "-F", "INPUT")


@UNDER_ONE_MPI
@pytest.mark.long
@pytest.mark.parametrize(
    ("host", "target", "words"),
    [
        ("server2", "DROP", "server1, server3 can't connect to 10.77.0.2 over TCP: no answer"),
        ("server1", "REJECT", "server2, server3 can't connect to 10.77.0.1 over TCP: refused"),
    ],
)
def test_a_firewall_that_lets_only_ssh_through_is_said(
    hvdrun, rig, python, firewall, files, host, target, words
):
    firewall(host, target)
    done = hvdrun("-H", ALL, "true")
    assert done.code == 71, done
    what, found, helps = only_finding(done, host)
    assert what == "connections"
    assert found.startswith(words)
    assert re.match(r"open TCP between the hosts, both ways \(ranks .*listen on .*port", helps)


@pytest.mark.long
def test_a_network_that_a_firewall_closes_is_left_out_if_another_one_is_open(
    hvdrun, rig, python, firewall
):
    """The second network has the same cable as the first."""
    for number, host in enumerate(("server1", "server2"), 1):
        rig("exec", host, "ip", "address", "add", f"10.98.0.{number}/24", "dev", "eth0")
    rule = ("INPUT", "-p", "tcp", "-d", "10.98.0.2", "!", "--dport", "22", "-j", "DROP")
    rig("exec", "server2", "iptables", "-w", "-I", *rule)
    done = hvdrun("-H", BOTH, "--verbose", python, "-c", textwrap.dedent(ADDS))
    rig("exec", "server2", "iptables", "-w", "-D", *rule)
    for number, host in enumerate(("server1", "server2"), 1):
        rig("exec", host, "ip", "address", "delete", f"10.98.0.{number}/24", "dev", "eth0")
    assert done.code == 0, done
    assert "(not eth0 10.98.0.2: server1 can't connect to 10.98.0.2)" in done.stderr


@pytest.mark.long
def test_a_folder_for_temporary_files_that_is_read_only_is_said(hvdrun, rig, python):
    rig("exec", "server2", "mount", "-o", "remount,ro", "/tmp")
    done = hvdrun("-H", BOTH, "hostname")
    rig("exec", "server2", "mount", "-o", "remount,rw", "/tmp")
    if "mpich" in str(python):
        assert done.code == 0, done
        assert "hvdrun: warning: server2: nothing can be written to /tmp: Read-only" in done.stderr
    else:
        assert done.code == 71, done
        what, found, helps = only_finding(done)
        assert (what, found) == (
            "temporary files",
            "nothing can be written to /tmp: Read-only file system",
        )
        assert "set TMPDIR on server2" in helps


@UNDER_ONE_MPI
@pytest.mark.long
def test_a_folder_that_one_host_lacks_is_said(rig, python, files):
    rig("exec", "server1", "mkdir", "/tmp/my job")
    command = ["env", "-C", "/tmp/my job", python.with_name("hvdrun"), "-H", BOTH, "true"]
    done = run_program(rig.inside("server1", *command), LIMIT_S)
    rig("exec", "server1", "rmdir", "/tmp/my job")
    assert done.code == 71
    what, found, helps = only_finding(done)
    assert (what, found) == ("directory", "/tmp/my job: No such file or directory")
    assert "share the folder" in helps


@UNDER_ONE_MPI
@pytest.mark.long
@pytest.mark.parametrize("kind", ["program", "script"])
def test_a_program_or_script_that_one_host_lacks_is_said(hvdrun, rig, python, files, kind):
    path = "/tmp/only-here"
    rig("exec", "server1", "cp", "/bin/true", path)
    done = hvdrun("-H", BOTH, *([path] if kind == "program" else [python, "-u", path]))
    rig("exec", "server1", "rm", path)
    assert done.code == 69
    what, found, _ = only_finding(done)
    assert (what, found) == ("program", f"'{path}': there is no such file")


@UNDER_ONE_MPI
@pytest.mark.long
def test_a_host_without_the_interpreter_is_said(hvdrun, rig, python, files):
    (rig.share / "empty").mkdir(exist_ok=True)
    rig.cover("server2", python.parent, rig.share / "empty")
    done = hvdrun("-H", BOTH, "/bin/true")
    assert done.code == 71
    what, found, helps = only_finding(done)
    assert what == "Python"
    assert "/bin/python does not run there" in found
    assert "No such file or directory" in found
    assert "install it on server2" in helps


@UNDER_ONE_MPI
@pytest.mark.long
def test_another_python_is_said(hvdrun, rig, python, files):
    real = "/run/real"
    rig("exec", "server2", "mkdir", "-p", real)
    rig.cover("server2", Path(real), Path(sys.base_prefix))
    code = """
        import runpy, sys
        sys.version_info = (3, 9, 18, "final", 0)
        sys.argv = sys.argv[3:]
        runpy.run_path(sys.argv[0], run_name="__main__")
    """
    words = [f"{real}/bin/{python.resolve().name}", "-I", "-S", "-c", textwrap.dedent(code)]
    rig.cover("server2", python, f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    done = hvdrun("-H", BOTH, "/bin/true")
    assert done.code == 71
    what, found, helps = only_finding(done)
    here = "{}.{}.{}".format(*sys.version_info)
    assert what == "Python"
    assert re.search(rf" is Python 3\.9\.18 for \w+, here Python {re.escape(here)} for ", found)
    assert "install the same Python on server2" in helps


@pytest.mark.long
@pytest.mark.parametrize(
    ("python", "package"),
    [("openmpi", "hvdlite"), ("mpich", "mpi4py"), ("openmpi", "MPI"), ("mpich", "MPI")],
    indirect=["python"],
)
def test_another_version_of_a_package_is_said(hvdrun, rig, python, files, package):
    if package == "MPI":
        package = "mpich" if "mpich" in str(python) else "openmpi"
    (metadata,) = python.parents[1].glob(
        f"lib/python3*/site-packages/{package}-*.dist-info/METADATA"
    )
    text = metadata.read_text()
    (version,) = re.findall(r"(?m)^Version: (.*)$", text)
    rig.cover("server2", metadata, text.replace(f"\nVersion: {version}\n", "\nVersion: 0.0.7\n"))
    done = hvdrun("-H", BOTH, "true")
    assert done.code == 71
    what, found, helps = only_finding(done)
    assert (what, found) == (package, f"{package} is 0.0.7, here {version}")
    # (An index may have another one's package of our name.)
    remedy = f" -m pip install {package}=={version}"
    assert "copy hvdlite's folder" in helps if package == "hvdlite" else helps.endswith(remedy)


@pytest.mark.long
def test_a_name_that_one_host_does_not_know_matters_where_the_mpi_needs_it(hvdrun, rig, python):
    rig.cover("server2", Path("/etc/hosts"), "127.0.0.1 localhost\n10.77.0.2 server2\n")
    done = hvdrun("-H", BOTH, "hostname")
    if "mpich" in str(python):
        assert done.code == 71
        what, found, helps = only_finding(done)
        assert (what, found) == ("names", "server1 is unknown there")
        assert "/etc/hosts on server2" in helps
    else:
        assert done.code == 0, done
        assert "hvdrun: warning: server2: server1 is unknown there; add server1" in done.stderr


ADDS = """
    from mpi4py import MPI
    import array
    comm = MPI.COMM_WORLD
    values = array.array("d", [2.0**comm.rank] * 100_000)
    comm.Allreduce(MPI.IN_PLACE, values)
    print(set(values))
"""


@pytest.fixture
def blind_interfaces(rig):
    """Two that lead nowhere: one with the same address everywhere, as Docker's, and one that has
    each host in one subnet. Open MPI fails with either, MPICH with the second."""
    hosts = ("server1", "server2")
    for number, host in enumerate(hosts, 1):
        for name, address in (("docker0", "172.17.0.1/16"), ("fast", f"10.99.0.{number}/24")):
            rig("exec", host, "ip", "link", "add", name, "type", "veth", "peer", f"{name}-end")
            rig("exec", host, "ip", "address", "add", address, "dev", name)
            rig("exec", host, "ip", "link", "set", name, "up")
            rig("exec", host, "ip", "link", "set", f"{name}-end", "up")
    yield
    for host in hosts:
        for name in ("docker0", "fast"):
            rig("exec", host, "ip", "link", "delete", name)


@pytest.mark.long
def test_interfaces_that_lead_nowhere_are_left_out(hvdrun, python, blind_interfaces):
    done = hvdrun("-H", BOTH, "--verbose", python, "-c", textwrap.dedent(ADDS))
    assert done.code == 0, done
    assert sorted(done.stdout.splitlines()) == ["[0] {3.0}", "[1] {3.0}"]
    assert (
        "hvdrun: server2: network: eth0 10.77.0.2/24 (not docker0 172.17.0.1: server1 and server2"
        " have the same address 172.17.0.1; fast 10.99.0.2: nothing answers in 10.99.0.0/24)\n"
    ) in done.stderr


@pytest.mark.long
def test_the_user_may_choose_the_network(hvdrun, python, blind_interfaces):
    code = textwrap.dedent(ADDS) + "import os; print(os.environ['GLOO_SOCKET_IFNAME'])"
    done = hvdrun("-H", BOTH, "--network-interfaces", "10.77.0.0/16", python, "-c", code)
    assert done.code == 0, done
    assert sorted(done.stdout.splitlines()) == [
        *("[0] eth0", "[0] {3.0}", "[1] eth0", "[1] {3.0}"),
    ]
    done = hvdrun("-H", BOTH, "--network-interfaces", "ib0", python, "-c", code)
    assert done.code == 71
    assert "it has no interface that --network-interfaces names" in done.stderr


@pytest.mark.parametrize("python", ["mpich"], indirect=True)
@pytest.mark.parametrize("size", ["3m", "256k"])
def test_a_host_with_little_shared_memory_works_or_is_said(hvdrun, rig, python, size):
    before = rig.files("server2")
    rig("exec", "server2", "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", "/dev/shm")
    try:
        code = "from mpi4py import MPI; print(MPI.COMM_WORLD.allreduce(1))"
        done = hvdrun("-H", "server1:2,server2:4", python, "-c", code)
        left = rig.files("server2")
    finally:
        rig("exec", "server2", "umount", "/dev/shm")
    if size == "3m":
        assert (done.code, done.stdout.count(" 6\n")) == (0, 6), done
        assert "warning: server2: 3 MiB of 3 MiB are free in /dev/shm, and MPICH" in done.stderr
    else:
        assert done.code == 71
        what, found, helps = only_finding(done)
        assert what == "shared memory"
        assert "0.2 MiB of 0.2 MiB are free in /dev/shm, and MPICH needs 0.5 MiB" in found
        assert "--shm-size=1g" in helps
    assert left == before
