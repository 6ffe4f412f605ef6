"""Whether all members of a group come to make it, within its timeout.

MPI, which makes the group's communicator, waits for ever. So the members first say in the group's
Store that they have come. Nothing that is read from the Store decides anything else.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from hvdlite.collectives.differing_ranks import ranks_in_words
from hvdlite.errors import LaunchError

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
    missing = [rank for at, rank in enumerate(ranks) if not store.check([f"come/{at}"])]
    return (
        f"process group {name}: {ranks_in_words(missing)} did not come to make it within "
        f"{timeout_s:g} s; every rank calls new_group for all groups, in the same order"
    )
