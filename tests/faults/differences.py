"""Ranks that do not do the same as the others, or whose numbers are wrong."""

from __future__ import annotations

from tests.faults.fault import RAISED_IN_STEP, RAISED_WAITING, STALL_S, TRACEBACK, Fault

DIFFERS = "{} is not the same on all ranks: rank {{rank}} differs from"

DIFFERENCES = [
    Fault(
        "a wrong branch",
        (
            r"has waited .* rank {rank} on \S+ \(which",
            r"rank {rank} (?:went on to|called) broadcast 'state'",
            r"train\.py:{line} in train",
        ),
        fault="hvd.broadcast(torch.ones(3), 0, name='state')  # the line",
        limit_s=STALL_S,
        blames=(0, 1, 2),
    ),
    Fault(
        "a different order",
        (
            r"rank {rank} (?:waits in|went on to|called) allreduce '[xy]'|rank {rank} waits in",
            r"train\.py:{line} in train|train\.py\", line {line}, in train",
        ),
        step="""
        if step == 3:
            if RANK == CULPRIT:
                begins()
            for name in ("x", "y") if RANK == CULPRIT else ("y", "x"):
                hvd.allreduce(torch.ones(3), name=name)  # the line
        """,
        limit_s=STALL_S,
        blames=(0, 1, 2),
    ),
    Fault(
        "one batch more",
        (
            r"rank [02] on \S+ has left",
            r"^hvdrun: rank {rank} on {host} ended with exit code 1",
            RAISED_WAITING,
        ),
        data="[BATCH] * (5 + (RANK == CULPRIT))",
        blames=(0, 1, 2),
    ),
    Fault(
        "one batch less",
        (r"rank {rank}.* left", r"do all ranks run the same number|batches|rank {rank} on {host}"),
        data="[BATCH] * (5 - (RANK == CULPRIT))",
        blames=(0, 1, 2),
    ),
    Fault(
        "a frozen parameter",
        (r"rank {rank}\b.*", r"bias"),
        model="""
        if RANK == CULPRIT:
            begins()
            model.bias.requires_grad_(False)
        """,
        blames=(0, 1, 2),
    ),
    Fault(
        "another shape of a parameter",
        (r"rank {rank}\b", r"weight", r"\[3, 4\]"),
        model="""
        if RANK == CULPRIT:
            begins()
            model = torch.nn.Linear(4, 3)
        """,
        blames=(0, 1, 2),
    ),
    Fault(
        "another dtype",
        (r"allreduce 'loss': rank {rank} on \S+ \(\S+\) sent float64\[\]", TRACEBACK),
        step="""
        if step == 3:
            if RANK == CULPRIT:
                begins()
                loss = loss.double()
            hvd.allreduce(loss.detach(), name="loss")  # the line
        """,
        blames=(0, 1, 2),
    ),
    Fault(
        "other values at the start",
        (r"the ranks start from different values: .*rank {rank}",),
        model="""
        if RANK == CULPRIT:
            begins()
            torch.manual_seed(1)
            model.reset_parameters()
        """,
        blames=(1,),
    ),
    Fault(
        "NaN in a gradient",
        (r"NaN in the gradient of 'weight' on rank {rank}\b", RAISED_IN_STEP),
        fault="batch = batch * float('nan')",
        variables={"HVDLITE_CHECK_NUMERICS": "1"},
        blames=(0, 1, 2),
    ),
    Fault(
        "inf in a gradient",
        (r"an infinite number in the gradient of 'weight' on rank {rank}\b", RAISED_IN_STEP),
        fault="batch = batch * float('inf')",
        variables={"HVDLITE_CHECK_NUMERICS": "1"},
        blames=(0, 1, 2),
    ),
    Fault(
        "a changed bit of a parameter",
        (
            r"parameter 'weight' is not the same on all ranks: rank {rank} differs from",
            RAISED_IN_STEP,
        ),
        fault="model.weight.data.view(torch.int32)[0, 0] ^= 1",
        variables={"HVDLITE_CHECK_PARAMETERS": "1"},
        blames=(0, 1, 2),
    ),
    Fault(
        "a changed bit of the optimizer's state",
        (DIFFERS.format("state 'momentum_buffer of weight'"), RAISED_IN_STEP),
        step="""
        if step == 3 and RANK == CULPRIT:
            optimizer.state[model.weight]["momentum_buffer"].view(torch.int32)[0, 0] ^= 1
        """,
        variables={"HVDLITE_CHECK_PARAMETERS": "1"},
        blames=(0, 1, 2),
    ),
    Fault(
        "a rank that is slow in each step",
        (r"hvdrun: rank {rank} on {host} arrives last in \d+ % of steps, by \d+ ms: ",),
        data="[BATCH] * 80",
        step="""
        if RANK == CULPRIT:
            if step == 0:
                begins()
            time.sleep(0.05)
        """,
        options=("--summary",),
    ),
    Fault(
        "a loader that is slow in each step",
        (r"hvdrun: rank {rank} on {host} arrives last in .* its DataLoader",),
        code="""
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 80
            def __getitem__(self, index):
                if RANK == CULPRIT:
                    time.sleep(0.05)
                return BATCH
        """,
        data="torch.utils.data.DataLoader(Data(), batch_size=None)",
        step="""
        if step == 0 and RANK == CULPRIT:
            begins()
        """,
        options=("--summary",),
    ),
]
