import functools
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import hvdrun
from hvdlite import run_function
from hvdrun.agent.frames import START, frame
from hvdrun.command_line.cli import cli, main
from hvdrun.command_line.own_options import parse_exports
from hvdrun.command_line.spellings import FOREIGN, in_our_spelling
from hvdrun.errors import UsageError, exit_codes
from hvdrun.machine.environment import RENDEZVOUS_SECRET
from hvdrun.plan.hosts import Host
from hvdrun.plan.programs import which
from tests.harness.needs import lacking


def normalised(*words):
    return in_our_spelling(cli.params, words)


@pytest.mark.parametrize(
    ("given_words", "meant"),
    [
        (["-np", "4", "python"], ["--num-proc", "4", "python"]),
        (["-np=4", "python"], ["--num-proc=4", "python"]),
        (["-hostfile", "f", "-np", "2", "x"], ["--hostfile", "f", "--num-proc", "2", "x"]),
        (["-H", "-np", "x"], ["-H", "-np", "x"]),
        (["--verbose", "-np", "2", "x"], ["--verbose", "--num-proc", "2", "x"]),
        (["-np", "2", "mpi", "-np", "3"], ["--num-proc", "2", "mpi", "-np", "3"]),
        (["--", "-np", "3"], ["--", "-np", "3"]),
        (["-n", "2", "x", "-n", "3"], ["--num-proc", "2", "x", "-n", "3"]),
        (["--np", "2", "x"], ["--num-proc", "2", "x"]),
        (["--np=2", "x"], ["--num-proc=2", "x"]),
        (["-np2", "x"], ["--num-proc=2", "x"]),
        (["-n2", "x", "-np2"], ["--num-proc=2", "x", "-np2"]),
        (["--num_proc", "2", "x"], ["--num-proc", "2", "x"]),
        (["--start_timeout=9", "x"], ["--start-timeout=9", "x"]),
        (["--host", "a:1", "-machinefile", "f", "x"], ["--hosts", "a:1", "--hostfile", "f", "x"]),
        (["--mpi", "-np", "2", "x"], ["--mpi=auto", "--num-proc", "2", "x"]),
        (["--mpi", "python", "x"], ["--mpi=auto", "python", "x"]),
        (["--mpi", "bogus", "x"], ["--mpi", "bogus", "x"]),
        (["--mpi", __file__, "x"], ["--mpi=auto", __file__, "x"]),
        (["--mpi"], ["--mpi=auto"]),
        (["--mpi", "mpich", "x"], ["--mpi", "mpich", "x"]),
        (["--mpi", "opnempi", "x"], ["--mpi", "opnempi", "x"]),
        (["-x", "--np", "x"], ["-x", "--np", "x"]),
    ],
)
def test_long_options_with_one_dash_work_and_the_programs_own_are_left_alone(given_words, meant):
    assert normalised(*given_words) == meant


@pytest.mark.parametrize("dashes", ["--", "-"])
@pytest.mark.parametrize("between", ["-", "_"])
@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_an_option_of_another_launcher_is_answered_by_ours(name, between, dashes, capsys):
    word = dashes + name.replace("-", between)
    for words in ([word, "2"], [f"{word}=2"]):
        assert main(["-np", "2", *words, "python", "train.py"]) == 64
        said = capsys.readouterr().err
        assert said.startswith(f"hvdrun: {word} is an option of {FOREIGN[name][0]}: ")
        assert said.count("\n") == 1


def test_all_options_that_an_answer_names_are_there(capsys):
    main(["--help"])
    listed = capsys.readouterr().out
    for _, answer in FOREIGN.values():
        for option in re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", answer):
            assert f" {option} " in listed or f" {option}, " in listed, option


def test_thousands_of_hosts_cost_no_more_than_each_of_them_and_fill_no_screen(monkeypatch, capsys):
    compared, same = [], Host.__eq__
    monkeypatch.setattr(Host, "__eq__", lambda self, o: (compared.append(1), same(self, o))[1])
    hosts = ",".join(f"h{number}" for number in range(1000))
    assert main(["-H", hosts, "--dry-run", "true"]) == 0
    assert len(compared) < 5000
    assert "# not asked: h0, h1, h2 and 997 more; " in capsys.readouterr().out
    assert main(["-H", f"{hosts.replace(',', ':1,')}:1", "-np", "2000", "true"]) == 66
    assert "h7:1 and 992 more; lower -np" in capsys.readouterr().err


def test_verbose_says_which_python_runs_if_another_environment_is_active(tmp_path):
    (tmp_path / "python").symlink_to(sys.executable)
    own, active = f"{sys.prefix}/bin", str(tmp_path)
    assert which(["python"], f"{own}:{active}", active) == (
        f"python is {own}/python; your shell's is {active}/python"
    )
    assert which(["python", "x"], f"{own}:{active}", own) == f"python is {own}/python"
    assert which(["/bin/sh"], own, own) == which(["no-such"], own, own) == ""


def test_exports_are_names_with_or_without_a_value():
    assert parse_exports(["A", "B=", "C=x=y"]) == {"A": None, "B": "", "C": "x=y"}
    with pytest.raises(UsageError, match="-x 1A"):
        parse_exports(["1A=2"])


def test_the_help_is_grouped_and_lists_examples_and_exit_codes(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for part in ("What to run", "Where", "Examples", "hvdrun -np 4 python train.py", "Exit codes"):
        assert part in text
    for line in exit_codes().splitlines():
        assert line in text


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 64, "no COMMAND"),
        (["-np", "0", "true"], 64, "--num-proc"),
        (["-np", "two", "true"], 64, "'two' is not a valid whole number from 1 to 999999"),
        (["--nodes", "two", "true"], 64, "'two' is not a valid whole number from 1"),
        (["--cache-capacity", "x", "true"], 64, "--cache-capacity"),
        (["--start-timeout", "x", "true"], 64, "'x' is not a valid number of seconds"),
        (["--mpi", "bogus", "-np", "1", "true"], 64, "'bogus' is not one of 'auto', 'openmpi'"),
        (["--gpu", "foo", "true"], 64, "'foo': expected one of auto, none, or a whole number"),
        (["--gpu", "1000", "true"], 64, "expected a whole number from 0 to 999"),
        (["-i", "/no/such", "true"], 64, "-i /no/such: there is no such file"),
        (
            ["--rendezvous-secret-file", "/no/such", "true"],
            64,
            "--rendezvous-secret-file /no/such: No such file",
        ),
        *(
            (["-x", f"MASTER_PORT={port}", "true"], 64, "expected a port from 1 to 65535")
            for port in ("", "0", "abc", "65536", "-1")
        ),
        *(
            (["-x", f"MASTER_ADDR={name}", "true"], 64, "an IPv6 address without brackets")
            for name in ("", "[::1]", "a b")
        ),
        (["-np", "1000000", "true"], 64, "--num-proc"),
        (["--json", "true"], 64, "--json belongs to --metrics PID"),
        (["--json", "--metrics", "1"], 64, "--metrics 1: process 1 is no hvdrun that runs a job"),
        (
            ["--stacks", "1", "python", "x"],
            64,
            "starts none: leave out `python x`, or leave out --st",
        ),
        (["--metrics", "1", "--json", "true"], 64, "--metrics PID asks a running job and starts"),
        (["--stacks", "1", "--metrics", "1"], 64, "are two questions: ask one at a time"),
        (["--metrics-file", "/no/such", "true"], 64, "--metrics-file /no/such: No such file or"),
        (["-np", "2", ""], 64, "COMMAND is an empty word"),
        (["--start-timeout", "nan", "true"], 64, "'nan' is not a number"),
        (["--start-timeout", "0", "true"], 64, "--start-timeout"),
        (["--host-timeout", "nan", "true"], 64, "'nan' is not a number"),
        (["--host-timeout", "1", "true"], 64, "--host-timeout"),
        (["--no-such-option", "true"], 64, "--no-such-option"),
        (["-x", "a b", "true"], 64, "-x a b"),
        (["-np", "1", "-x", RENDEZVOUS_SECRET, "true"], 64, "the secret is not for the ranks"),
        (
            ["-H", "localhost", "-x", f"{RENDEZVOUS_SECRET}=x", "true"],
            64,
            "the secret is not for the ranks",
        ),
        (
            [
                "--rendezvous",
                "a",
                "--nodes",
                "1",
                "--node-rank",
                "0",
                "-x",
                RENDEZVOUS_SECRET,
                "true",
            ],
            64,
            "the secret is not for the ranks",
        ),
        (["--mpi-args", "'", "true"], 64, "--mpi-args"),
        (["--binding-args", "'", "true"], 64, "--binding-args"),
        (["-H", "no-such-user@localhost:2", "true"], 64, "leave the user out, or start hvdrun as"),
        (["-H", "a", "--hostfile", "f", "true"], 64, "leave one of them out"),
        (["-H", "a:0", "true"], 65, "-H, entry 1"),
        (["--hostfile", "/no/such/file", "true"], 65, "/no/such/file: No such file"),
        (["-H", "localhost:2", "-np", "3", "true"], 66, "-np 3"),
        (["-H", "localhost:2", "--servers", "2", "true"], 64, "so no worker is left"),
        # Before any host is asked.
        (["-H", "no.invalid:2", "-np", "2", "--servers", "2", "true"], 64, "so no worker is left"),
        (["-H", "no.invalid:2", "-x", "HVDLITE_FAULT=x", "true"], 64, "'x' is no kind of fault"),
        (
            ["-np", "2", "--servers", "2", "-x", "HVDLITE_DETERMINISTIC=virtual:4", "true"],
            64,
            "so no worker is left",
        ),
    ],
)
def test_a_mistake_is_one_clear_line_with_its_own_exit_code(words, code, message, capsys):
    assert main(words) == code
    said = capsys.readouterr().err
    assert said.startswith("hvdrun: ")
    assert said.count("\n") == 1
    assert message in said


@pytest.mark.parametrize(("words", "seconds"), [([], 9.0), (["--start-timeout", "7"], 7.0)])
def test_horovods_variable_of_the_start_timeout_counts_without_the_option(
    words, seconds, monkeypatch
):
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "9")
    assert cli.make_context("hvdrun", [*words, "true"]).params["start_timeout"] == seconds


def test_a_working_directory_that_was_removed_is_said(monkeypatch, tmp_path, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["-np", "1", "true"]) == 64
    assert "the working directory has been removed" in capsys.readouterr().err


def test_rendezvous_of_one_host_comes_before_an_allocation_of_others(monkeypatch, capsys):
    for name, value in {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_TASKS_PER_NODE": "4(x2)",
        "SLURM_PROCID": "1",  # an hvdrun on each host, by srun
    }.items():
        monkeypatch.setenv(name, value)
    alone = ["--rendezvous", "n1:29717", "--nodes", "1", "--node-rank", "0"]
    assert main([*alone, "-np", "2", "--dry-run", "true"]) == 0
    said = capsys.readouterr().out
    assert "n1" not in said
    assert ":2" in said


def test_ones_own_user_may_stand_before_this_machine(capsys):
    assert (
        main(["-H", f"{pwd.getpwuid(os.getuid()).pw_name}@localhost:2", "--dry-run", "true"]) == 0
    )
    assert "-H localhost:2 " in capsys.readouterr().out


def test_an_interface_that_this_machine_does_not_have_is_an_error(capsys):
    assert main(["-np", "2", "--network-interface", "none9,203.0.113.0/24", "true"]) == 71
    said = capsys.readouterr().err
    assert "--network-interfaces none9,203.0.113.0/24: this machine has no such interface" in said
    assert " lo" in said


@pytest.mark.parametrize("word", ["lo", "127.0.0.1", "127.0.0.0/8", "none9,lo"])
def test_an_interface_of_this_machine_is_no_error(word, capsys):
    assert main(["-np", "2", "--network-interface", word, "--dry-run", "true"]) == 0


def test_a_dry_run_shows_the_command_and_runs_nothing(capsys, tmp_path):
    assert main(["-np", "2", "--dry-run", "touch", str(tmp_path / "made")]) == 0
    assert "-np 2 " in capsys.readouterr().out
    assert not (tmp_path / "made").exists()


def completions(*words):
    """What the shell is told when TAB follows the words."""
    environ = {
        **os.environ,
        "_HVDRUN_COMPLETE": "bash_complete",
        "COMP_WORDS": "\n".join(("hvdrun", *words)),
        "COMP_CWORD": str(len(words)),
    }
    command = [sys.executable, "-m", "hvdrun"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--vers"], ["plain,--version"]),
        (["--mpi", "open"], ["plain,openmpi"]),
        (["-np", "2", "--mpi", "open"], ["plain,openmpi"]),
        (["--hostfile", "ho"], ["file,ho"]),
        (["-np", "2", "python", "tr"], ["file,tr"]),
        (["python", "--vers"], ["file,--vers"]),
    ],
)
def test_tab_completes_options_and_their_values_and_then_files(words, expected):
    assert completions(*words) == expected


COMPLETE = {
    "bash": "COMP_WORDS=(hvdrun --vers) COMP_CWORD=1; _hvdrun_completion hvdrun; echo $COMPREPLY",
    # zsh's own part of it needs a terminal: what it is asked to do is shown.
    "zsh": (
        "words=(hvdrun --vers); CURRENT=2;"
        ' compadd() { echo "${completions[@]}" }; _describe() { eval "echo \\${$3%%:*}" };'
        " _hvdrun_completion"
    ),
}


@pytest.mark.parametrize("shell", sorted(COMPLETE))
def test_completion_works_in_the_shell_that_sources_it(shell, tmp_path):
    if shutil.which(shell) is None:
        lacking(f"no {shell} (Debian: apt-get install {shell})")
    hvdrun = tmp_path / "hvdrun"
    hvdrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m hvdrun "$@"\n')
    hvdrun.chmod(0o755)
    source = f'compdef() {{ :; }}; eval "$(hvdrun --completion {shell})"; {COMPLETE[shell]}'
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [shell, "-c", source], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["--version"], done.stderr


HEAVY = {
    "torch",
    "hvdlite",
    "numpy",
    "mpi4py.MPI",
    "rich",
    "asyncio",
}


def test_starting_loads_nothing_heavy():
    code = (
        "import sys; from hvdrun.command_line.cli import main;"
        "main(['-np', '2', '--dry-run', 'true']);"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "hvdrun.plan.command" in done.stderr.split()
    assert not HEAVY & set(done.stderr.split())


@pytest.mark.parametrize("role", ["rank", "host"])
def test_the_agents_load_little(role):
    """They start beside each rank, so their imports delay every rank."""
    agent = Path(hvdrun.__file__).parent / "agent" / "agent.py"
    arguments = {"rank": ["rank", "true"], "host": ["host"]}[role]
    command = [sys.executable, "-I", "-S", "-X", "importtime", str(agent), *arguments]
    start = frame(START, payload=b"\0".join((b"secret", b"30", b"sh", b"true")))
    told = start if role == "host" else b""
    done = subprocess.run(command, input=told, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.decode().splitlines()}
    assert "hvdrun.agent.frames" in loaded
    assert not loaded & {
        "subprocess",
        "json",
        "click",
        "typing_extensions",
        "hvdrun.command_line.cli",
    }
    assert role == "host" or not loaded & {"ctypes", "hvdrun.agent.local_ranks"}


# Interrupts itself at the import of that number after hvdrun.command_line.cli, or of that name.
INTERRUPTS_ITSELF = """
import os, signal, sys
count = None
def hook(event, arguments):
    global count
    if event == "import":
        if count is not None or arguments[0] == "hvdrun.command_line.cli":
            count = 0 if count is None else count + 1
        if {at!r} in (count, arguments[0]):
            os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(hook)
"""


def interrupted(folder, at, *command, **options):
    (folder / "sitecustomize.py").write_text(INTERRUPTS_ITSELF.format(at=at))
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, **options
    )


HVDRUN = str(Path(sys.executable).with_name("hvdrun"))


@pytest.mark.parametrize(
    "command",
    [
        [HVDRUN],
        pytest.param([sys.executable, "-m", "hvdrun"], marks=pytest.mark.wide),
        pytest.param([sys.executable, "-c", run_function.HVDRUN], marks=pytest.mark.wide),
    ],
    ids=["hvdrun", "python -m hvdrun", "hvdlite.run"],
)
@pytest.mark.parametrize("at", [0, 1, 10, 60, "hvdrun.plan.facts", "hvdrun.running.supervise"])
def test_ctrl_c_before_the_start_is_answered_wherever_it_falls(at, command, tmp_path):
    done = interrupted(tmp_path, at, *command, "-np", "2", "echo", "started")
    said = "hvdrun: Ctrl-C: no rank has been started"
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", said)


def test_where_ctrl_c_is_ignored_it_stays_so(tmp_path):
    """As in a shell script's background."""
    ignored = functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    done = interrupted(tmp_path, "hvdrun.plan.facts", HVDRUN, "--version", preexec_fn=ignored)
    assert (done.returncode, done.stderr) == (0, "")
