"""Whether a hook of the script makes steps while backward runs, with gradients that are not reduced
yet: then each rank would train alone."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.optimizer.buckets.slot import Slot


class Unchanged:
    """The parameters as they were when a backward pass began."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._versions = self._now()
        # A hook that ran before hvdlite's has removed the gradient.
        self.without_gradient: Slot | None = None

    def problem(self, round_number: int | None) -> str | None:
        """At the end of the pass, before gradients get their reduced values: what has changed.

        round_number: of the round that is open; None if none is.
        """
        taken = self.without_gradient or next(
            (
                slot
                for slot in self._slots
                if slot.param.grad is None and slot.last_round == round_number
            ),
            None,
        )
        if taken is None and self._now() == self._versions:
            return None
        if taken is not None:
            what = f"the gradient of {taken.name!r} was removed"
        else:
            pairs = zip(self._slots, self._now(), self._versions, strict=True)
            what = f"{next(slot.name for slot, new, old in pairs if new != old)!r} was changed"
        return (
            f"DistributedOptimizer: {what} while backward() ran, before the ranks' gradients were "
            "averaged, as by a hook of register_post_accumulate_grad_hook that makes an "
            "optimizer's step: each rank would train alone. Remove that hook and call step() after "
            "backward(); or, for steps within backward(), make one DistributedOptimizer per "
            "parameter, then register hooks that call its step() and zero_grad()"
        )

    def _now(self) -> list[int]:
        # (Of each, torch counts the changes in place.)
        return [slot.param._version for slot in self._slots]
