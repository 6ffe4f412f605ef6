"""A collective as the user has called it, in all its forms: blocking or asynchronous, of one tensor
or of a group, recorded by autograd or not, compressed or not.

The file of a collective has its public functions, and a subclass of `Call` with what is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from hvdlite import _core
from hvdlite.collectives import posting as arguments
from hvdlite.collectives.devices import begin
from hvdlite.collectives.groups import Group, parts_of, tensors_of
from hvdlite.collectives.handles import Handle, Several, synchronize
from hvdlite.collectives.posting import BOOL, checked, differentiable, named, readable
from hvdlite.compression import Compression, Compressor
from hvdlite.errors import HorovodInternalError, UnsupportedError
from hvdlite.observe import waits
from hvdlite.sites import site
from hvdlite.world.teams.process_sets import ProcessSet, team_of
from hvdlite.world.teams.team import Team
from hvdlite.world.telling import last_line

NONE = Compression.none

Name = str | None
# The op, by what each rank's tensor is multiplied, and by what the result; as the user gave them.
Reduction = tuple[Any, Any, Any]
PLAIN: Reduction = (0, 1.0, 1.0)
# What to read, and where the result goes; None: the engine makes it.
Memory = tuple[torch.Tensor, torch.Tensor | None]
# Operations that have ended well, each with its tensor.
Ended = Sequence[tuple[Any, torch.Tensor]]

_posting = _core.posting
_dtype_of = _core.dtype_of
_increment_version = torch.autograd.graph.increment_version


class Gradient(NamedTuple):
    """How the gradients of a call's tensors come from those of its results."""

    # The call that sends them.
    call: Call
    # What to send of the gradient of a result.
    to_send: Callable[[torch.Tensor], torch.Tensor] = lambda grad: grad
    # From what comes back, and the number of its tensor, the tensor's gradient.
    from_result: Callable[[Any, int], torch.Tensor] = lambda result, index: result


class Call:
    """What a user asks of a collective, beside the tensors.

    form: the function that the user has called; in place if it ends in "_".
    """

    kind: int
    # Whether it is along the first dimension.
    has_rows = False
    root = 0
    splits: Any = None

    def __init__(
        self,
        form: str,
        name: Name,
        process_set: ProcessSet,
        how: Reduction = PLAIN,
        own: Any = None,
    ) -> None:
        """own: what only this collective has: the root's rank, or the splits."""
        self.form = form
        self.name = name
        self.process_set = process_set
        self.op, self.prescale, self.postscale = how
        self.own = own

    # What is a collective's own.

    def check(self, team: Team, tensor: torch.Tensor) -> int:
        """The core's number for the tensor's dtype.

        Raises:
            ValueError: The call can't be done with this tensor.
        """
        code = _dtype_of(tensor)
        if code < 0 or code == BOOL:
            code = checked(self.form, tensor, self.op)
        pre, post = self.prescale, self.postscale
        if pre.__class__ is not float or post.__class__ is not float or code == BOOL:
            self.prescale, self.postscale = arguments.factors(self.form, code, pre, post)
        if self.has_rows and not tensor.dim():
            text = f"{self.form}: a scalar has no first dimension; use tensor.reshape(1)"
            raise UnsupportedError(text)
        return code

    def memory(self, team: Team, tensor: torch.Tensor) -> Memory:
        return readable(tensor), None

    def same_shape(self, team: Team, tensor: torch.Tensor) -> Memory:
        """`memory` of a result of the tensor's shape, which may be the tensor."""
        if self.form[-1] == "_":
            if tensor.is_neg() or not tensor.is_contiguous():
                arguments.refuse_in_place(self.form, tensor)
            # autograd may have saved the tensor: tells it that the tensor has changed.
            _increment_version(tensor)
            return tensor, tensor
        source = readable(tensor)
        return source, torch.empty_like(tensor) if source is tensor else source

    def handle(self, started: Handle) -> Handle:
        """The handle for the user."""
        return started

    def layout(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """What is the same on all ranks of the shape of a group's tensor."""
        return tensor.shape

    def gradient(self, form: str, name: str, ended: Ended) -> Gradient:
        """form: "" or "grouped_", with which that of the gradient's call begins. name: its name."""
        raise NotImplementedError

    # What is the same for all.

    def posting(
        self, team: Team, tensor: torch.Tensor, name: Name, group: Group | None = None
    ) -> _core.Posting:
        code = self.check(team, tensor)
        source, result = self.memory(team, tensor)
        text: Any = name
        unnamed = name.__class__ is not str
        if unnamed:
            text, unnamed = named(team, name)
        op, root, pre, post = self.op, self.root, self.prescale, self.postscale
        kind, rows, at = self.kind, self.splits, site(3)
        return _posting(
            kind, text, unnamed, code, source, result, op, root, pre, post, rows, group, 0, at
        )

    def start(self, tensor: torch.Tensor, wake: bool = True) -> Handle:
        """wake: False if the caller waits for it next."""
        team = team_of(self.form, self.process_set)
        return self.handle(begin(team, self.posting(team, tensor, self.name), wake))

    def run(self, tensor: torch.Tensor, compression: type[Compressor] = NONE) -> torch.Tensor:
        if compression is not NONE:
            (small,), (ctx,) = self.compressed([tensor], compression)
            return compression.decompress(self.run(small), ctx)
        # (The first two are for speed.)
        if (
            (tensor.__class__ is not torch.Tensor or tensor.requires_grad)
            and differentiable(tensor)
            and self.form[-1] != "_"
        ):
            return _Recorded.apply(self, False, tensor)  # type: ignore[no-any-return,no-untyped-call]
        team = team_of(self.form, self.process_set)
        posting = self.posting(team, tensor, self.name)
        result: torch.Tensor | None = posting.result
        if result is None or not tensor.is_cpu or waits.observed():
            return synchronize(self.handle(begin(team, posting, False)))  # type: ignore[no-any-return]
        if last_line.clock() >= last_line.due:
            last_line.note()
        failure = team.run(posting)
        if failure is not None:
            raise HorovodInternalError(failure)
        return result

    def compressed(
        self, tensors: Sequence[torch.Tensor], compression: type[Compressor]
    ) -> tuple[list[torch.Tensor], list[Any]]:
        """What travels, and what `decompress` needs."""
        arguments.checked_compression(self.form, compression)
        for tensor in tensors:
            checked(self.form, tensor, self.op)
        pairs = [compression.compress(tensor) for tensor in tensors]
        return [small for small, _ in pairs], [ctx for _, ctx in pairs]

    def start_group(self, given: Iterable[torch.Tensor], wake: bool = True) -> Handle:
        tensors = tensors_of(self.form, given)
        team = team_of(self.form, self.process_set)
        # All are checked before the first one is posted.
        layout = tuple([(self.check(team, tensor), self.layout(tensor)) for tensor in tensors])
        return self.post_group(team, tensors, layout, wake)

    def post_group(
        self, team: Team, tensors: Sequence[torch.Tensor], layout: Any, wake: bool
    ) -> Handle:
        parts = parts_of(team, self.kind, self.name, len(tensors), layout)
        handles = [
            begin(team, self.posting(team, tensor, part, group), wake)
            for tensor, (part, group) in zip(tensors, parts, strict=False)
        ]
        return Handle(
            Several([handle.operation for handle in handles]),
            finish=lambda: list(map(synchronize, handles)),
        )

    def run_group(
        self, given: Iterable[torch.Tensor], compression: type[Compressor] = NONE
    ) -> list[torch.Tensor]:
        tensors = tensors_of(self.form, given)
        if compression is not NONE:
            small, contexts = self.compressed(tensors, compression)
            return list(map(compression.decompress, self.run_group(small), contexts))
        if any(map(differentiable, tensors)) and self.form[-1] != "_":
            return list(_Recorded.apply(self, True, *tensors))  # type: ignore[no-untyped-call]
        return synchronize(self.start_group(tensors, False))  # type: ignore[no-any-return]


class _Recorded(torch.autograd.Function):
    """A call that autograd records. Its backward is a call, too, named after it."""

    @staticmethod
    def forward(ctx: Any, call: Call, is_group: bool, *tensors: torch.Tensor) -> Any:
        name = f"{arguments.label(call.form, call.name, call.process_set)}.grad"
        handle = call.start_group(tensors, False) if is_group else call.start(tensors[0], False)
        results = synchronize(handle)
        operations = getattr(handle.operation, "operations", [handle.operation])
        ended = list(zip(operations, tensors, strict=False))
        ctx.gradient = call.gradient("grouped_" if is_group else "", name, ended)
        ctx.is_group, ctx.count = is_group, len(tensors)
        return tuple(results) if is_group else results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        call, to_send, from_result = ctx.gradient
        # Integers and bools are left out, on every rank alike: their gradients are zeros that
        # autograd makes.
        places = [place for place, grad in enumerate(grads) if grad.is_floating_point()]
        sent = [to_send(grads[place]) for place in places]
        received = call.run_group(sent) if ctx.is_group else [call.run(*sent)]
        results: list[Any] = [None] * ctx.count
        for place, result in zip(places, received, strict=True):
            results[place] = from_result(result, place)
        return None, None, *results
