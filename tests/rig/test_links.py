"""The verdict on links between hosts: the slow one is named, and no other; a late rank's is not."""

import json
import re

import pytest

pytestmark = [pytest.mark.rig, pytest.mark.long]

HOSTS = ("server1", "server2", "server3")
# Each step takes 4 MB of gradients to two of three hosts; the late rank sleeps in each.
TRAINS = """
import sys, time
import torch
import hvdlite as hvd

hvd.init()
model = torch.nn.Linear(1000, 1000)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for step in range(24):
    optimizer.zero_grad()
    loss = model(torch.ones(1, 1000)).sum()
    if hvd.rank() == int(sys.argv[1]):
        time.sleep(0.2)
    loss.backward()
    optimizer.step()
"""


def figures_of(rig, hvdrun, python, rates, late=-1, ranks=1):
    """Of a job with so many ranks on each host, whose links have these rates."""
    for host, rate in zip(HOSTS, rates, strict=True):
        rig("slow", host, "--rate", rate)
    folder = rig.share / f"links-{ranks}-{python.parents[1].name}"
    hosts = ",".join(f"{host}:{ranks}" for host in HOSTS)
    options = ("-H", hosts, "--summary", "--output-dir", folder)
    done = hvdrun(*options, python, "-c", TRAINS, str(late))
    assert done.code == 0, done
    figures = json.loads((folder / "metrics.json").read_text())["whole"]
    assert {(each["from"], each["to"]) for each in figures["links"]} == {
        (sender, receiver) for sender in HOSTS for receiver in HOSTS if sender != receiver
    }
    # 2/3 of the gradients' bytes in 23 steps, and little else.
    sent = 23 * 4 * 1_001_000 * 2 / 3
    for each in figures["links"]:
        assert each["bytes"] == pytest.approx(sent, rel=0.01), each
        assert each["tcp_bytes"] == pytest.approx(sent, rel=0.05), each
    return figures, done.stderr


@pytest.mark.parametrize(("python", "ranks"), [("openmpi", 1), ("mpich", 2)], indirect=["python"])
def test_the_host_with_the_slow_link_is_named_and_nobody_else(rig, hvdrun, python, ranks):
    rates = ["500mbit", "50mbit", "500mbit"]
    figures, said = figures_of(rig, hvdrun, python, rates, ranks=ranks)
    verdict = figures["verdicts"][-1]
    words = r"server2's link gives at most 0\.0[4-9]\d? Gbit/s, the others at least 0\.\d\d"
    assert re.fullmatch(words, verdict), figures
    assert said.endswith(f"hvdrun: {verdict}\n")
    assert figures["slow_link"]["hosts"] == ["server2"]
    assert "link" not in " ".join(figures["verdicts"][:-1])


@pytest.mark.parametrize("python", ["mpich"], indirect=True)
def test_a_late_rank_on_equal_links_is_named_and_no_link(rig, hvdrun, python):
    figures, _ = figures_of(rig, hvdrun, python, ["500mbit"] * 3, late=1)
    (verdict,) = figures["verdicts"]
    assert verdict.startswith("rank 1 on server2 arrives last in "), figures
    assert figures["slow_link"] is None
