"""Signals to hvdrun, and what they do to the ranks: for real, on one machine, under both MPIs."""

import os
import shutil
import signal
import subprocess
import textwrap

import psutil
import pytest

from tests.harness.worlds import ROOT, end_tree

LIMIT_S = 60.0
# The C library keeps the signals 32 and 33 for itself: what a parent has done with them stays.
OF_GLIBC = 0b11 << 31


class Job:
    """hvdrun with ranks that run a script. Each rank prints a line that ends with 'up' first."""

    def __init__(self, python, script, *options, ranks=2, before=()):
        words = [*before, python.with_name("hvdrun"), "-np", str(ranks), *options]
        self.process = subprocess.Popen(
            [*words, python, "-u", "-c", textwrap.dedent(script)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.ranks = ranks
        self.lines = []

    def read(self, end):
        """Up to a line that ends so."""
        while not (line := self.process.stdout.readline()).rstrip().endswith(end):
            assert line, self.process.stderr.read()
            self.lines.append(line.strip())

    def says(self, begin):
        """Up to a line of hvdrun's own."""
        while not (line := self.process.stderr.readline()).startswith(begin):
            assert line
        return line.strip()

    def up(self):
        for _ in range(self.ranks):
            self.read("up")
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        return self

    def send(self, number):
        self.process.send_signal(number)

    def ends(self):
        """The exit code, the sorted lines on stdout, and stderr. Nothing of the job is left."""
        out, err = self.process.communicate(timeout=LIMIT_S)
        assert not psutil.wait_procs(self.family, timeout=10)[1]
        return self.process.returncode, sorted([*self.lines, *out.splitlines()]), err


@pytest.fixture
def start(python):
    jobs = []

    def run(script, *options, **more):
        jobs.append(Job(python, script, *options, **more))
        return jobs[-1]

    yield run
    for job in jobs:
        end_tree(job.process)
        job.process.stdout.close()
        job.process.stderr.close()


# No long sleeps: Python handles a signal that comes just before one after it.
SLEEPS = """
    import os, sys, time
    rank = os.environ["RANK"]
    try:
        # In one line, which both ranks' tracebacks name.
        for i in range(600): time.sleep(0.1) if i else print("up")
    except KeyboardInterrupt:
        print("interrupted")
        raise
    finally:
        print("cleaned up")
"""


def test_ctrl_c_is_a_keyboard_interrupt_in_the_script(start):
    job = start(SLEEPS).up()
    job.send(signal.SIGINT)
    code, out, err = job.ends()
    assert code == 130
    assert out == [f"[{rank}] {word}" for rank in (0, 1) for word in ("cleaned up", "interrupted")]
    said = "hvdrun: Ctrl-C: the 2 ranks have 3 s to end; a second Ctrl-C kills them at once\n"
    assert said in err
    assert err.count("Traceback") == 1  # of both ranks together
    assert err.count("[ranks 0-1] KeyboardInterrupt") == 1
    assert "hvdrun: rank" not in err


WAITS = {
    "sync": "hvd.allreduce(torch.ones(3), name='waits')",
    "in place": "hvd.allreduce_(torch.ones(3), name='waits')",
    "synchronize": "hvd.synchronize(hvd.allgather_async(torch.ones(3), name='waits'))",
    "barrier": "hvd.barrier()",
    "object": "hvd.broadcast_object(7, root_rank=1)",
    "backward": "model(torch.ones(3)).sum().backward()",
}
IN_HVDLITE = """
    import hvdlite.torch as hvd, signal, torch, time
    signal.signal(signal.SIGTERM, lambda *_: print("late"))
    hvd.init()
    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        print("up")
        if hvd.rank() == 0:
            {}
        for _ in range(600): time.sleep(0.1)
    except KeyboardInterrupt:
        print("interrupted")
        raise
"""


@pytest.mark.parametrize(
    "what",
    [what if what == "backward" else pytest.param(what, marks=pytest.mark.wide) for what in WAITS],
)
@pytest.mark.wide_in("mpich")
def test_ctrl_c_interrupts_a_rank_that_waits_for_another(start, what):
    """And none hangs in MPI_Finalize: none gets as far as the second signal, which kills."""
    script = IN_HVDLITE.format(WAITS[what])
    job = start(script, "--grace-period", "30").up()
    job.send(signal.SIGINT)
    code, out, err = job.ends()
    assert (code, out) == (130, ["[0] interrupted", "[1] interrupted"]), err


def test_ctrl_c_ends_ranks_that_wait_in_init(start):
    script = """
        import os, time
        print("up")
        if os.environ["RANK"] == "1":
            for _ in range(600): time.sleep(0.1)
        import hvdlite as hvd
        hvd.init()
    """
    job = start(script, "--grace-period", "0.5").up()
    job.send(signal.SIGINT)
    assert job.ends()[0] == 130


def test_after_the_grace_of_ctrl_c_comes_term_and_then_kill(start):
    script = """
        import signal, time
        signal.signal(signal.SIGINT, lambda *_: print("int"))
        signal.signal(signal.SIGTERM, lambda *_: print("term"))
        print("up")
        while True:
            time.sleep(0.1)
    """
    job = start(script, "--grace-period", "0.3").up()
    job.send(signal.SIGINT)
    code, out, err = job.ends()
    assert code == 130
    assert out == [f"[{rank}] {word}" for rank in (0, 1) for word in ("int", "term")]
    assert "the 2 ranks have 0.3 s to end" in err


LOADS = """
    import signal, sys, torch
    from torch.utils.data import DataLoader
    {}
    def save(*_):
        batches = [next(loader) for _ in range(20)]  # more than the workers have sent ahead
        print("saved", len(batches))
        sys.exit(0)
    loader = iter(DataLoader(torch.arange(10_000), num_workers=2))
    signal.signal(signal.SIGTERM, save)
    next(loader)
    print("up")
    signal.pause()
"""


@pytest.mark.parametrize(
    "begin", ["import hvdlite as hvd; hvd.init()", pytest.param("", marks=pytest.mark.wide)]
)
def test_a_rank_that_saves_at_term_keeps_its_loaders_workers_until_it_has_ended(start, begin):
    job = start(LOADS.format(begin)).up()
    job.send(signal.SIGTERM)
    code, out, err = job.ends()
    assert code == 143
    assert out == ["[0] saved 20", "[1] saved 20"], err
    assert "Traceback" not in err


@pytest.mark.parametrize("begin", ["", "import hvdlite as hvd; hvd.init()"])
def test_a_program_that_a_shell_runs_has_its_grace_though_the_shell_ends_at_once(start, begin):
    job = start(f"""
        import os, signal, sys, time
        if len(sys.argv) == 1:
            os.execvp("bash", ["bash", "-c", '"$@"; echo no', "-", *sys.orig_argv, "x"])
        {begin}
        shell = os.getppid()
        def save(*_):
            while os.getppid() == shell:
                time.sleep(0.01)
            time.sleep(0.5)
            print("saved")
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("up")
        while True:
            time.sleep(0.1)
    """).up()
    job.send(signal.SIGTERM)
    code, out, err = job.ends()
    assert (code, out) == (143, ["[0] saved", "[1] saved"]), err


SAVES = """
    import os, signal, sys, time
    {start}
    def save(*_):
        print("saving")
        time.sleep(3.5)
        print("saved")
        sys.exit(0)
    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGINT, save)
        signal.signal(signal.SIGTERM, save)
    else:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    print("up")
    {wait}
    for _ in range(600): time.sleep(0.1)
"""
HVDLITE = "import hvdlite as hvd, torch; hvd.init()"


@pytest.mark.parametrize(
    ("begin", "wait", "number"),
    [
        ("", "", signal.SIGTERM),
        (HVDLITE, "", signal.SIGTERM),
        (HVDLITE, "hvd.rank() == 0 and hvd.allreduce(torch.ones(1))", signal.SIGINT),
        pytest.param(
            "from mpi4py import MPI;" + HVDLITE, "", signal.SIGTERM, marks=pytest.mark.wide
        ),
    ],
    ids=["no MPI", "sleeps", "waits", "mpi4py finalizes"],
)
@pytest.mark.wide_in("openmpi")
def test_a_rank_that_ends_at_once_does_not_shorten_the_grace_of_one_that_saves(
    start, begin, wait, number
):
    """Nor does that one wait for ever for those that have ended."""
    job = start(SAVES.format(start=begin, wait=wait), "--grace-period", "100").up()
    job.send(number)
    code, out, err = job.ends()
    assert (code, out) == (128 + number, ["[0] saved", "[0] saving"]), err


@pytest.mark.wide_in("mpich")
def test_ranks_that_all_save_and_end_with_0_end_in_good_order(start):
    script = SAVES.format(start=HVDLITE, wait="").replace('os.environ["RANK"] == "0"', "True")
    job = start(script, "--grace-period", "100").up()
    job.send(signal.SIGTERM)
    code, out, err = job.ends()
    assert code == 143
    assert out == [f"[{rank}] {word}" for rank in (0, 1) for word in ("saved", "saving")], err
    assert "[mpirun]" not in err


def test_ranks_have_their_grace_though_mpirun_gets_the_signal_too(start):
    """As from a batch system that signals all processes of a job."""
    job = start(SAVES.format(start="", wait="")).up()
    mpirun = job.family[0]
    job.send(signal.SIGTERM)
    mpirun.send_signal(signal.SIGTERM)
    code, out, err = job.ends()
    assert (code, out) == (143, ["[0] saved", "[0] saving"]), err


HANDLES = """
    import os, signal, time
    if os.environ["RANK"] in {}:
        signal.signal(signal.SIGUSR1, lambda *_: print("got it"))
    print("up")
    while True:
        time.sleep(0.1)
"""


def test_usr1_goes_to_the_ranks_that_handle_it_and_a_line_names_the_others(start):
    job = start(HANDLES.format(("0", "2")), ranks=4).up()
    job.send(signal.SIGUSR1)
    assert job.says("hvdrun: SIGUSR1") == (
        "hvdrun: SIGUSR1 was sent to 2 of 4 ranks; ranks 1 and 3 have no handler for it, which"
        " would have ended them"
    )
    for _ in range(2):
        job.read("got it")
    job.send(signal.SIGTERM)
    assert job.ends()[0] == 143


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGALRM], ids=["USR2", "ALRM"])
@pytest.mark.wide_in("mpich")
def test_signals_that_no_rank_handles_end_nothing(start, number):
    job = start(HANDLES.format(()), ranks=1).up()
    job.send(number)
    assert job.says("hvdrun: ") == (
        f"hvdrun: {number.name} was not sent to the rank: it has no handler for it, which would"
        " have ended it"
    )
    job.send(signal.SIGTERM)
    assert job.ends()[0] == 143


@pytest.mark.wide_in("openmpi")
def test_the_signal_goes_to_the_ranks_process_not_to_those_it_has_started(start):
    script = """
        import os, signal, subprocess, time
        child = subprocess.Popen(["sleep", "60"])
        signal.signal(signal.SIGUSR1, lambda *_: print("child", child.poll(), "up"))
        print("up")
        while True:
            time.sleep(0.1)
    """
    job = start(script, ranks=1).up()
    job.send(signal.SIGUSR1)
    job.read("child None up")
    job.send(signal.SIGTERM)
    assert job.ends()[0] == 143


@pytest.mark.wide_in("mpich")
def test_ctrl_z_is_answered_by_a_line(start):
    job = start(SLEEPS, ranks=1).up()
    job.send(signal.SIGTSTP)
    line = job.says("hvdrun: ")
    assert line.startswith("hvdrun: Ctrl-Z: hvdrun does not stop")
    assert psutil.Process(job.process.pid).status() != psutil.STATUS_STOPPED
    job.send(signal.SIGINT)
    assert job.ends()[0] == 130


IGNORE = "trap '' HUP QUIT USR1 USR2 ALRM TTIN TTOU XCPU; exec \"$@\""


@pytest.mark.parametrize("before", [(), ("sh", "-c", IGNORE, "sh")], ids=["default", "ignored"])
def test_a_script_starts_with_every_signal_at_its_default(python, before):
    words = [*before, python.with_name("hvdrun"), "-np", "1", "cat", "/proc/self/status"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done
    lines = dict(line.split(":\t") for line in done.stdout.splitlines() if line[:3] == "Sig")
    masks = {name: int(lines[name], 16) & ~OF_GLIBC for name in ("SigBlk", "SigIgn", "SigCgt")}
    assert masks == {"SigBlk": 0, "SigIgn": 0, "SigCgt": 0}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a process number 1")
def test_a_signal_to_hvdrun_as_process_number_1_reaches_the_script(start):
    """As in a container. It gets only signals for which it has a handler."""
    if not shutil.which("unshare"):
        pytest.skip("needs unshare (apt-get install util-linux)")
    before = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    job = start(SAVES.format(start="", wait="").replace("3.5", "0.5"), before=before).up()
    (hvdrun, *_) = job.family
    hvdrun.send_signal(signal.SIGTERM)
    _, out, err = job.ends()
    assert out == ["[0] saved", "[0] saving"], err
    assert "hvdrun: SIGTERM: the 2 ranks have 20 s to end" in err
