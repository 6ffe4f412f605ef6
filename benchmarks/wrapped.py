"""Times training steps of models that torch itself distributes: DDP and FSDP2, over process groups
of hvdlite and of Gloo.

DDP's gradients are views of its buckets. FSDP2 shards every linear layer, and gathers it again for
the backward pass, as is its default.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.figures import FLOOR, OPTIMIZER
from benchmarks.groups import Group
from benchmarks.networks import Task
from benchmarks.training import Hvdlite, Trainer


class WithDDP(Trainer):
    def __init__(self, task: Task, group: Group) -> None:
        super().__init__(task)
        self.enter, self.leave = group.enter, group.leave  # type: ignore[method-assign]
        self.model = DistributedDataParallel(
            self.network, process_group=group.group, gradient_as_bucket_view=True
        )


class WithFSDP2(Trainer):
    def __init__(self, task: Task, group: Group) -> None:
        super().__init__(task)
        self.enter, self.leave = group.enter, group.leave  # type: ignore[method-assign]
        mesh = DeviceMesh.from_group(group.group, "cpu")
        for module in self.network.modules():
            if isinstance(module, nn.Linear):
                fully_shard(module, mesh=mesh)
        fully_shard(self.network, mesh=mesh)
        self.optimizer = task.make_optimizer(self.network.parameters())

    def parameters(self) -> list[torch.Tensor]:
        sharded: Any = list(self.network.parameters())
        return [parameter.full_tensor() for parameter in sharded]


def contenders(wrapper: str, groups: Mapping[str, Group]) -> dict[str, Callable[[Task], Trainer]]:
    """By name. wrapper: of WRAPPERS."""
    kind = WRAPPERS[wrapper]
    found: dict[str, Callable[[Task], Trainer]] = {
        name: partial(kind, group=group) for name, group in groups.items()
    }
    if kind is WithDDP:
        found[OPTIMIZER] = Hvdlite
    return {**found, FLOOR: Trainer}


WRAPPERS: dict[str, type[WithDDP] | type[WithFSDP2]] = {"DDP": WithDDP, "FSDP2": WithFSDP2}
