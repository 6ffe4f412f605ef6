"""hvdrun in allocations of a real Slurm, with mpirun and with srun."""

import os
import re
import subprocess
import time

import pytest

from tests.harness.busy import without_delays
from tests.harness.needs import lacking
from tests.harness.programs import run_program
from tests.harness.worlds import MPIS, ROOT
from tests.rig import slurm as slurms
from tests.rig.attack import attack
from tests.rig.conftest import HOSTS, WAITS, job
from tests.rig.test_launch import WHERE, script
from tests.rig.test_silence import learning

pytestmark = [pytest.mark.rig, pytest.mark.long]

LIMIT_S = 60.0
WAYS = {"mpirun": (), "srun": ("--mpi", "slurm")}
# For what neither depends on: each way and each MPI once. The tests without this mark have shown
# that each way starts the ranks of each MPI, knows their places and ends them.
EACH_ONCE = pytest.mark.parametrize(
    ("python", "way"), [("openmpi", "mpirun"), ("mpich", "srun")], indirect=True
)


@pytest.fixture(scope="module")
def conf(_rig):
    if reason := slurms.lacking():
        lacking(reason)
    with slurms.slurm(_rig, HOSTS) as path:
        yield path


@pytest.fixture(params=WAYS)
def way(request):
    """The options with which mpirun or srun starts the ranks."""
    return WAYS[request.param]


@pytest.fixture
def within(rig, conf, python):
    """within(*options of salloc): the command that runs hvdrun in such an allocation."""

    def command(*options, tool=("salloc", "-Q")):
        inside = ["env", f"SLURM_CONF={conf}", *tool, *options, python.with_name("hvdrun")]
        return rig.inside("server1", *inside)

    yield command
    # The job of a test that has failed would keep the others waiting.
    rig("exec", "server1", "env", f"SLURM_CONF={conf}", "scancel", "--user=root")


@pytest.fixture
def run(within):
    def run(options, *arguments):
        return run_program([*within(*options), *arguments], LIMIT_S)

    return run


@pytest.mark.parametrize(
    ("python", "way", "options", "expected"),
    [
        (mpi, way, options, expected)
        for number, (options, expected) in enumerate(
            [
                (["-N3", "--ntasks-per-node=1"], ["server1", "server2", "server3"]),
                (["-N3", "-n5", "--exclusive"], [*2 * ["server1"], *2 * ["server2"], "server3"]),
                (["-N3", "-n5"], [*3 * ["server1"], "server2", "server3"]),
                (["-w", "server2", "-n2"], ["server2", "server2"]),  # salloc's shell is not in it
            ]
        )
        for mpi, way in zip(MPIS, list(WAYS)[:: -1 if number % 2 else 1], strict=True)
    ],
    indirect=["python", "way"],
)
def test_hosts_and_slots_are_those_of_the_allocation(run, python, way, options, expected):
    done = run(options, *way, python, *script(WHERE))
    assert done.code == 0, done
    size = len(expected)
    lines = [
        f"[{rank}] {rank} {size} {host} {expected[:rank].count(host)} {expected.count(host)}"
        f" {2**size - 1}"
        for rank, host in enumerate(expected)
    ]
    assert sorted(done.stdout.splitlines()) == lines, done
    assert without_delays(done.stderr) == ""


@EACH_ONCE
def test_fewer_ranks_than_tasks_fill_host_by_host_and_more_are_an_error(run, way):
    done = run(["-N3", "-n5"], *way, "-np", "4", "sh", "-c", "hostname")
    expected = ["[0] server1", "[1] server1", "[2] server1", "[3] server2"]
    assert sorted(done.stdout.splitlines()) == expected, done
    done = run(["-N3", "-n5"], *way, "-np", "6", "true")
    assert done.code == 66
    assert "-np 6 asks for more processes than the 5 slots" in done.stderr
    assert "ask Slurm for more (--ntasks)" in done.stderr


@EACH_ONCE
def test_where_no_tasks_were_asked_for_processors_are_no_limit(run, way):
    done = run(["-N2"], *way, "true")
    assert done.code == 0, done
    done = run(
        ["-w", "server1", "--exclusive"], *way, "-np", str(slurms.CPUS + 1), "sh", "-c", "hostname"
    )
    assert sorted(done.stdout.splitlines()) == [f"[{r}] server1" for r in range(slurms.CPUS + 1)]
    said = without_delays(done.stderr)
    assert said == "hvdrun: 5 processes on server1, which has 4 cores: they share them\n"


@EACH_ONCE
def test_a_host_list_places_unequal_ranks_within_the_allocation(run, way):
    words = ["sh", "-c", "hostname; echo err >&2"]
    done = run(["-N3", "--ntasks-per-node=1"], *way, "-H", "server1:2,server3:1", *words)
    assert done.code == 0, done
    assert sorted(done.stdout.splitlines()) == ["[0] server1", "[1] server1", "[2] server3"], done
    said = without_delays(done.stderr)
    assert sorted(said.splitlines()) == ["[0] err", "[1] err", "[2] err"]


def test_ranks_that_grow_in_number_are_more_than_pmi_2_can_say(run, python, way):
    done = run(["-N3", "-n5"], *way, "-H", "server1:1,server2:2", python, *script(WHERE))
    if way and "mpich" in str(python):
        assert done.code == 64, done
        assert "can't tell the ranks of MPICH which host they are on" in done.stderr
    else:
        lines = ["[0] 0 3 server1 0 1 7", "[1] 1 3 server2 0 2 7", "[2] 2 3 server2 1 2 7"]
        assert sorted(done.stdout.splitlines()) == lines, done


def test_ranks_know_their_place_and_have_no_step_of_another(run, python, way):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "GIVEN")
    code = f"import os; print(*[os.environ.get(name) for name in {names}])"
    done = run(["-w", "server[1-2]", "-n3"], *way, "-x", "GIVEN=x=y z", python, "-c", code)
    assert sorted(done.stdout.splitlines()) == [
        "[0] 0 3 0 2 3 x=y z",
        "[1] 1 3 1 2 3 x=y z",
        "[2] 2 3 0 1 3 x=y z",
    ], done


def test_an_allreduce_goes_between_its_hosts(run, python, way):
    code = (
        "import torch, hvdlite.torch as hvd; hvd.init();"
        "print(hvd.size(), hvd.local_size(),"
        " hvd.allreduce(torch.full((5000,), 2.0**hvd.rank()), op=hvd.Sum)[-1].item())"
    )
    done = run(["-w", "server[1-2]", "-n3"], *way, python, "-c", code)
    assert done.code == 0, done
    expected = ["3 2 7.0\n", "3 2 7.0\n", "3 1 7.0\n"]
    assert [done.of_rank(rank).stdout for rank in range(3)] == expected, done


@EACH_ONCE
def test_the_batch_script_of_the_page_runs_as_it_stands(rig, conf, python, way):
    page = (ROOT / "docs/launching/slurm.md").read_text()
    script, sbatch = page.partition("$ cat train.sh\n")[2].partition("\n\n    $ sbatch ")[::2]
    assert sbatch.startswith("train.sh\n")
    script = re.sub("^    ", "", script, flags=re.MULTILINE)
    hvdrun = " ".join(str(word) for word in (python.with_name("hvdrun"), *way))
    assert "/path/to/venv/bin/hvdrun" in script
    (rig.share / "train.sh").write_text(script.replace("/path/to/venv/bin/hvdrun", hvdrun))
    (rig.share / "train.py").write_text("import os; print(os.uname().nodename)")
    out = rig.share / "train.out"
    options = ["--wait", "-Q", "-w", "server[1-2]", f"--chdir={rig.share}", f"--output={out}"]
    command = ["env", f"SLURM_CONF={conf}", "sbatch", *options, rig.share / "train.sh"]
    done = run_program(rig.inside("server1", *command), LIMIT_S)
    assert done.code == 0, (done, out.read_text())
    ranks = [f"[{rank}] server{1 + rank // 4}" for rank in range(8)]
    assert sorted(out.read_text().splitlines()) == ranks


def test_the_first_failure_is_reported_and_its_code_returned(run, rig, python, way):
    code = "import os, sys, time; os.environ['RANK'] == '2' and sys.exit('over'); time.sleep(90)"
    done = run(["-w", "server[1-2]", "--ntasks-per-node=2"], *way, python, "-c", code)
    assert done.code == 1, done
    assert "hvdrun: rank 2 on server2 ended with exit code 1" in done.stderr
    *_, last, report, where = done.stderr.splitlines()
    assert last == "[2] over"
    assert report.startswith("hvdrun: rank 2 on server2 ended with exit code 1")
    assert where == "hvdrun: its last lines on stderr are just above"
    rig.assert_nothing_left()


@EACH_ONCE
def test_standard_input_is_rank_0s(within, rig, python, way):
    code = "import os, sys; print(os.environ['RANK'], len(sys.stdin.read()))"
    done = subprocess.run(
        [*within("-w", "server[2-3]", "-n2"), *way, python, "-c", code],
        input="x" * 300_000,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert sorted(done.stdout.splitlines()) == ["[0] 0 300000", "[1] 1 0"], done


@EACH_ONCE
def test_another_user_of_the_hosts_runs_nothing_as_the_owner_of_a_job(run, rig, way):
    with attack(rig) as attacker:
        done = run(["-w", "server[1-2]", "-n3"], *way, "bash", "-c", "sleep 0.5; echo ok")
    assert attacker.ran_as == set()
    assert done.code == 0, done
    assert sorted(done.stdout.splitlines()) == ["[0] ok", "[1] ok", "[2] ok"], done
    assert len(attacker.tried) >= 2  # hvdrun's name and that of the other host


@pytest.fixture
def running(within, python, way):
    """hvdrun in an allocation, with ranks that wait on two hosts."""
    options = [*way, "--host-timeout", "6"]
    command = [*within("-w", "server[1-2]", "-n3"), *options, python, "-c", WAITS]
    with job(command, ranks=3) as process:
        yield process


# Not salloc, whose command line ends with hvdrun's.
HVDRUN = r"bin/python\S* \S*bin/hvdrun"


def test_a_signal_leaves_nothing_on_any_host(running, rig):
    rig("exec", "server1", "pkill", "-INT", "-f", HVDRUN)
    assert running.wait(LIMIT_S) == 130
    rig.assert_nothing_left()


def test_when_hvdrun_is_killed_nothing_stays_on_any_host(running, rig):
    rig("exec", "server1", "pkill", "-KILL", "-f", HVDRUN)
    running.wait(LIMIT_S)  # for salloc, whose exit code this is
    rig.assert_nothing_left()


def test_a_host_that_is_cut_off_ends_the_job(running, rig, conf):
    rig("cut", "server2")
    assert running.wait(LIMIT_S) == 72
    said = without_delays(running.stderr.read())
    assert said.startswith("hvdrun: server2 is lost: ")
    rig.restore()
    slurms.wait_until_idle(rig, conf, HOSTS)
    rig.assert_nothing_left()


@EACH_ONCE
@pytest.mark.wide
def test_a_link_that_was_down_costs_a_job_nothing_but_time(within, rig, conf, python, way):
    salloc = within("-w", "server[1-2]", "-n2")
    with learning(rig, python, *way, within=salloc) as running:
        rig("cut", "server2")
        time.sleep(11)
        rig.restore()
        code, longest_s, said = running.ends()
    assert code == 0, said
    assert min(longest_s) > 10
    assert "hvdrun: server2 is back after " in said
    slurms.wait_until_idle(rig, conf, HOSTS)


@EACH_ONCE
def test_in_a_step_of_its_own_hvdrun_has_the_whole_job(rig, conf, python, way):
    options = ["-w", "server[1-2]", "-n3", "srun", "--mpi=none", "-n1", "-N1"]
    inside = ["env", f"SLURM_CONF={conf}", "salloc", "-Q", *options, python.with_name("hvdrun")]
    done = run_program(rig.inside("server1", *inside, *way, "sh", "-c", "hostname"), LIMIT_S)
    assert done.code == 0, done
    lines = sorted(done.stdout.splitlines())
    assert lines == ["[0] server1", "[1] server1", "[2] server2"], done


@pytest.mark.parametrize("python", ["mpich"], indirect=True)
def test_srun_may_start_hvdrun_once_only(rig, conf, python):
    inside = ["env", f"SLURM_CONF={conf}", "srun", "-n3", python.with_name("hvdrun"), "true"]
    done = run_program(rig.inside("server1", *inside), LIMIT_S)
    assert len(re.findall("srun has started hvdrun 3 times; start it once", done.stderr)) == 2, done


def test_a_slurm_without_the_mpis_plugin_is_an_error_that_says_so(run, rig, monkeypatch):
    fake = rig.share / "bin"
    fake.mkdir(exist_ok=True)
    (fake / "srun").write_text("#!/bin/sh\nprintf 'MPI plugin types are...\\n\\tnone\\n'\n")
    (fake / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake}:{os.environ['PATH']}")
    done = run(["-N1"], "--mpi", "slurm", "true")
    assert done.code == 67, done
    assert "`srun --mpi=list` shows none; leave --mpi slurm out" in done.stderr


TRAINS = """
import os, sys, time
import torch, hvdlite.torch as hvd
hvd.init()
hvd.preempted()
path = sys.argv[1]
first = int(open(path).read()) if os.path.exists(path) else 0
print("run from", first, flush=True)
for step in range(first, 10**9 if not first else first + 3):
    hvd.allreduce(torch.ones(10))
    if hvd.preempted():
        if hvd.rank() == 0:
            with open(path, "w") as file:
                file.write(str(step + 1))
        print("saved", step + 1, flush=True)
        break
else:
    print("done at", step, flush=True)
"""


def output_of(rig, conf, *command):
    return rig("exec", "server1", "env", f"SLURM_CONF={conf}", *command)


def submit(rig, conf, tmp, python, way, *options):
    """The job's number. Its batch script becomes hvdrun."""
    (rig.share / "preempted.py").write_text(TRAINS)
    train = [python.with_name("hvdrun"), *way, "--requeue", python, "preempted.py", tmp / "step"]
    (tmp / "train.sh").write_text(f"#!/bin/bash\nexec {' '.join(map(str, train))}\n")
    options = [*options, "-w", "server[1-2]", "-n3", f"--chdir={rig.share}"]
    words = [*options, "--open-mode=append", f"--output={tmp}/out", tmp / "train.sh"]
    return output_of(rig, conf, "sbatch", "--parsable", *words).strip()


def wait_for(rig, conf, number, path, text):
    """Until the job's output contains it."""
    deadline = time.monotonic() + LIMIT_S
    while not (path.exists() and text in path.read_text()):
        said = path.read_text() if path.exists() else "nothing"
        assert time.monotonic() < deadline, said + output_of(rig, conf, "scontrol", "show", "job")
        time.sleep(0.1)


@EACH_ONCE
def test_a_warned_job_saves_is_requeued_and_goes_on(rig, conf, python, way, tmp_path_factory):
    folder = rig.share / f"requeue-{python.parents[1].name}"
    folder.mkdir()
    job = submit(rig, conf, folder, python, way, "--requeue")
    out = folder / "out"
    wait_for(rig, conf, job, out, "[0] run from 0")
    output_of(rig, conf, "scancel", "--batch", "--signal=USR1", job)
    wait_for(rig, conf, job, out, "[0] saved ")
    wait_for(rig, conf, job, out, f"scontrol requeue {job}`")
    saved = int((folder / "step").read_text())
    # Slurm waits two minutes before it starts a job again; that is not what is tested. But what it
    # starts while the first run is being cleared away fails.
    slurms.wait_until_idle(rig, conf, HOSTS)
    # It knows the runs of a job apart by the second of their start.
    second = int(time.time()) + 2
    while time.time() < second:
        time.sleep(0.05)
    output_of(rig, conf, "sh", "-c", f"scontrol update job={job} StartTime=now 2>&1 || true")
    wait_for(rig, conf, job, out, f"[2] done at {saved + 2}")
    slurms.wait_until_idle(rig, conf, HOSTS)


@pytest.mark.parametrize(("python", "way"), [("mpich", "srun")], indirect=True)
def test_a_cancelled_job_is_not_requeued(rig, conf, python, way):
    folder = rig.share / "cancelled"
    folder.mkdir()
    job = submit(rig, conf, folder, python, way, "--requeue")
    wait_for(rig, conf, job, folder / "out", "[0] run from 0")
    output_of(rig, conf, "scancel", "--full", job)
    words = "the job is not requeued: Slurm is ending it already (scancel, or the end of its time)"
    wait_for(rig, conf, job, folder / "out", words)
    slurms.wait_until_idle(rig, conf, HOSTS)
    assert "JobState=CANCELLED" in output_of(rig, conf, "scontrol", "show", "job", job)
