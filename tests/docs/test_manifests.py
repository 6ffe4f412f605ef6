"""The manifests of the pages are what Kubernetes and Docker Compose accept, and they fit to each
other."""

import importlib

import pytest
import yaml

from hvdrun.command_line.cli import cli
from hvdrun.command_line.nodes import place_of
from hvdrun.plan.request import Request
from tests.docs.pages import blocks
from tests.harness.needs import lacking

pytestmark = pytest.mark.wide

PAGE = "docs/launching/kubernetes.md"


def validators():
    found = []
    for name in ("kubernetes_validate", "compose_spec"):
        try:
            found.append(importlib.import_module(name))
        except ImportError:
            lacking(f"no {name}: make .venv/.manifests")
    return found


def documents():
    return [
        document
        for block in blocks(PAGE, "yaml")
        for document in yaml.safe_load_all(block.text)
        if isinstance(document, dict)
    ]


def of_kind(kind):
    (found,) = (d for d in documents() if d.get("kind") == kind)
    return found


def compose():
    (found,) = (d for d in documents() if "services" in d)
    return found


@pytest.mark.parametrize("kind", ["Job", "Service"])
def test_kubernetes_accepts_the_manifest_of(kind):
    kubernetes, _ = validators()
    kubernetes.validate(of_kind(kind), kubernetes.latest_version(), strict=True)


@pytest.mark.parametrize("role", ["Launcher", "Worker"])
def test_kubernetes_accepts_the_pods_of_the_mpi_job(role):
    kubernetes, _ = validators()
    template = of_kind("MPIJob")["spec"]["mpiReplicaSpecs"][role]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **template}
    kubernetes.validate(pod, kubernetes.latest_version(), strict=True)


def test_a_mistake_in_a_manifest_is_noticed():
    kubernetes, _ = validators()
    job = of_kind("Job")
    job["spec"]["completionsMode"] = job["spec"].pop("completionMode")
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate(job, kubernetes.latest_version(), strict=True)


def _check_compose(compose_spec, document):
    compose_spec.PyCompose.from_yaml(yaml.safe_dump(document)).validate()


def test_docker_compose_accepts_its_file():
    _, compose_spec = validators()
    _check_compose(compose_spec, compose())
    wrong = compose()
    wrong["services"]["node0"]["comand"] = "hvdrun"
    with pytest.raises(Exception, match="comand"):
        _check_compose(compose_spec, wrong)


def place(words, environ):
    context = cli.make_context("hvdrun", words)
    return place_of(Request(context.params["command"]), context.params, environ)


def test_the_pods_of_the_indexed_job_are_the_nodes_of_one_job():
    job, service = of_kind("Job"), of_kind("Service")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    words = [*container["command"], *container["args"]][1:]
    found = [place(words, {"JOB_COMPLETION_INDEX": str(n)}) for n in range(2)]
    assert [p.node_rank for p in found] == [0, 1]
    assert {p.nodes for p in found} == {job["spec"]["completions"], job["spec"]["parallelism"]}
    # The name that Kubernetes gives pod 0 of an Indexed Job with a subdomain.
    name, subdomain = job["metadata"]["name"], job["spec"]["template"]["spec"]["subdomain"]
    assert found[0].host == f"{name}-0.{subdomain}"
    assert service["metadata"]["name"] == subdomain
    assert service["spec"]["selector"] == {"job-name": name}


def test_the_services_of_docker_compose_are_the_nodes_of_one_job():
    services = compose()["services"]
    found = []
    for service in services.values():
        words = service["command"].split()[1:]
        found.append(place(words, service["environment"]))
    assert sorted(p.node_rank for p in found) == list(range(found[0].nodes))
    assert {p.host for p in found} <= {s["hostname"] for s in services.values()}
