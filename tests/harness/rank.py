"""One rank of a world: runs the cases that the pytest process sends, until that goes away."""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import socket
import sys
import warnings
from multiprocessing.connection import Connection
from typing import Any

from tests.harness.worlds import (
    ADDRESS_VARIABLE,
    STACKS_SIGNAL,
    Answer,
    Ready,
    die_with_parent,
    text_of,
)


def rank_from_launcher() -> int:
    """This rank's number, from the environment: only the cases start MPI."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    raise SystemExit("tests.harness.rank was not started by mpiexec")


def serve(connection: Connection) -> None:
    """Runs one case after the other."""
    knobs: dict[str, str] = {}
    while True:
        try:
            module, function, args, kwargs, wanted = connection.recv()
        except EOFError:
            return
        try:
            if wanted != knobs:
                change_knobs(knobs, wanted)
                knobs = wanted
            case = case_of(module, function)
            connection.send(Ready())
            value = case(*args, **kwargs)
            forget_process_sets()
            connection.send(Answer(value=value))
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            connection.send(Answer(failure=text_of(error)))


def forget_process_sets() -> None:
    """The next case in this world begins without those of this one. Every rank knows of all sets,
    so every rank does the same."""
    world = sys.modules.get("hvdlite.world.world")
    if world is not None and world.is_initialized() and len(world.current().process_sets) > 1:
        world.shutdown()


def case_of(module: str, function: str) -> Any:
    """The function of this name."""
    case: Any = importlib.import_module(module)
    for part in function.split("."):
        case = getattr(case, part)
    return case


def change_knobs(old: dict[str, str], new: dict[str, str]) -> None:
    """The next `init` reads the new ones."""
    if hvdlite := sys.modules.get("hvdlite"):
        hvdlite.shutdown()
    for name in old:
        os.environ.pop(name, None)
    os.environ.update(new)


def use_core(path: str) -> None:
    """This build of the core is imported instead of the one in the tree (`make sanitize`)."""
    spec = importlib.util.spec_from_file_location("hvdlite._core", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["hvdlite._core"] = module


def main() -> None:
    die_with_parent()
    rank = rank_from_launcher()
    # Each rank prints into a log of its own: mpiexec would mix the output of all ranks.
    log = os.open(
        os.path.join(os.environ["HVDLITE_TEST_FOLDER"], f"{rank}.log"), os.O_CREAT | os.O_WRONLY
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if core := os.environ.get("HVDLITE_TEST_CORE"):
        use_core(core)
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    warnings.simplefilter("error")
    plug = socket.socket(socket.AF_UNIX)
    plug.connect("\0" + os.environ[ADDRESS_VARIABLE])
    connection = Connection(plug.detach())
    connection.send((rank, os.getpid()))
    serve(connection)


if __name__ == "__main__":
    main()
