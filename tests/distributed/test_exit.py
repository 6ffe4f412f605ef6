"""The end of a process while operations are under way."""

from tests.harness.programs import run_program
from tests.harness.worlds import mpiexec_command, python_of

LIMIT_S = 60

WAITING = """
import sys, threading, time, torch, torch.distributed as dist
rank = int(__import__("os").environ[sys.argv[1]])
dist.init_process_group("hvdlite", f"file://{sys.argv[2]}", rank=rank, world_size=2)
waits = threading.Event()

def callback(future):
    waits.set()
    if rank == 0:
        dist.all_reduce(torch.ones(3))  # which the other rank does not call
    return 0

class Slow:  # Python ends slowly, so that other threads come to ask for it
    def __del__(self, sleep=time.sleep):
        sleep(1.0)

slow = Slow()
chained = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(callback)
waits.wait()
print("end", flush=True)
"""


def test_a_process_ends_well_while_a_callback_waits_in_vain(tmp_path):
    command = [*mpiexec_command("mpich", 2), python_of("mpich"), "-c", WAITING]
    finished = run_program([*command, "PMI_RANK", tmp_path / "store"], LIMIT_S)
    assert (finished.code, finished.stderr) == (0, ""), finished
    assert finished.stdout.count("end") == 2, finished  # maybe in one line, as mpiexec mixes them


PARKED = """
import sys, threading, time, torch, torch.distributed as dist
from hvdlite import _core
rank = int(__import__("os").environ[sys.argv[1]])
dist.init_process_group("hvdlite", f"file://{sys.argv[2]}", rank=rank, world_size=2)

def in_a_thread(function):
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(20)
    return thread

if rank == 0:
    ended = in_a_thread(bool)
    _core.park(ended.native_id)
    later = in_a_thread(lambda: dist.all_reduce(torch.ones(3)))  # mostly of the same ident
    print("waits" if later.is_alive() else "back", flush=True)
else:
    time.sleep(0.3)
    dist.all_reduce(torch.ones(3))
"""


def test_a_later_thread_comes_back_from_its_waits(tmp_path):
    command = [*mpiexec_command("mpich", 2), python_of("mpich"), "-c", PARKED]
    finished = run_program([*command, "PMI_RANK", tmp_path / "store"], LIMIT_S)
    assert (finished.code, finished.stdout, finished.stderr) == (0, "back\n", ""), finished
