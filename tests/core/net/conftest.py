"""The simulated network as fixtures."""

import pytest

from tests.core.net.network import Network, library


@pytest.fixture(scope="session")
def simulation(tmp_path_factory):
    return library(tmp_path_factory.mktemp("simulation"))


@pytest.fixture
def network(simulation, hosts):
    return Network(simulation, hosts)
