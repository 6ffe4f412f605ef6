"""The portions of a parameter that an element-wise optimizer is given one after the other.

Such an optimizer goes over its tensors once for each operation of its formula (Adam's has about
ten). A portion is small enough to stay in the caches of the cores from one operation to the next.

Portions are a rank's own matter: they say by what it keeps its state, and not who owns what.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hvdlite.optimizer.sharding.cut import Part
from hvdlite.optimizer.sharding.division import ALIGNMENT_ELEMS

# Of a parameter, for each thread: an optimizer has two to five tensors of this size in hand
# (docs/design/sharding.md has the measurements).
PORTION_BYTES = 512 * 1024


def portions_of(
    parts: Iterable[Part], params: Sequence[torch.Tensor], groups: Iterable[Mapping[str, Any]]
) -> tuple[Part, ...]:
    """These parts in portions, in the same order.

    params: By number, those of the groups in their order.
    """
    whole = [not _gains(group) for group in groups for _ in group["params"]]
    found: list[Part] = []
    for part in parts:
        param = params[part.index]
        if whole[part.index] or not param.is_cpu:
            found.append(part)
        else:
            found += _cut(part, torch.get_num_threads() * PORTION_BYTES // param.element_size())
    return tuple(found)


def _gains(group: Mapping[str, Any]) -> bool:
    """Whether the optimizer does one tensor after the other, with several operations for each. Of
    the other ways, "fused" does all in one, and "foreach" each operation for all tensors."""
    return not (group.get("fused") or group.get("foreach"))


def _cut(part: Part, elems: int) -> list[Part]:
    """Portions of about so many elements. Cuts are at multiples of ALIGNMENT_ELEMS of the
    parameter."""
    size = part.end - part.begin
    number = max(round(size / max(elems, ALIGNMENT_ELEMS)), 1)
    cuts = (
        (part.begin + i * size // number) // ALIGNMENT_ELEMS * ALIGNMENT_ELEMS
        for i in range(1, number)
    )
    ends = sorted({part.begin, part.end, *(cut for cut in cuts if cut > part.begin)})
    return [Part(part.index, begin, end) for begin, end in itertools.pairwise(ends)]
