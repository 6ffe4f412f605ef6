"""`run`: runs a function as a job from Python or a notebook, and returns its results by rank.

    caller ── cloudpickle on standard input ──▶ hvdrun ──▶ rank 0 ── broadcast ──▶ the other ranks
    caller ◀── a file in memory ── hvdrun ◀── a pipe beside its output ── each rank

So it needs no port and no shared folder: it works wherever hvdrun does. Each rank runs `main`.
Nobody but hvdrun can write to the file, whose content the caller unpickles.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pickle
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, TypeVar

import cloudpickle

from hvdlite.collectives.objects import broadcast_object
from hvdlite.errors import LaunchError, RankError
from hvdlite.registry import init
from hvdlite.world import world
from hvdrun.for_hvdlite import die_with_parent, notes

Result = TypeVar("Result")

# Before what a rank sends: whether its function has returned, and how many bytes follow.
HEAD = struct.Struct("!?Q")
# As in a script, and unlike with -c and -m, no module comes from the working directory, which other
# users may write to. If the caller's path has it, the ranks' path gets it, too.
AS_A_SCRIPT = "import sys; sys.path[:] = filter(None, sys.path); "
HVDRUN = AS_A_SCRIPT + "from hvdrun.__main__ import main; sys.exit(main())"
CHUNK = 1 << 20
TAIL_LINES = 40  # of hvdrun's stderr, kept for an error
# What hvdrun says where each host has started one, and this is not the first.
ANOTHER_NODE = re.compile(rb"hvdrun: this is node [1-9][0-9]* of ")


def run(
    func: Callable[..., Result],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Result]:
    """Calls `func(*args, **kwargs)` on `num_proc` processes that hvdrun starts, and waits for them.

    The function may be defined in a script's `__main__` or in a notebook; all that it refers to
    there travels with it. It calls `hvdlite.init()` itself, as a script does. The ranks' output
    appears as under hvdrun. The calling process has no part in the job.

    Args:
        func: Called on every rank.
        args, kwargs: Its arguments.
        num_proc, np: The number of ranks.
        hosts, hostfile, network_interface, network_interfaces: As hvdrun's options of these names
            (`hvdrun --help`).
        start_timeout, ssh_port, ssh_identity_file, disable_cache: Likewise.
        output_filename, verbose, mpi_args: Likewise.
        executable: The Python of the ranks; by default this one.
        use_mpi, use_gloo: Have no effect, because it is always MPI; a line says so.
        min_num_proc, max_num_proc, min_np, max_np: There is no elastic training: a ValueError.
        slots, reset_limit, cooldown_range, host_discovery_script: Likewise.

    Returns:
        The ranks' results, by rank. If a platform starts the script on each host, and sets
        variables that tell so (`NNODES` and the like), node 0 gets the results; on the other nodes
        the list is empty.

    Raises:
        RankError: A rank raised an exception, or ended before its function did: the first one, with
            its host and traceback. The rank's own exception is its cause if it can be pickled.
        LaunchError: hvdrun could not start the job, or lost a host; with hvdrun's message.
        ValueError: A parameter of elastic training, which hvdlite does not have; no ranks.
        TypeError: (of pickle) the function or an argument can't be sent.
        >>> def add(number):
        ...     hvd.init()
        ...     return number + hvd.rank()
        >>> hvd.run(add, args=(10,), num_proc=2)
        [10, 11]
    """
    absent = {
        "min_num_proc": min_num_proc,
        "max_num_proc": max_num_proc,
        "slots": slots,
        "reset_limit": reset_limit,
        "cooldown_range": cooldown_range,
        "host_discovery_script": host_discovery_script,
        "min_np": min_np,
        "max_np": max_np,
    }
    for name, value in absent.items():
        if value:
            raise ValueError(
                f"run: {name}={value!r}: hvdlite has no elastic training; leave it out"
            )
    ranks = num_proc if np is None else np
    if ranks < 1:
        name = "num_proc" if np is None else "np"
        raise ValueError(f"run: {name}={ranks}: a job has at least one rank")
    options = {
        "--num-proc": ranks,
        "--hosts": hosts,
        "--hostfile": hostfile,
        "--start-timeout": start_timeout,
        "--ssh-port": ssh_port,
        "--ssh-identity-file": ssh_identity_file,
        "--network-interfaces": network_interfaces or network_interface,
        "--mpi-args": mpi_args,
        "--output-filename": output_filename,
    }
    words = [f"{name}={value}" for name, value in options.items() if value is not None]
    words += ["--disable-cache"] * bool(disable_cache) + ["--verbose"] * bool(verbose)
    words += ["--use-gloo"] * bool(use_gloo) + ["--use-mpi"] * bool(use_mpi)
    call = cloudpickle.dumps((func, tuple(args), dict(kwargs or {})))
    job = _Job(executable or sys.executable)
    code = job.run(words, pickle.dumps((sys.path, call)))
    job.check(code, ranks, where=hosts or hostfile or socket.gethostname())
    return [pickle.loads(job.returned[rank]) for rank in sorted(job.returned)]


class _Job:
    """Runs hvdrun with this file as its program, and collects the records of the ranks."""

    def __init__(self, python: str = sys.executable) -> None:
        self.python = python
        self.returned: dict[int, memoryview] = {}
        self.raised: list[tuple[int, str, str, bytes]] = []  # in the order of arrival
        self.last_lines: list[str] = []  # hvdrun's last lines on stderr
        self.is_for_node_0 = False  # what the ranks return, and this is another node

    def run(self, options: Sequence[str], call: bytes) -> int:
        """Runs the job; returns hvdrun's exit code."""
        made = os.memfd_create("hvdlite-results", os.MFD_CLOEXEC)
        # Not in place of a standard stream that is closed here: hvdrun gets its own there.
        results = fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, 3)
        os.close(made)
        try:
            code = self._run(options, call, results)
            self._collect(results)
        finally:
            os.close(results)
        return code

    def _run(self, options: Sequence[str], call: bytes, results: int) -> int:
        # Not -m, which would import this module a second time, and pickle looks in the first.
        start = f"{AS_A_SCRIPT}from hvdlite.run_function import main; main()"
        program = [self.python, "-c", start]
        process = subprocess.Popen(
            [sys.executable, "-c", HVDRUN, *options, "--", *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, notes.RESULTS_FILE: str(results), notes.RESULT_PIPE: ""},
            pass_fds=(results,),
            # Ctrl-C goes to the caller, which passes it to hvdrun once. If the caller is killed,
            # hvdrun ends too.
            start_new_session=True,
            preexec_fn=die_with_parent(signal.SIGTERM),
        )
        assert process.stdin
        assert process.stdout
        assert process.stderr
        threads = [
            threading.Thread(target=_feed, args=(process.stdin, call), daemon=True),
            threading.Thread(target=self._listen, args=(process.stderr,), daemon=True),
        ]
        for thread in threads:
            thread.start()
        with process:
            try:
                _relay(process.stdout, sys.stdout)
                code = process.wait()
            except BaseException:  # Ctrl-C, or a notebook's stop: hvdrun ends the ranks
                self._interrupt(process)
                raise
            finally:
                for thread in threads:
                    thread.join()
        return code

    def _interrupt(self, process: subprocess.Popen[bytes]) -> None:
        """Passes each interrupt of the caller on: at the second one, hvdrun kills at once. Shows
        what the ranks write meanwhile: if nobody read it, they would wait instead of saving."""
        assert process.stdout
        reader = threading.Thread(target=self._read_on, args=(process.stdout,), daemon=True)
        reader.start()
        while True:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(KeyboardInterrupt):
                process.wait()
                break
        reader.join()

    def _read_on(self, stdout: IO[bytes]) -> None:
        try:
            _relay(stdout, sys.stdout)
        except (OSError, ValueError):  # the caller's stream may be closed
            while os.read(stdout.fileno(), CHUNK):
                pass

    def _collect(self, results: int) -> None:
        """Reads what the ranks have sent."""
        os.lseek(results, 0, os.SEEK_SET)
        rest = bytearray()
        by_rank: dict[int, bytearray] = {}  # in the order of their first parts
        while data := os.read(results, CHUNK):
            rest += data
            for rank, part in notes.unpack_results(rest):
                by_rank.setdefault(rank, bytearray()).extend(part)
        for rank, sent in by_rank.items():
            if len(sent) < HEAD.size:
                continue
            has_returned, size = HEAD.unpack_from(sent)
            content = memoryview(sent)[HEAD.size :]
            if len(content) != size:  # it has ended meanwhile
                continue
            if has_returned:
                self.returned[rank] = content
            else:
                self.raised.append((rank, *pickle.loads(content)))

    def _listen(self, stderr: IO[bytes]) -> None:
        for line in iter(stderr.readline, b""):
            self.last_lines = [*self.last_lines, line.decode(errors="replace").rstrip()][
                -TAIL_LINES:
            ]
            self.is_for_node_0 |= ANOTHER_NODE.match(line) is not None
            _show(sys.stderr, line.decode(errors="replace"))

    def check(self, code: int, ranks: int, where: str) -> None:
        """Raises unless all ranks have returned a result, here or on node 0."""
        if self.raised:
            rank, host, text, exception = self.raised[0]
            raise RankError(rank, host, text) from _unpickled(exception)
        if code == 0 and self.is_for_node_0:
            return
        if code == 0:
            for rank in sorted(set(range(ranks)) - self.returned.keys()):
                how = "ended with exit code 0 before its function returned (does it call os._exit?)"
                raise RankError(rank, where, how)
            return
        report = "\n".join(self.last_lines)
        ended = re.findall(
            r"^hvdrun: rank ([0-9]+) on (\S+) ((?:was )?ended .* after .*(?:\n {4}.*)*)$",
            report,
            re.MULTILINE,
        )
        if ended:
            rank, host, how = ended[-1]
            raise RankError(int(rank), host, how)
        # hvdrun's last message, which may include a table.
        words = re.search(r"(?:^|\n)hvdrun: (?!.*\nhvdrun: )(.*)", report, re.DOTALL)
        raise LaunchError(words[1] if words else f"hvdrun ended with exit code {code}")


def _feed(stdin: IO[bytes], call: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), stdin:
        stdin.write(call)


def _relay(stdout: IO[bytes], stream: Any) -> None:
    """Shows what comes at once, without waiting for the end of a line."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    while data := os.read(stdout.fileno(), CHUNK):
        _show(stream, decoder.decode(data))
    _show(stream, decoder.decode(b"", final=True))


def _show(stream: Any, text: str) -> None:
    """Writes to the caller's stream, which in a notebook is not a file."""
    if text:
        stream.write(text)
        stream.flush()


def _unpickled(exception: bytes) -> BaseException | None:
    with contextlib.suppress(Exception):  # its class may not be here, or not take its arguments
        found = pickle.loads(exception)
        return found if isinstance(found, BaseException) else None
    return None


# ------------------------------------------------------------------------------------ on the ranks


def main() -> None:
    """Receives the call, runs it, sends its result. An exception ends the rank as usual."""
    pipe = int(os.environ.pop(notes.RESULT_PIPE))
    os.set_inheritable(pipe, False)  # what the function starts has no part in it
    init()
    rank = world.rank()
    # Only rank 0 reads; the call's own output and input are not part of the protocol.
    given = sys.stdin.buffer.read() if rank == 0 else b""
    sys_path, call = pickle.loads(broadcast_object(given, root_rank=0, name="hvdlite.run"))
    # As in a script, the call may initialize hvdlite in its own way.
    world.shutdown()
    sys.path += [folder for folder in sys_path if folder not in sys.path]
    try:
        func, args, kwargs = pickle.loads(call)
        result = cloudpickle.dumps(func(*args, **kwargs))
    except BaseException as error:
        _send(pipe, False, _described(error))
        raise
    _send(pipe, True, result)


def _described(error: BaseException) -> bytes:
    """The host, the traceback from the function on, and the exception if it can be pickled."""
    if isinstance(error, SystemExit):
        # Of a class of hvdlite's own, which notes the exit code.
        text = f"its function called sys.exit({error.code!r}) and so returned nothing"
        return pickle.dumps((socket.gethostname(), text, pickle.dumps(SystemExit(error.code))))
    inner = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, inner)).rstrip()
    try:
        pickled = cloudpickle.dumps(error)
    except Exception:
        pickled = b""
    return pickle.dumps((socket.gethostname(), text, pickled))


def _send(pipe: int, has_returned: bool, data: bytes) -> None:
    sys.stdout.flush()
    with open(pipe, "wb") as file:
        file.write(HEAD.pack(has_returned, len(data)))
        file.write(data)
