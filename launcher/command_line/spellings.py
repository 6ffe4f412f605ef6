"""What people type instead of hvdrun's own spellings: one dash for two, '_' for '-', the names of
other launchers. What can mean only one thing is accepted; the rest is answered."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence

import click

from hvdrun.command_line.hvdrun_option import HvdrunOption

# Others' names for options of ours: mpirun's first.
SAME = {
    "-n": "--num-proc",
    "--np": "--num-proc",
    "--host": "--hosts",
    "-host": "--hosts",
    "--machinefile": "--hostfile",
    "-machinefile": "--hostfile",
    # torchrun's, for a command that runs on every host.
    "--nnodes": "--nodes",
    "--rdzv-endpoint": "--rendezvous",
    "--rdzv_endpoint": "--rendezvous",
}
_NUMBER = re.compile(r"-np?([0-9]+)")  # -np2, -n2

_HOSTS = "name the hosts and their ranks, as in -H host1:4,host2:4"
_ONCE = "leave it out; start hvdrun once, on one host, and it starts the ranks of all hosts"
_ADDRESS = (
    "leave it out; hvdrun chooses it; -x MASTER_ADDR=… and -x MASTER_PORT=… set another one; for"
    " the same command on every host, --rendezvous HOST:PORT"
)
# Name, without dashes → whose it is, and what to write instead.
FOREIGN = {
    "nproc-per-node": (
        "torchrun",
        "-np is the number of all ranks; on several hosts also -H host1:4,host2:4",
    ),
    "master-addr": ("torchrun", _ADDRESS),
    "master-port": ("torchrun", _ADDRESS),
    "rdzv-backend": ("torchrun", _ONCE),
    "rdzv-id": ("torchrun", _ONCE),
    "standalone": ("torchrun", "leave it out; without -H the ranks run on this machine"),
    "max-restarts": (
        "torchrun",
        "leave it out; hvdrun starts ranks once; after a failure start again from a checkpoint",
    ),
    "num-processes": ("accelerate", "-np is the number of all ranks"),
    "num-gpus": ("deepspeed", "-np is the number of all ranks, one for each GPU"),
    "num-nodes": ("deepspeed", _HOSTS),
    "ppn": ("mpirun", _HOSTS),
    "mca": ("mpirun", "give it to mpirun by --mpi-args"),
    "genv": ("mpirun", "-x NAME=VALUE sets a variable for the ranks"),
    "bind-to": ("mpirun", "give it to mpirun by --binding-args"),
    "map-by": ("mpirun", "give it to mpirun by --binding-args"),
    "oversubscribe": (
        "mpirun",
        "leave it out; ranks share the cores where you give no number of slots",
    ),
    "allow-run-as-root": ("mpirun", "leave it out; hvdrun may run as root"),
    "jsrun": (
        "horovodrun",
        "leave it out; hvdrun starts ranks by mpirun, and finds the hosts of an LSF job itself",
    ),
}


def in_our_spelling(options: Iterable[click.Parameter], args: Sequence[str]) -> list[str]:
    """The arguments with hvdrun's options as click knows them, up to the program's own command.

    Raises click.UsageError for an option of another launcher.
    """
    takes_value, ours = {}, dict(SAME)
    kinds_of_mpi: Sequence[str] = ()
    for option in options:
        for name in option.opts:
            takes_value[name] = not (isinstance(option, click.Option) and option.is_flag)
            if name == "--mpi" and isinstance(option.type, click.Choice):
                kinds_of_mpi = option.type.choices
        if isinstance(option, HvdrunOption) and option.one_dash:
            ours[option.one_dash] = option.long_spelling
    done: list[str] = []
    words = list(args)
    while words:
        word = words.pop(0)
        if word == "--" or not word.startswith("-") or word == "-":
            return [*done, word, *words]
        word = _NUMBER.sub(r"--num-proc=\1", word) if _NUMBER.fullmatch(word) else word
        name, sign, value = word.partition("=")
        if name not in takes_value:
            name = ours.get(name) or _with_dashes(name, takes_value)
        if name == "--mpi" and not sign and _is_alone(words[:1], kinds_of_mpi):
            sign, value = "=", "auto"
        done.append(name + sign + value)
        if takes_value.get(name) and not sign and words:
            done.append(words.pop(0))
    return done


def _with_dashes(name: str, known: Iterable[str]) -> str:
    """The known option that has '-' where this name has '_'; else the name."""
    begin = name[: len(name) - len(name.lstrip("-"))]
    plain = name[len(begin) :].replace("_", "-")
    if plain in FOREIGN:
        whose, answer = FOREIGN[plain]
        raise click.UsageError(f"{name} is an option of {whose}: {answer}")
    return begin + plain if begin + plain in known else name


def _is_alone(following: Sequence[str], kinds: Sequence[str]) -> bool:
    """Whether --mpi has no value, as in `horovodrun --mpi python train.py`: the next word is no
    name of an MPI, but a program."""
    if not following or following[0].startswith("-"):
        return True
    word = following[0]
    path = f"{os.environ.get('PATH') or os.defpath}:{sys.prefix}/bin"
    return word not in kinds and bool(os.path.exists(word) or shutil.which(word, path=path))
