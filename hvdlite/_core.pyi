"""The C core: plans, the engine that drives them, and what the ranks of a host share.

What is posted is a `Posting`. The engine keeps it and its tensors until the operation has ended,
also when nobody waits for it; it asks tensors for `shape` and `data_ptr()` only. A plan's buffer is
an address, and `owner` is any object that keeps it alive.
The module knows no torch and no MPI: the wire is a table of addresses and handles.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch

# Kinds of operations.
ALLREDUCE: int
BROADCAST: int
ALLGATHER: int
BARRIER: int
ALLTOALL: int
REDUCESCATTER: int
JOIN: int
REDUCE: int
# As ALLGATHER and ALLTOALL, with results in the caller's memory.
ALLGATHER_INTO: int
ALLTOALL_INTO: int
GATHER: int
SCATTER: int
# (The making of a plan, and sends and receives, have names in events but are not posted.)

class Kind(NamedTuple):
    """What is true of all operations of a kind."""

    name: str
    # The result has rows of all members; the engine makes its memory when it knows their number.
    gathers: bool
    # The result is this member's rows of what all get together.
    shares: bool
    # The members' data is combined by the reduce op.
    reduces: bool
    # One member alone gives data, or gets it.
    has_root: bool
    # A rank that has joined counts as present. Else the operation fails while one has.
    joined_takes_part: bool

# By number.
KINDS: tuple[Kind, ...]

# Reduce ops.
AVERAGE: int
SUM: int
MIN: int
MAX: int
PRODUCT: int
ADASUM: int
# Bitwise: of integers and bool.
BAND: int
BOR: int
BXOR: int

# Forms of plans: an allreduce, or a half of one. PLAN_TO_OWNERS gives each rank the sums of the
# elements that it owns (Engine.owned), with the bits of the allreduce; what the rest of its output
# then holds is not specified. PLAN_UNITE is the other half, in place: each rank's elements reach
# all ranks. With the forms of a host, each host's ranks own everything among them, and only they
# unite it.
PLAN_WHOLE: int
PLAN_TO_OWNERS: int
PLAN_TO_HOST_OWNERS: int
PLAN_UNITE: int
PLAN_UNITE_ON_HOST: int

# Element types.
UINT8: int
INT8: int
INT16: int
INT32: int
INT64: int
FLOAT16: int
BFLOAT16: int
FLOAT32: int
FLOAT64: int
BOOL: int

# Where tensors lie: in host memory; on a device, passing through host memory; on a device, where
# something else does the work and the engine only agrees on it.
ON_HOST: int
STAGED: int
ORDERED: int
# The end of the text of an operation that some members have posted as STAGED and others as ORDERED,
# and that differs in nothing else. It has failed on all of them, which may post it again.
SOME_WITHOUT_DATA: str

# How slices are reduced between hosts.
RING: int
DIRECT: int
RECURSIVE_DOUBLING: int

CALLER_BYTES: int
EVENT_BYTES: int
BLACK_BOX_BYTES: int
KIND_NAMES: tuple[str, ...]
"""The first bytes of the shared memory, which are the caller's (for its nonce)."""

def memory_bytes(local_size: int, num_ranks: int, inline_bytes: int, block_bytes: int) -> int:
    """Size of the memory that the ranks of one host share."""

def cpu_features() -> str:
    """The kernels that this CPU was given: 'avx512', 'avx2', 'neon' or 'baseline'."""

def kernel_variants() -> list[str]:
    """The kernels that this CPU can run, the one in use first, 'baseline' last."""

def reduce(
    variant: str,
    dtype: int,
    op: int,
    output: int,
    inputs: tuple[int, ...],
    count: int,
    prescale: float,
    divisor: int,
    postscale: float,
    factors: tuple[float, ...] = (),
    /,
) -> None:
    """Reduces `count` elements of each input into `output` with the kernels of that name: for tests
    and benchmarks.

    output, inputs: addresses; the output may be one of the inputs, and must not overlap one
    otherwise. Each input is multiplied by `prescale`, the result by `postscale / divisor`, as
    hvdl_scale in reduce.h says. Bool: they are 1. factors: of sums of floats; a further one for
    each input.
    ValueError: this CPU has no such variant, or an argument is out of its range.
    """

def reduce_tree(
    variant: str,
    dtype: int,
    to_dtype: int,
    op: int,
    output: int,
    inputs: tuple[int, ...],
    merges: bytes,
    count: int,
    prescale: float,
    divisor: int,
    postscale: float,
    /,
) -> None:
    """As `reduce`, along a tree: after input k the two latest sums are added up merges[k] times.

    to_dtype: of the output: the inputs' or, of 16-bit floats and float32, the other one.
    ValueError: this CPU has no such variant, or an argument is out of its range.
    """

def fingerprint(address: int, size_bytes: int, /) -> int:
    """A number of 64 bits that is another one if one bit of the memory is: see
    optimizer/checks/fingerprints.py."""

def finish_on_exit(
    *,
    abort: int,
    ibarrier: int,
    test: int,
    finalized: int,
    finalize: int,
    comm: int,
    supervised: bool,
) -> None:
    """Says how this process ends MPI, from the C library's exit handlers: the only place where the
    code of an exception, of `sys.exit(3)` and of `raise SystemExit(3)` is known alike.

    The arguments are addresses of MPI functions and the handle of a communicator that is used for
    nothing else. Does nothing where MPI is finalized by then, and in a forked child. Otherwise:
    code != 0: MPI_Abort(comm, code); if `supervised` (somebody sees this process end, and ends the
    job) it just ends, without MPI_Finalize. Code 0: closes the engines that `close_on_exit` named;
    where finalize != 0, waits for the other ranks (MPI_Ibarrier, tested with growing pauses, so
    that it uses no core), then MPI_Finalize.
    A later call replaces the former; abort=0 switches it off.
    """

def receive_on_exit(
    *,
    iprobe: int,
    get_count: int,
    recv: int,
    byte: int,
    any_tag: int,
    comms: tuple[tuple[int, int], ...],
) -> None:
    """Which messages the exit handlers receive and drop before MPI_Finalize, where all ranks end
    with code 0: those on `comms` (handle, number of ranks), which nobody uses any more. The other
    arguments are addresses of MPI functions, the handle of MPI_BYTE, and MPI_ANY_TAG. A later call
    replaces the former."""

def close_on_exit(engines: tuple[Engine, ...], /) -> None:
    """The engines that the exit handlers close, in this order, with `linger`, where the exit code
    is 0. They are kept alive past the end of Python. A later call replaces the former."""

def fail_on_purpose(faults: tuple[tuple[int, str, int, int], ...], rank: int, /) -> None:
    """While there is no engine: what fails in all engines of this process that are made later,
    instead of what was asked for before. Counts begin anew.

    faults: of each kind, name, nth, times: the `nth` and the following `times` - 1 events of the
        kind fail. Kind 0: a message of data is lost; 1: a call of MPI returns an error; 2: an
        allocation fails. name: only calls of this function count; "": of any.
    rank: for the line that is printed when it happens.

    Raises:
        ValueError: There are too many.
    """

def force_past_cache(force: bool | None, /) -> None:
    """For tests and benchmarks: whether this process writes what other ranks of its host read past
    the caches; None: where that is found to be faster. The results are the same."""

def use_tensors(
    exchange_api: object,
    types: tuple[type, ...],
    changed: Callable[[tuple[Any]], object],
    /,
) -> bool:
    """What `Engine.run_allreduce` and `dtype_of` take: tensors of exactly these types, whose
    library has the DLPack functions `exchange_api` (its type's `__dlpack_c_exchange_api__`).
    changed: is called with a tuple of each tensor that will be written, for autograd. Returns
    whether it can be used; False if the functions are of an unknown version."""

def park(native_id: int, /) -> None:
    """Python is about to end: if the thread of this `native_id` waits for an operation, or begins
    to, it does not come back from there, whether the operation ends or not. One thread of a
    process. (Not its `ident`, which a later thread may get.)"""

def tcp_connection(fd: int, /) -> tuple[str, str, int, int, float, float] | None:
    """What the kernel has counted for this descriptor: the local and the peer's address, a number
    that no other connection between them has, the bytes that the peer has acknowledged, the seconds
    in which some that were sent were not yet acknowledged, and those of them in which the peer had
    no room for more. None: it is no TCP connection to another host, or nothing was acknowledged, or
    another thread uses the descriptor for another one meanwhile, or the kernel is older than
    4.10."""

def dtype_of(tensor: object, /) -> int:
    """The element type of a dense tensor in host memory, of a type that `use_tensors` named, whose
    storage holds all of it; -1: it is something else. (A small one's storage that was shrunk, but
    not freed, is not noticed.)"""

@final
class Posting:
    """One operation that is to be done. Never changes."""

    kind: int
    name: str
    unnamed: bool
    dtype: int
    source: Any
    result: Any
    op: int
    root: int
    prescale: float
    postscale: float
    splits: torch.Tensor | tuple[int, ...] | None
    place: int
    site: str | None

    def replace(self, **changes: Any) -> Posting:
        """A copy with other values, in the words of `posting`; the kind stays."""

def posting(
    kind: int,
    name: str,
    unnamed: bool,
    dtype: int,
    source: Any = None,
    result: Any = None,
    op: int = 0,
    root: int = 0,
    prescale: float = 1.0,
    postscale: float = 1.0,
    splits: Any = None,
    group: tuple[int, int] | None = None,
    place: int = 0,
    site: str = "",
) -> Posting:
    """Makes a `Posting`. (A function and not the class, which would take its keywords more slowly.)

    name: it is matched by kind and name, unnamed ones by the name alone, so that ranks that post
    different kinds under the same unnamed name fail and do not hang.
    source: a contiguous tensor, or for a reducescatter a tuple of one for each member; None:
    barrier and join.
    result: of the same dtype, and as large as the source, which it may be (broadcast: the root's
    source is copied to its result if they differ); reducescatter: this member's share; None if the
    kind gathers, see `Operation.capsule`.
    ALLGATHER_INTO, ALLTOALL_INTO, GATHER, SCATTER: results in the caller's memory. What has a part
    for each member is a tensor, in which the parts follow each other, or a tuple of as many
    tensors: allgather's result, alltoall's source and result (neither overlaps the other), gather's
    result (others than the root give None), scatter's source (others give None). An allgather's or
    gather's source may be its own part of the result, and a scatter's result that of the source.
    Parts are of the same size, unless there are splits. `post` checks all sizes.
    root: broadcast, reduce, gather, scatter: a member's number; of a reduce the others' result is
    None.
    place: ON_HOST, STAGED or ORDERED: where the user's tensor lies, which must be the same on all
    members. ORDERED: no data is moved, only the source's shape counts, and no tensor is kept;
    `Operation.rows` then gives the operation's turn.
    splits: alltoall: int64 rows for each member, in host memory. ALLGATHER_INTO: how many elements
    each member gives, the same numbers on all members. ALLTOALL_INTO: how many elements go to each
    member, then how many come from each; either all members give splits or none does. These two
    take a tuple of int, too. reducescatter: elements of each member's share, the same on all
    members; without them the rows are dealt out evenly, and a tuple's tensors are of one size.
    group: several tensors are reduced as one: their number, and a hash of their shapes.
    site: where the script posts it ("train.py:12"), for texts about operations that differ or are
    late; '': not known. More than 63 bytes are cut at the front.
    """

@final
class Operation:
    """One run of a collective; ends as DONE or FAILED."""

    def poll(self) -> bool:
        """Has it ended? Never blocks. (A failure is an end too: `wait` tells.)"""

    def wait(self, timeout_s: float = -1.0) -> str | None:
        """Blocks without the GIL until it has ended: None, or the text of the failure.

        Signal handlers of Python run meanwhile; what they raise is raised here.
        timeout_s: negative: no limit. TimeoutError: it has not ended within that time, and is in
        flight still; the text names the ranks that have not called it. To find them takes up to a
        second more where there are several hosts.
        """

    def drive(self, limit_s: float, /) -> bool:
        """Waits, driving the engine, for at most so many seconds; whether it has ended. Asks nobody
        why not, as `wait` does."""

    def label(self) -> tuple[str, str]:
        """The kind's name, and the operation's."""

    def rows(self) -> tuple[int, ...]:
        """Allgather, after it ended: every member's first dimension, in member order.

        Of what was posted as ORDERED, its turn alone: what all members agree on is numbered with 0,
        1, 2, ... on all of them alike; -1 where a member has joined.

        Of a receive: the member that sent, and how many bytes came.
        """

    def capsule(self) -> Any:
        """Allgather, alltoall, after it ended: the result as a DLPack capsule, which owns it. Once.
        A result without elements: its shape."""

    def withdraw(self) -> bool:
        """Takes back a send or receive that is not matched.

        True: it never will be, and has ended as failed (also when asked again). False: it is
        matched, has ended, or is a collective. Blocks until that is known: a send's receiver
        answers; one on another host that has never received from this rank does not, and after
        5 s the send stays in flight (False)."""

@final
class Plan:
    """A collective prepared once and started many times; freed with its last reference."""

    def start(
        self, owner: object, weight: float | None = None, is_in_input: bool = False, /
    ) -> Operation:
        """Starts a run. RuntimeError if the previous run has not ended.

        weight: How much this rank's first `weighted` elements count in an average: 0, or positive
            and finite. If all ranks that take part give one, and not all are 0, the average of
            these elements is Σ weight·input / Σ weight. Of equal weights it has the bits of one
            without weights. The weights travel with the starts.
        is_in_input: True: the input is multiplied by the weight already."""

@final
class Engine:
    """The engine of one process: a queue of operations and the thread that drives them."""

    def __init__(
        self,
        *,
        rank: int,
        hosts: Sequence[Sequence[int]],
        host_names: Sequence[str],
        world_ranks: Sequence[int],
        memory_fd: int,
        wire: dict[str, int] | None,
        progress_thread: bool,
        inline_bytes: int,
        block_bytes: int,
        segment_bytes: int,
        piece_bytes: int,
        algorithms: tuple[tuple[int, int], ...],
        deterministic: bool,
        event_capacity: int,
        stall_warning_s: float,
        stall_shutdown_s: float,
        launcher: tuple[int, int, int],
        black_box: tuple[int, int],
    ) -> None:
        """rank: this process's number among the members, from 0.
        hosts: the members on each host, each list ascending, the lists in the order of their first
        one; every member is on exactly one. host_names: their names, for messages.
        world_ranks: by member, what messages call it.
        memory_fd: memory of `memory_bytes(...)` bytes that all ranks of this host have open
        (duplicated by the engine), zero behind the header; -1 where the rank is alone on its host.
        wire: None where there is one host; else addresses of isend, irecv, test, cancel,
        and the words comm (a communicator that is the engine's alone and whose ranks are the
        members), byte (MPI_BYTE), tag_ub.
        progress_thread: False where MPI may not be called from another thread; progress is then
        made inside poll and wait only.
        algorithms: how slices are reduced between hosts: up to so many bytes by this one, the first
        that holds; none: RING. Where sums must be in rank order, DIRECT counts.
        stall_warning_s: after this time an operation that some members have not called is
        reported on stderr, once; stall_shutdown_s: everything fails, on all members. 0: never.
        launcher: a socket to hvdrun, which gets each report as a note (hvdrun's machine/notes.py):
        its descriptor, and the file's device and inode.
        black_box: the address of BLACK_BOX_BYTES that stay for as long as the process, zero behind
        the text at their begin (0: there is none); and a number of 32 bits by which the members
        are told from others there.
        Collective: every rank makes its own, after all ranks of the host have opened the memory.
        """

    def post(self, posting: Posting, wake: bool = True, /) -> Operation:
        """Posts one operation; never blocks, and works on while Python is busy. When it has ended,
        the same posting may be posted again.

        wake: False where the caller waits for it next: it is then driven by the calling thread,
        with no hand-over to the progress thread.
        ValueError: an operation of this kind and name is in flight already; a tensor has no
        memory; tensors or splits that do not fit together.
        """

    def run(self, posting: Posting, timeout_s: float = -1.0) -> str | None:
        """Posts and waits in one call, without an `Operation`: None, or the text of the failure.
        TimeoutError: see `Operation.wait`; it goes on, and the engine keeps its tensors.
        ValueError: as `post`; and for kinds whose result the engine makes (allgather, alltoall)."""

    def give_up(self, text: str, /) -> None:
        """All operations of this engine fail with this text, on all members, and all that are
        posted later. The first text that a host hears of counts there. Does not wait for that."""

    def failures(self, kind: int, name: str, /) -> int:
        """How many operations of this kind and name have failed since all ranks last joined: the
        same on every rank on which the last of them has ended."""

    def ends(self) -> int:
        """A count that changes when an operation has ended, and now and then without one."""

    def await_end(self, seen: int, /) -> None:
        """Sleeps until the count of `ends` is not `seen`, for a second at most, without the GIL.
        For a thread that waits for any of several operations: it drives nothing, so that there
        must be a progress thread."""

    def wake(self) -> None:
        """Wakes a thread in `await_end`: changes the count."""

    def cut_bytes(self) -> int:
        """An allreduce or broadcast that is posted in parts, cut at multiples of so many bytes and
        the last part no shorter than that, gives the bits of one that is posted as a whole. 0: it
        may not be cut. The same on every member."""

    def run_allreduce(
        self,
        tensor: Any,
        result: Any,
        name: str | Callable[[], str],
        op: int,
        prescale: float,
        postscale: float,
        timeout_s: float,
        site: str,
        due_s: float,
        /,
    ) -> str | None:
        """As `run`, of an allreduce; without a `Posting`.

        result: where the sum goes; None: to the tensor, of which autograd learns that it changes.
        name: it, or what is called for that of an unnamed operation where nothing is refused.
        due_s: from this time of CLOCK_MONOTONIC on everything is refused.
        NotImplemented, and nothing was done: it takes ordinary arguments only. These are contiguous
        tensors with elements, in host memory, of a type that `use_tensors` named and of any dtype
        but bool; an op that the dtype has, but Adasum; and floats."""

    def send(self, tensor: Any, to: int, tag: int, site: str = "", wake: bool = True) -> Operation:
        """Sends a contiguous tensor to a member, which may be this one; never blocks.

        It ends when a receive has taken the data, or, of a large message, when the tensor may be
        changed. Messages between two members with one tag are received in the order in which they
        were sent.

        tag: 0 to 2^31-1. site: where the script calls it, for texts. wake: as in `post`.
        It fails, as its receive does, if the two tensors differ in bytes; also if the other member
        leaves or dies, or if it is withdrawn.
        """

    def recv(
        self, tensor: Any, source: int, tag: int, site: str = "", wake: bool = True
    ) -> Operation:
        """Receives into a contiguous tensor; never blocks. source: a member, or -1: any. Of several
        receives that could take a message, the one that was posted first takes it. See `send`."""

    def plan(
        self,
        name: str,
        dtype: int,
        op: int,
        input: int,
        output: int,
        count: int,
        prescale: float,
        postscale: float,
        owner: object,
        /,
        form: int = ...,
        cut_as: int = -1,
        extents: Sequence[tuple[int, int, int]] | None = None,
        weighted: int = 0,
    ) -> Plan:
        """Prepares an allreduce of `count` elements, or one of its halves: see PLAN_TO_OWNERS.
        Collective, matched by name like an operation, but does not block: a start before all
        members have made the plan waits for them. A plan that unites is not collective: its runs
        are, and fail while a rank has joined.

        cut_as: Of a plan that unites, the dtype whose `owned` counts; -1: its own.
        extents: Of one that unites within a host (PLAN_UNITE_ON_HOST, or where there is one host),
            where the elements lie, if not in one piece of memory: (begin, end, address), ascending,
            with the same begins and ends on every rank. What lies between them is not moved, and
            `input` and `output` are 0.
        weighted: Of one that reduces floats, on one host, how many elements have the weights of a
            run; the same on every rank."""

    def owned(
        self, count: int, dtype: int, form: int, member: int, cut_as: int = -1, /
    ) -> list[tuple[int, int]]:
        """The elements that a member owns in the buffer of such a plan, as ranges (begin, end):
        ascending, none empty, none touching the next. Each element has one owner, or, with a form
        of each host's owners, one on each host. The same on every member for the same arguments."""

    def record(self, capacity: int, /) -> None:
        """From now on keeps the latest `capacity` events: an event is an operation that reaches a
        state. 0: none. Events that were kept before are gone. `event_capacity` is what is kept
        from the start. This and the next two also work when the engine is closed."""

    def events(self) -> list[tuple[int, str, str]]:
        """The events that are kept, oldest first: (time.monotonic_ns(), name, POSTED | MATCHED |
        RUNNING | DONE | FAILED)."""

    def drain_events(self) -> tuple[list[tuple[int, int, str, str, str, int]], int]:
        """Takes out the events that are kept, oldest first, and says how many older ones found no
        room since the last time.

        (time.monotonic_ns(), the operation's number, its kind, its name, its state, the bytes of
        its tensor on this rank). Names come again, numbers do not; a long name is cut and ends in
        dots. The kind of a plan's making is 'plan', and its runs are 'allreduce', 'reducescatter'
        or 'allgather'. Operations that were posted before recording was switched on are there from
        their next state on.
        """

    def counters(self) -> dict[str, int]:
        """So far: operations; between hosts control_messages, data_messages, data_bytes; within
        this one past_cache_bytes (docs/design/data-path.md)."""

    def sent_bytes(self) -> dict[int, int]:
        """So far, by rank of this engine on another host: the part of data_bytes that was sent to
        it. Ranks to which nothing was sent are left out."""

    def close(self, linger: bool = False, /) -> None:
        """Fails what is pending, tells the others that this rank has left, ends the thread. Not
        collective. linger: MPI is about to be ended; then the messages of the other hosts' ranks
        that they leave are awaited. The other methods raise RuntimeError afterwards. Safe to call
        twice and in a forked child."""

@final
class Arrivals:
    """What the hooks of an optimizer's gradients know of the round that reduces them."""

    number: int
    """Of the open round, or of the next one."""
    first_of_step: int
    """Rounds from this one on belong to the present step."""
    is_open: bool
    """It has begun, and is not finished."""
    in_backward: bool
    """A backward pass runs, and `on_gradient` has seen it begin."""
    is_plain: bool
    """What comes in this backward pass needs nothing but to be copied to its bucket."""

    def __init__(
        self,
        on_gradient: Callable[[Any, Any], object],
        on_complete: Callable[[], object],
        /,
    ) -> None:
        """on_gradient: called with a Gradient and its parameter, where the hook does not know what
        to do with it: always outside of a backward pass. on_complete: called when all gradients of
        a bucket are there."""

    def note_addresses(self, gradients: list[Any], /) -> None:
        """Notes where the memory of their parameters is."""

    def are_unchanged(self, gradients: list[Any], frozen: list[Any], /) -> bool:
        """Whether the parameters of `gradients` require gradients and have the memory that was
        noted, and those of `frozen` require none."""

    def note_versions(self, gradients: list[Any], /) -> None:
        """Notes how often their parameters have been changed in place."""

    def changed(self, gradients: list[Any], /) -> Any:
        """The first of them whose parameter has been changed since, or whose gradient has come in
        the open round and is gone; else None."""

class GradientCount:
    """Counts the gradients of a bucket."""

    pending: int
    """How many are still to come."""
    takes_copies: bool
    """Whether a hook may copy dense gradients to their places."""

class Gradient:
    """One parameter's gradient, with the hook that autograd calls when it has accumulated it."""

    @property
    def arrivals(self) -> Arrivals: ...
    @property
    def param(self) -> torch.Tensor: ...
    bucket: Any
    view: torch.Tensor | None
    rows: torch.Tensor | None
    round_grad: torch.Tensor | None
    last_round: int
    unreduced_round: int
    is_sharded: bool

    def __init__(self, arrivals: Arrivals, param: Any, /) -> None: ...
    def arrive(self, param: Any, /) -> None:
        """The hook."""

    def count_down(self) -> bool:
        """Notes that the gradient is in its bucket; whether this has all of them now."""
