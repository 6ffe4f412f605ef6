"""Checks the hosts before a job starts on them: all at once, over one ssh connection each, which
the job then uses.

`probe` answers on the host; `findings` judges the answers. Hosts that pass every check are
remembered; the others are asked again each time.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hvdrun.agent import probe
from hvdrun.agent.host_connection import HostConnection
from hvdrun.agent.probe import Question
from hvdrun.errors import CommandNotFound, HostSetupError, LaunchError, SshFailed
from hvdrun.machine.environment import REACH, for_connections
from hvdrun.machine.limits import LACKING
from hvdrun.plan import shared_memory
from hvdrun.plan.facts import HostFacts, LocalFacts, from_answer, is_local
from hvdrun.plan.flavour import INTEL, MPICH, NAMES, OPENMPI, Flavour
from hvdrun.plan.hosts import Host, few
from hvdrun.plan.job_hosts import hosts_of
from hvdrun.plan.request import Request
from hvdrun.plan.schedulers import origin
from hvdrun.plan.ssh import reached_by
from hvdrun.preflight import networks
from hvdrun.preflight.ask_hosts import Conversation, reads_its_input
from hvdrun.preflight.cache import AnswerCache, cache_folder
from hvdrun.preflight.connections import HERE, ConnectionTest
from hvdrun.preflight.findings import Expected, Finding, judge, of_networks
from hvdrun.preflight.gpus import copies_between_gpus, differences
from hvdrun.preflight.interface_options import interface_options
from hvdrun.preflight.networks import connect_all
from hvdrun.preflight.ports import ports_of
from hvdrun.preflight.question import control_name, probe_command, probe_here, question_of
from hvdrun.preflight.reply import Reply, no_answer, reads_input, with_own_name
from hvdrun.preflight.waiting import Waiting
from hvdrun.ssh_errors import NO_SSH

SSH_PORT = 22
LIMIT_S = 20.0  # for one host; ssh's own limit for connecting is part of it
# With several failures, the first of these decides the exit code: it may have caused the others.
ORDER: tuple[type[LaunchError], ...] = (SshFailed, HostSetupError, CommandNotFound)


@dataclass(frozen=True)
class Preflight:
    hosts: Mapping[str, HostFacts]  # those that answered, by the user's names for them
    findings: tuple[Finding, ...]
    options: tuple[str, ...]  # for mpirun
    variables: Mapping[str, str]  # for the ranks
    cache: AnswerCache
    waited_s: float | None = None  # in vain, for hosts that were not ready yet
    origin: str = ""  # where hosts come from that the user has not named
    connections: dict[str, HostConnection] = field(default_factory=dict)  # for the job

    @property
    def failures(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.failure]

    @property
    def warnings(self) -> list[Finding]:
        return [f for f in self.findings if f.remedy and not f.failure]

    def within(self, facts: LocalFacts) -> LocalFacts:
        """The facts with what the hosts have answered."""
        return replace(
            facts,
            others=self.hosts,
            network_options=self.options,
            network_variables=self.variables,
        )

    @property
    def exit_code(self) -> int:
        """0 if every host is ready, else the code of the worst failure."""
        return self.error("").code if self.failures else 0

    def unknown(self, request: Request) -> list[str]:
        return [host.name for host in hosts_of(request) if host.name not in self.hosts]

    def notes(self, verbose: bool) -> list[str]:
        """Lines for the user of a job that can run."""
        notes = [f"warning: {f.host}: {f.text}; {f.remedy}" for f in self.warnings]
        if verbose:
            said = ("ssh", "network")
            notes += [f"{f.host}: {f.what}: {f.text}" for f in self.findings if f.what in said]
        return notes

    def check(self) -> None:
        """Raises the worst failure, with a table of all."""
        if not self.failures:
            return
        from hvdrun.preflight.findings_table import table

        bad = {finding.host for finding in self.failures}
        all_hosts = {finding.host for finding in self.findings}
        waited = f" after {self.waited_s:.0f} s (--start-timeout)" if self.waited_s else ""
        summary = (
            f"{len(bad)} of {len(all_hosts)} hosts {'is' if len(bad) == 1 else 'are'} not"
            f" ready{waited}, and nothing was started"
        )
        summary += f"; {self.origin}\n" if self.origin else "\n"
        raise self.error(summary + table([*self.failures, *self.warnings]))

    def error(self, text: str) -> LaunchError:
        """That of the worst failure."""
        kinds = {finding.failure for finding in self.failures}
        bad = {finding.host for finding in self.failures}
        host = bad.pop() if len(bad) == 1 else None
        error = next(kind for kind in ORDER if kind in kinds)(text, host=host)
        error.evidence = tuple(f"{f.host}: {f.text}; {f.remedy}" for f in self.failures)
        return error


def run(
    request: Request,
    flavour: Flavour,
    facts: LocalFacts,
    fresh: bool = False,
    only_remembered: bool = False,
    is_check: bool = False,
) -> Preflight:
    """Asks the hosts that the cache does not know as ready, or all of them if they have not yet
    connected to each other. `fresh`: asks all hosts; `only_remembered`: asks none; `is_check`: does
    not ask hosts again that are not ready yet, which else goes on until --start-timeout is over;
    has the GPUs of each host copy to each other; and keeps no connection.

    Raises SshFailed if ssh can't be started here; a problem of a host is a finding.
    """
    begin = time.monotonic()
    hosts = hosts_of(request)
    question = question_of(request, flavour, facts)
    by_name = {host.name: host for host in hosts}
    remote = {host.name: host for host in hosts if not is_local(host, facts)}
    # Only a host with ranks needs the names, and looking them up can take long.
    names = question["names"] if len(remote) < len(hosts) else []
    here = from_answer(probe.answer({**question, "names": names}))
    known = {name: here for name in by_name if name not in remote}
    by = reached_by(request, facts, [*remote.values()])
    commands = {n: probe_command(request, h, facts, question, by) for n, h in remote.items()}
    # This machine's name, as home folders may be shared; its networks, as laptops move.
    networks_here = [(found.name, found.address) for found in here.interfaces]
    versions = [here.python, dict(here.packages), dict(here.sources), flavour.version]
    basis = [here.hostname, networks_here, *versions]
    keys = {name: [command, *basis] for name, command in commands.items()}

    cache = AnswerCache(cache_folder(facts.environ))
    ports = ports_of(flavour, request, facts.environ)
    test = ConnectionTest(
        request, flavour, facts, here, tuple(known), ports, ["connections", keys, str(ports)]
    )
    if not fresh:
        test.remember(cache)
    tests = bool(remote) and not test.is_known and not only_remembered
    if not fresh and not tests:
        known |= {n: f for n in commands if (f := _read(cache.get(keys[n]))) is not None}
    limit_s = min(LIMIT_S, request.start_timeout_s)
    asked = {n: c for n, c in commands.items() if n not in known and not only_remembered}
    if tests or (is_check and here.gpus > 1):
        asked[HERE] = probe_here(facts)
    environ = for_connections({**os.environ, **({REACH: ""} if by else {})})

    def judged(host: Host, reply: Reply | None, others: Mapping[str, HostFacts]) -> list[Finding]:
        """The findings about a host that has answered, now or before: its facts are in `others`."""
        name = host.name
        arrived = "this machine" if name not in remote else "answered before"
        if reply is not None:
            arrived = f"answered in {reply.took_s:.2f} s"
        slots = others[name].slots if host.slots is None else host.slots
        expected = _expected(question, flavour, facts, here, others, request)
        return judge(name, others[name], expected, min(slots, request.num_proc or slots), arrived)

    def is_unfit(name: str, reply: Reply) -> bool:
        if name == HERE:
            return False
        answer = _read(reply.answer, reply.clock_skew_s)
        return answer is None or any(
            finding.failure for finding in judged(by_name[name], reply, {**known, name: answer})
        )

    # The hosts of a scheduler's job are up.
    allocation, source, waiting = request.allocation, "", None
    if allocation is not None and remote.keys() <= {host.name for host in allocation.hosts}:
        source = origin(allocation, facts.starter)
    elif not is_check:
        waiting = Waiting(begin, request.start_timeout_s, limit_s, is_unfit, _say)
    with Conversation(asked, environ) as conversation:
        replies = _answers(conversation, limit_s, waiting)
        for name, reply in replies.items():
            if (answer := _read(reply.answer, reply.clock_skew_s)) is not None:
                known[name] = answer

        findings: dict[str, list[Finding]] = {host.name: [] for host in hosts}
        for host in hosts:
            name = host.name
            if name not in known:
                if name in replies:
                    login = f"{host.user}@{name}" if host.user else name
                    reply = replies[name]
                    program = facts.python, facts.agent
                    found = no_answer(name, login, reply, limit_s, *program, by is None)
                    findings[name] = [with_own_name(found, facts.hostname)]
                continue
            findings[name] = judged(host, replies.get(name), known)
            if name in replies and reads_its_input(commands[name], environ, replies[name], limit_s):
                findings[name].append(reads_input(name, replies[name]))
            if name in replies and not any(finding.remedy for finding in findings[name]):
                cache.put(keys[name], replies[name].answer)

        all_answer = len(known) == len(hosts)
        waited_s = waiting.end(time.monotonic(), not all_answer) if waiting else None
        choice = networks.Choice()
        if all_answer and remote:
            known = {name: known[name] for name in by_name}
            reached = _try(networks.to_try(known, here), request.ssh_port or SSH_PORT, cache, fresh)
            choice = networks.choose(known, here, reached, request.network_interfaces)
            found_there = test.run(conversation, known, choice, cache) if tests else []
            if test.useless:
                choice = networks.choose(known, here, reached, (), test.useless)
            alike = differences(known, request, facts.environ)
            for finding in (*found_there, *of_networks(choice, known), *alike):
                findings[finding.host].append(finding)
        if is_check:
            for finding in copies_between_gpus(conversation, known, request, facts):
                findings[finding.host].append(finding)
        seen = Preflight(
            known,
            tuple(finding for host in hosts for finding in findings[host.name]),
            *interface_options(flavour, choice, request, facts),
            cache,
            waited_s,
            source,
        )
        if seen.failures or is_check:
            return seen
        return replace(seen, connections=conversation.keep(remote))


def _answers(hosts: Conversation, limit_s: float, waiting: Waiting | None) -> dict[str, Reply]:
    try:
        return hosts.answers(limit_s, _report_late_hosts, waiting)
    except OSError as error:
        if error.errno in LACKING:
            raise
        raise SshFailed(f"{NO_SSH.cause}: {error.strerror}; {NO_SSH.remedy}") from error


def _report_late_hosts(late: list[str]) -> None:
    if not (hosts := [name for name in late if name != HERE]):
        return
    _say(f"waiting for an answer from {few(hosts)}")


def _say(text: str) -> None:
    print(f"hvdrun: {text}", file=sys.stderr, flush=True)


def _expected(
    question: Question,
    flavour: Flavour,
    facts: LocalFacts,
    here: HostFacts,
    known: Mapping[str, HostFacts],
    request: Request,
) -> Expected:
    owned = {}
    control = control_name(hosts_of(request), facts)
    for name in question["names"]:
        owner = here if name == control else known.get(name)
        owned[name] = frozenset(i.address for i in owner.interfaces) if owner else frozenset()
    # Open MPI gives its daemons addresses; Hydra gives them this name.
    by_hydra = flavour.kind in (MPICH, INTEL) and not flavour.starter
    needed = {control} if by_hydra else set()
    return Expected(
        here=here,
        python=facts.python,
        mpi=f"{NAMES[flavour.kind]} {flavour.version}",
        mpi_kind=flavour.kind,
        mpirun=flavour.mpirun,
        cwd=facts.cwd,
        program=question["program"],
        script=question["script"],
        variables=shared_memory.variables_of(request, facts.environ),
        names=owned,
        needed_names=frozenset(needed),
        needs_temporary=flavour.kind == OPENMPI and not flavour.starter,
    )


def _read(answer: Any, clock_skew_s: float = 0.0) -> HostFacts | None:
    """None if it is not an answer, or comes from another version of hvdrun."""
    try:
        return from_answer(answer, clock_skew_s)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _try(
    tries: Sequence[tuple[str, list[str]]], port: int, cache: AnswerCache, fresh: bool
) -> dict[str, bool]:
    """By subnet: whether every address in it answers."""
    key = ["networks", tries, port]
    remembered = None if fresh else cache.get(key)
    if isinstance(remembered, dict):
        return remembered
    reached = connect_all([address for _, addresses in tries for address in addresses], port)
    result = {subnet: all(reached[a] for a in addresses) for subnet, addresses in tries}
    if tries:
        cache.put(key, result)
    return result
