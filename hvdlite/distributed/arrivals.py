"""Whether all members of a group come to make it, within its timeout.

MPI, which makes the group's communicator, waits for ever. So the members first say in the group's
Store that they have come. Nothing that is read from the Store decides anything else.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from hvdlite.errors import LaunchError

_MOST_NAMED = 16
# More than there are members.
_GIVEN_UP = 1 << 40


def wait_for_all(store: Any, rank: int, ranks: Sequence[int], name: str, timeout_s: float) -> None:
    """Every member calls it; returns when all have.

    store: of this creation of the group alone. ranks: of the world, this rank's is ranks[rank].

    Raises:
        LaunchError: Members have not come in time; the text names them. Or the Store failed.
    """
    deadline = time.monotonic() + timeout_s
    try:
        store.set(f"come/{rank}", b"1")
        number = store.add("number", 1)
        if number == len(ranks):
            store.set("all", b"1")
        elif number < 0:
            raise LaunchError(
                f"process group {name}: rank {ranks[rank]} came to make it when others had given "
                f"up, after {timeout_s:g} s"
            )
        elif not _is_there(store, "all", deadline) and not _all_have_come(store, len(ranks)):
            raise LaunchError(_text(store, ranks, name, timeout_s))
    except LaunchError:
        raise
    except (RuntimeError, ValueError) as error:  # of torch: DistError, and what std:: throws
        raise LaunchError(
            f"process group {name}: the Store of torch.distributed failed: {error}"
        ) from error


def _all_have_come(store: Any, size: int) -> bool:
    """Gives up, so that a member that comes later does so, too; unless all came just now."""
    return store.add("number", -_GIVEN_UP) + _GIVEN_UP == size or bool(store.check(["all"]))


def _is_there(store: Any, key: str, deadline: float) -> bool:
    left_s = deadline - time.monotonic()
    try:
        store.wait([key], timedelta(seconds=max(left_s, 0.001)))
    except RuntimeError:  # of torch: DistStoreError
        if time.monotonic() < deadline:
            raise
        return bool(store.check([key]))
    return True


def _text(store: Any, ranks: Sequence[int], name: str, timeout_s: float) -> str:
    missing = [member for member in range(len(ranks)) if not store.check([f"come/{member}"])]
    named = ", ".join(str(ranks[member]) for member in missing[:_MOST_NAMED])
    more = f" and {len(missing) - _MOST_NAMED} more" * (len(missing) > _MOST_NAMED)
    return (
        f"process group {name}: rank{'s' * (len(missing) > 1)} {named}{more} did not come to make "
        f"it within {timeout_s:g} s; every rank calls new_group for all groups, in the same order"
    )
