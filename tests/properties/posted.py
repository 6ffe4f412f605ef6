"""One step of a program on one rank: the call in its form, and what came of it."""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass
from typing import Any

import torch

import hvdlite as hvd
from tests.properties import oracle
from tests.properties.calls import (
    Allgather,
    AllgatherObject,
    Allreduce,
    Alltoall,
    Barrier,
    Broadcast,
    BroadcastObject,
    Compressed,
    Gradient,
    Reducescatter,
    SparseAllreduce,
)
from tests.properties.programs import Program, Step, fate


@dataclass
class Outcome:
    """What came of a step on a rank.

    error: the text of the HorovodInternalError. wrong: what is not as the oracle says.
    digest: of the bits of the result. began, ended: time.monotonic_ns around a barrier.
    last: what a join returned.
    """

    error: str | None = None
    wrong: str = ""
    digest: int | None = None
    began: int = 0
    ended: int = 0
    last: int | None = None


class Posted:
    """A step that this rank has posted; or done, in the form that waits."""

    def __init__(
        self,
        program: Program,
        index: int,
        rank: int,
        name: str | None,
        process_set: hvd.ProcessSet,
    ) -> None:
        step = program.steps[index]
        assert isinstance(step, Step)
        self.program, self.index, self.rank = program, index, rank
        self.turn, self.call = step.turn(rank), step.call_of(rank)
        self.fate = fate(program, index, rank)
        self.members = program.sets()[step.on]
        values = oracle.inputs(index, rank, self.call, self.members)
        if self.turn.strided:
            values = [strided(value) for value in values]
        self.given = values
        self.kept = [value.clone() for value in values]
        self.outcome = Outcome()
        self.gradients: list[torch.Tensor] | None = None
        self._options: dict[str, Any] = {"name": name, "process_set": process_set}
        if self.turn.refused:
            self._refuse()
        self._result: Any = None
        self._handle: Any = None
        self.outcome.began = time.monotonic_ns()
        try:
            if self.turn.form == "sync":
                self._result = self._do(self.call)
            else:
                self._handle = self._start(self.call)
        except hvd.HorovodInternalError as error:
            self.outcome.error = str(error)
        self.outcome.ended = time.monotonic_ns()

    # ---- the forms ----

    def _do(self, call: Any) -> Any:
        """In the form that waits."""
        options = self._options
        if isinstance(call, Gradient):
            return self._differentiate(call.of)
        if isinstance(call, Compressed):
            options = {**options, "compression": getattr(hvd.Compression, call.by)}
            call = call.of
        if isinstance(call, Barrier):
            return hvd.barrier(**options)
        if isinstance(call, AllgatherObject):
            return hvd.allgather_object(oracle.object_of(self.index, self.rank), **options)
        if isinstance(call, BroadcastObject):
            own = oracle.object_of(self.index, self.rank)
            return hvd.broadcast_object(own, call.root, **options)
        if isinstance(call, SparseAllreduce):
            return self._start(call)()
        function, arguments = self._form(call)
        return getattr(hvd, function)(*arguments, **self._factors(call), **options)

    def _start(self, call: Any) -> Any:
        """In the form that does not wait."""
        if isinstance(call, SparseAllreduce):
            return hvd.sparse_allreduce_async(
                self.given[0], op=getattr(hvd, call.op), **self._options
            )
        function, arguments = self._form(call)
        function = f"{function[:-1]}_async_" if function[-1] == "_" else f"{function}_async"
        return getattr(hvd, function)(*arguments, **self._factors(call), **self._options)

    def _form(self, call: Any) -> tuple[str, list[Any]]:
        kind = type(call).__name__.lower()
        if getattr(call, "grouped", False):
            kind = f"grouped_{kind}"
        arguments: list[Any] = [self.given] if kind.startswith("grouped") else list(self.given)
        if self.turn.in_place and isinstance(call, (Allreduce, Broadcast)):
            kind += "_"
        if isinstance(call, Broadcast):
            arguments.append(call.root)
        if isinstance(call, Alltoall) and call.splits is not None:
            split = oracle.split_of(call, self.rank, self.members)
            arguments.append(torch.tensor(split, dtype=torch.int32))
        return kind, arguments

    def _factors(self, call: Any) -> dict[str, Any]:
        if not isinstance(call, (Allreduce, Reducescatter)):
            return {}
        options: dict[str, Any] = {"op": getattr(hvd, call.op)}
        if (call.prescale, call.postscale) != (1.0, 1.0):
            options |= {"prescale_factor": call.prescale, "postscale_factor": call.postscale}
        return options

    def _differentiate(self, call: Any) -> Any:
        self.given = [value.requires_grad_() for value in self.given]
        result = self._do(call)
        results = [r for r in as_list(result) if r.requires_grad]
        weight = oracle.weight(self.rank)
        torch.autograd.backward(results, [torch.full_like(r, weight) for r in results])
        self.gradients = [value.grad for value in self.given if value.grad is not None]
        return result

    def _refuse(self) -> None:
        """The same with a bad argument: a ValueError, and as if it had not been."""
        try:
            if isinstance(self.call, (Allreduce, Reducescatter)):
                kind = "grouped_" * self.call.grouped + type(self.call).__name__.lower()
                getattr(hvd, f"{kind}_async")(self.given, op=17, **self._options)
            elif isinstance(self.call, (Broadcast, BroadcastObject)):
                hvd.broadcast(torch.ones(1), -1, **self._options)
            elif isinstance(self.call, Allgather):
                many = [torch.ones(1), torch.ones(())]
                hvd.grouped_allgather_async(many, **self._options)
            elif isinstance(self.call, Alltoall):
                hvd.alltoall_async(torch.ones(1), [9] * len(self.members), **self._options)
            else:
                hvd.barrier(process_set=[0])  # type: ignore[arg-type]
        except ValueError:
            return
        raise AssertionError(f"step {self.index}: a bad argument was not refused")

    # ---- the end ----

    def wait(self) -> Outcome:
        """Waits for it, and looks at the result."""
        outcome = self.outcome
        if outcome.error is None and self._handle is not None:
            try:
                self._result = self._waited()
            except hvd.HorovodInternalError as error:
                outcome.error = str(error)
        if outcome.error is None:
            if self.fate.startswith("fails"):
                outcome.wrong = outcome.wrong or "it did not fail"
            else:
                outcome.wrong = outcome.wrong or self._wrong()
        elif self.fate == "value":
            outcome.wrong = f"it failed: {outcome.error}"
        return outcome

    def _waited(self) -> Any:
        if isinstance(self.call, SparseAllreduce):
            result = self._handle()
            assert self._handle() is result
            return result
        if self.turn.polls:
            while not hvd.poll(self._handle):
                time.sleep(0)
        result = hvd.synchronize(self._handle)
        if not hvd.poll(self._handle):
            self.outcome.wrong = "poll says that it has not ended"
        if hvd.synchronize(self._handle) is not result:
            self.outcome.wrong = "synchronize gives another result the second time"
        return result

    def _wrong(self) -> str:
        """What of the result is not as it should be."""
        call = self.call.of if isinstance(self.call, (Gradient, Compressed)) else self.call
        got = as_list(self._result)
        if isinstance(call, (AllgatherObject, BroadcastObject)):
            got = [self._result]
        if isinstance(call, SparseAllreduce):
            got = [self._result.to_dense()]
        wanted = oracle.results(self.program, self.index, self.rank)
        if isinstance(call, Alltoall) and call.splits is None and self.turn.form == "sync":
            wanted = wanted[:1]
        in_place = self.turn.in_place and isinstance(call, (Allreduce, Broadcast))
        if in_place and not all(a is b for a, b in zip(got, self.given, strict=True)):
            return "the result is not the tensor that was passed"
        if not in_place:
            for value, before in zip(self.given, self.kept, strict=True):
                if not same(value.detach(), before):
                    return "the input has changed"
        if len(got) != len(wanted):
            return f"{len(got)} results, not {len(wanted)}"
        exact = getattr(call, "op", "Sum") != "Adasum"
        if not isinstance(call, (Alltoall, Reducescatter, Barrier, SparseAllreduce)):
            self.outcome.digest = digest_of(got)
        for number, (one, oracles) in enumerate(zip(got, wanted, strict=True)):
            if problem := oracle.mismatch(one, oracles, exact):
                return f"tensor {number}: {problem}" if len(got) > 1 else problem
        return self._wrong_gradients() if isinstance(self.call, Gradient) else ""

    def _wrong_gradients(self) -> str:
        wanted = oracle.gradients(self.program, self.index, self.rank)
        if self.gradients is None or len(self.gradients) != len(wanted):
            return f"gradients: {self.gradients}, not {wanted}"
        for one, oracles in zip(self.gradients, wanted, strict=True):
            if problem := oracle.mismatch(one, oracles):
                return f"gradient: {problem}"
        return ""


def as_list(result: Any) -> list[Any]:
    """The tensors that a collective has returned."""
    if result is None:
        return []
    return list(result) if isinstance(result, (list, tuple)) else [result]


def strided(value: torch.Tensor) -> torch.Tensor:
    """The same values with gaps between them."""
    return torch.stack([value, value], dim=-1)[..., 0]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the values are equal, also of sparse tensors."""
    if a.layout is torch.sparse_coo:
        return torch.equal(a._indices(), b._indices()) and torch.equal(a._values(), b._values())
    return torch.equal(a, b)


def digest_of(results: list[Any]) -> int:
    """Of the bits of all tensors, by which ranks are compared."""
    digest = 0
    for result in results:
        if isinstance(result, torch.Tensor) and result.numel():
            # A new tensor: one of a single element may have any stride.
            flat = torch.empty(result.numel(), dtype=result.dtype).copy_(result.detach().flatten())
            digest = zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), digest)
    return digest
