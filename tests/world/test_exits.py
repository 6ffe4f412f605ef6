"""How a rank ends, and how the others then end. Each test starts its own job, with a time limit."""

from pathlib import Path

import pytest

from tests.harness.needs import lacking
from tests.harness.programs import run_program
from tests.harness.worlds import MPIS, mpiexec_command, orphaned_files, python_of, shared_files

LIMIT_S = 60

OWN = "import sys, time, torch, hvdlite as hvd; hvd.init()\n"
USERS = "from mpi4py import MPI\n" + OWN

OTHERS_WAIT = "if hvd.rank() != 1: hvd.allreduce(torch.ones(1), name='nobody answers')\n"
FROM_A_POOL = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor() as pool: pool.submit(sys.exit, 5).result()
"""
FROM_A_SIGNAL = """
import os, signal
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5))
os.kill(os.getpid(), signal.SIGUSR1)
time.sleep(60)
"""


@pytest.fixture(params=MPIS)
def mpi(request):
    return request.param


@pytest.fixture(scope="module", autouse=True)
def what_mpich_leaves():
    """MPICH's own files, which it leaves behind when it is aborted; hvdrun removes them."""
    before = shared_files()
    yield
    for path in orphaned_files(before):
        if Path(path).name.startswith(("mpich_shm_", "sm_segment.")):
            Path(path).unlink(missing_ok=True)


def run(mpi, code, size=2):
    if not (python_of(mpi).parent / "mpiexec").exists():
        lacking(f"no {mpi}; `make build`")
    command = [*mpiexec_command(mpi, size), python_of(mpi), "-c", code]
    return run_program(command, LIMIT_S)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        pytest.param("raise KeyError('boom')", 1, id="exception"),
        pytest.param("sys.exit(3)", 3, id="sys.exit"),
        pytest.param("raise SystemExit(4)", 4, id="SystemExit", marks=pytest.mark.wide),
    ],
)
def test_a_rank_that_fails_ends_the_job_with_its_exit_code(mpi, end, code):
    finished = run(mpi, OWN + OTHERS_WAIT + end)
    assert finished.code == code, finished
    if "boom" in end:
        assert "hvdlite: rank 1 on " in finished.stderr
        assert finished.stderr.count("KeyError: 'boom'") == 1
        assert "rank 0" not in finished.stderr


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(FROM_A_POOL, id="pool"),
        pytest.param(FROM_A_SIGNAL, id="signal", marks=pytest.mark.wide),
    ],
)
def test_an_exit_from_a_thread_pool_or_a_signal_handler_gives_the_job_its_code(end):
    assert run(MPIS[-1], OWN + OTHERS_WAIT + end).code == 5


@pytest.mark.wide
@pytest.mark.parametrize(
    ("end", "code"),
    [("raise KeyError('boom')", 1), ("sys.exit(3)", 3), ("raise SystemExit(4)", None)],
    ids=["exception", "sys.exit", "SystemExit"],
)
def test_a_rank_that_fails_ends_the_job_also_where_its_user_has_started_mpi(mpi, end, code):
    finished = run(mpi, USERS + OTHERS_WAIT + end)
    assert finished.code != 0
    assert code is None or finished.code == code, finished


@pytest.mark.wide_in("openmpi")
@pytest.mark.parametrize(
    "start",
    [pytest.param(OWN, id="own"), pytest.param(USERS, id="users", marks=pytest.mark.wide)],
)
def test_a_rank_that_ends_in_good_order_waits_for_the_others(mpi, start):
    late = "if hvd.rank() == 1: time.sleep(1); print('late')\n"
    caught = "try: sys.exit(3)\nexcept SystemExit: pass\n"
    finished = run(mpi, start + late + caught)
    assert finished.code == 0, finished
    assert "late" in finished.stdout


@pytest.mark.wide_in("mpich")
def test_a_failure_after_others_have_ended_in_good_order_is_the_jobs(mpi):
    finished = run(mpi, OWN + "if hvd.rank() == 1: time.sleep(1); sys.exit(7)\n", size=3)
    # MPICH's mpiexec ends the other ranks by SIGKILL, and now and then its code is that of one of
    # them. (hvdrun's is the failing rank's.)
    assert finished.code == 7 or (mpi == "mpich" and finished.code == 9), finished


@pytest.mark.wide_in("openmpi")
@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(3 * rank)", 3), pytest.param("", 0, marks=pytest.mark.wide)]
)
def test_a_shutdown_before_the_end_changes_nothing(mpi, end, code):
    assert run(mpi, OWN + "rank = hvd.rank(); hvd.shutdown(); " + end).code == code


SHUTS_DOWN = """
sets = [hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2])]
hvd.allreduce(torch.ones(3))
if hvd.rank() in (0, 1): hvd.allreduce(torch.ones(3), process_set=sets[0])
time.sleep(0.2 * hvd.rank())
hvd.shutdown()
"""


@pytest.mark.parametrize("begin", [OWN, pytest.param(USERS, marks=pytest.mark.wide)])
def test_what_ranks_say_as_they_leave_is_received_by_those_that_left_before(begin, monkeypatch):
    """Else UCX warns of it in MPI_Finalize."""
    monkeypatch.setenv("HVDLITE_HOST_RANKS", "1,1,1")
    monkeypatch.setenv("MPIR_CVAR_NOLOCAL", "1")  # as between hosts: through UCX
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    finished = run("mpich", begin + SHUTS_DOWN, 3)
    assert (finished.code, finished.stdout, finished.stderr) == (0, "", ""), finished


@pytest.mark.parametrize("level", ["warning", "debug"])
def test_a_traceback_of_a_failed_operation_ends_at_the_call_of_the_user(level, monkeypatch):
    monkeypatch.setenv("HVDLITE_LOG_LEVEL", level)
    differ = "def step(): hvd.allreduce(torch.ones(1 + hvd.rank()), name='loss')\nstep()"
    finished = run(MPIS[0], OWN + differ)
    assert finished.code == 1, finished
    lines = finished.stderr.splitlines()
    files = [line for line in lines if "  File " in line]
    assert any("in step" in line for line in files), finished.stderr
    assert ("hvdlite" in "".join(files)) == (level == "debug"), files
    assert "HorovodInternalError: allreduce 'loss': " in finished.stderr
