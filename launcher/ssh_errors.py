"""The causes and remedies of ssh's error messages. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

# ssh also prints these when it succeeds, or around the line that matters.
_NOISE = (
    r"Warning: Permanently added|\*\* |@@@|Pseudo-terminal will not|debug\d:|Authorized uses only"
)


class Trouble(NamedTuple):
    """Why a host can't be reached, and the remedy; `{host}` and the like are filled in."""

    cause: str
    remedy: str
    way: str = "ssh"  # or the program that stands in its place


UNKNOWN_NAME = Trouble(
    "the name is unknown here",
    "correct the name, or add it to DNS, /etc/hosts or ~/.ssh/config; an address works too",
)
REFUSED = Trouble(
    "the connection was refused: no ssh server listens there",
    "start sshd on {host} (systemctl start ssh), or give its port with -p",
)
NO_ROUTE = Trouble(
    "the network has no route to it",
    "check that {host} and its network are up: `ping {host}`, `ip route get {host}`",
)
TIMEOUT = Trouble(
    "it does not answer",
    "check that {host} is up (`ping {host}`), and that no firewall drops the packets",
)
KEY_CHANGED = Trouble(
    "its host key has changed",
    "if {host} was reinstalled: `ssh-keygen -R {host}`, then `ssh {login}` once; if not, somebody"
    " may be intercepting the connection",
)
KEY_UNKNOWN = Trouble(
    "its host key is not known here", "connect once by hand and compare the key: `ssh {login}`"
)
NO_KEY = Trouble(
    "it accepts none of the keys that ssh offers",
    "`ssh-copy-id {login}`; a key with a passphrase needs ssh-agent (`ssh-add`), a key with an"
    " unusual file name needs -i FILE",
)
TOO_MANY_KEYS = Trouble(
    "ssh offers too many keys before the right one",
    "name the right one with -i FILE, and put `IdentitiesOnly yes` into ~/.ssh/config",
)
NO_KEY_FILE = Trouble(
    "the private key can't be used",
    "correct -i FILE; ssh wants it to be readable by you alone (chmod 600)",
)
CLOSED = Trouble(
    "its ssh server closes the connection",
    "look into sshd's log on {host}: too many connections at once (MaxStartups), a ban, or a login"
    " that is not allowed",
)
ALGORITHMS = Trouble(
    "its ssh server and this ssh have no algorithm in common",
    "update the older one; `ssh -v {login}` shows what each offers",
)
OPTIONS = Trouble(
    "ssh does not understand its options",
    "correct ~/.ssh/config or /etc/ssh/ssh_config at the line that ssh names",
)
NO_SSH = Trouble(
    "ssh can't be started on this machine", "install it (Debian: apt-get install openssh-client)"
)
OTHER = Trouble(
    "ssh could not connect",
    "`ssh -o BatchMode=yes {login} true` must work without asking for anything",
)
SLOW = Trouble(
    "no answer within {limit_s:g} s after ssh began",
    "`ssh {login} true` must end at once: check the shell's start-up files there, the load, and"
    " whether a file server hangs",
)

# The remedy if ssh logs in, and something else than hvdrun's program runs.
LOGIN = (
    "`ssh {login} echo fine` must print `fine`: check the login shell (`getent passwd`), its"
    " start-up files (exit, exec), and forced commands (ForceCommand in sshd_config, command= in"
    " authorized_keys)"
)

# The first match counts: for a changed key ssh also says that the verification failed.
_PATTERNS = (
    (r"Could not resolve hostname", UNKNOWN_NAME),
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED", KEY_CHANGED),
    (r"Host key verification failed|host key is known for", KEY_UNKNOWN),
    (r"Too many authentication failures", TOO_MANY_KEYS),
    (r"Connection refused", REFUSED),
    (r"No route to host|Network is unreachable|Host is down", NO_ROUTE),
    (r"timed out", TIMEOUT),
    (r"UNPROTECTED PRIVATE KEY FILE|Load key|not accessible", NO_KEY_FILE),
    (r"Permission denied \(", NO_KEY),
    (r"no matching|Unable to negotiate", ALGORITHMS),
    (r"[Bb]ad configuration option|bad configuration options|config.* line \d+", OPTIONS),
    (r"Connection (closed|reset)|Broken pipe|kex_exchange_identification", CLOSED),
)


def trouble(stderr: str) -> Trouble:
    """See plan.schedulers.trouble, which also knows what stands in ssh's place."""
    for pattern, found in _PATTERNS:
        if re.search(pattern, stderr):
            return found
    return OTHER


def last_words(stderr: str) -> str:
    """The last lines of the message that matter, joined into one."""
    lines = [
        "".join(c for c in line if c.isprintable()).strip() for line in re.split("[\r\n]", stderr)
    ]
    kept = [line for line in lines if line and not re.match(_NOISE, line)]
    return "; ".join(kept[-2:])
