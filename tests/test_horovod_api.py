"""The tool that reads Horovod's names and flags from its sources, on sources made for it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent / "tools/horovod_api.py"

SOURCES = {
    "__init__.py": "from horovod.runner import run\n__version__ = '1.2'\n",
    "common/__init__.py": "",
    "common/basics.py": """
class Basics:
    def init(self, comm: list = None, *, sets=()): ...
    def rank(self) -> int: ...
""",
    "torch/__init__.py": """
from horovod.common.other import helper
import os as _os
try:
    _available = True
except ImportError:
    _available = False
if _available:
    from horovod.torch import elastic
    from horovod.torch.ops import allreduce, init, rank, Sum, Failure, Hidden
    from horovod.torch.ops import Optimizer as Wrapped
""",
    "torch/ops.py": """
from horovod.common.basics import Basics as _Basics
from horovod.torch.compression import Compression
_basics = _Basics()
rank = _basics.rank
Sum = _basics.Sum
class Failure(RuntimeError): ...
class Hidden(torch.autograd.Function):
    def forward(ctx): ...
def init(*args, **kwargs):
    _basics.init(*args, **kwargs)
def allreduce(tensor: 'Tensor', op=Sum, *, factor=1.0): ...
def _private(): ...
def only_here(x): ...
class _Base:
    ready = None
    def step(self, closure=None): ...
    def _hidden(self): ...
class _Optimizer(_Base):
    def step(self): ...
    @staticmethod
    def find(lst): ...
def Optimizer(optimizer):
    return type('', (), dict(_Optimizer.__dict__))
""",
    "torch/compression.py": "class Compression:\n    none = 1\n",
    "torch/elastic/__init__.py": "def run(func): ...\ndef left_out(): ...\n__all__ = ['run']\n",
    "runner/__init__.py": "def run(func, args=(), np=None): ...\n",
    "runner/common/__init__.py": "",
    "runner/common/util/__init__.py": "",
    "runner/common/util/config_parser.py": """
LEVELS = ['LOW', 'HIGH']
SIZE = 'HOROVOD_SIZE'
def set_env(env, args):
    _add_arg_to_env(env, SIZE, args.size_mb, lambda v: v * 2)
""",
    "runner/launch.py": """
from horovod.runner.common.util import config_parser
def make_value(x):
    class Action(argparse.Action):
        def __init__(self): super().__init__(nargs=1)
    return Action
def make_switch(x, value):
    class Action(argparse.Action):
        def __init__(self): super().__init__(nargs=0)
    return Action
def make_true(x):
    return make_switch(x, True)
def parse_args():
    parser.add_argument('-s', '--size-mb', action=make_value(x), type=int, help='(default: 12')
    parser.add_argument('--no-size', dest='size_mb', action=make_true(x))
    group.add_argument('--wait', help='The default value is 30 s. The environment variable '
                       'HOROVOD_WAIT sets it too')
    parser.add_argument('--level', choices=config_parser.LEVELS)
    parser.add_argument('--range', type=int, nargs=2)
    parser.add_argument('--quiet', action='store_true')
    parser.add_argument('command', nargs=argparse.REMAINDER)
""",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    root = tmp_path_factory.mktemp("sdist")
    for name, text in SOURCES.items():
        path = root / "horovod" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = subprocess.run([sys.executable, TOOL, root], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def function(parameters):
    return {"kind": "function", "parameters": parameters}


def test_names_lead_through_imports_to_their_parameters(found):
    assert found["torch"] == {
        "Failure": {"kind": "exception"},
        "Hidden": {"kind": "class"},
        "Sum": {"kind": "value"},
        "Wrapped": function("optimizer"),
        "Wrapped.find": function("lst"),
        "Wrapped.ready": {"kind": "value"},
        "Wrapped.step": function(""),
        "allreduce": function("tensor, op=Sum, *, factor=1.0"),
        "compression": {"kind": "module"},
        "elastic": {"kind": "module"},
        "elastic.run": function("func"),
        "init": function("comm=None, *, sets=()"),
        "ops": {"kind": "module"},
        "rank": function(""),
    }


def test_what_only_a_submodule_has_stands_under_its_name(found):
    assert found["submodules"] == {
        "compression.Compression": {"kind": "class"},
        "compression.Compression.none": {"kind": "value"},
        "elastic.left_out": function(""),
        "ops.only_here": function("x"),
    }


def test_the_package_has_its_version_and_run(found):
    assert found["horovod"] == "1.2"
    names = {"__version__": {"kind": "value"}, "run": function("func, args=(), np=None")}
    assert found["package"] == names


def test_flags_have_their_spellings_value_default_and_variable(found):
    assert found["flags"] == [
        {"flag": "--help", "spellings": "-h --help", "takes": "nothing"},
        {"flag": "--level", "spellings": "--level", "takes": "LOW HIGH"},
        {
            "flag": "--no-size",
            "spellings": "--no-size",
            "takes": "nothing",
            "variable": "HOROVOD_SIZE",
        },
        {"flag": "--quiet", "spellings": "--quiet", "takes": "nothing"},
        {"flag": "--range", "spellings": "--range", "takes": "2 int"},
        {
            "flag": "--size-mb",
            "spellings": "-s --size-mb",
            "takes": "int",
            "default": "12",
            "variable": "HOROVOD_SIZE",
        },
        {
            "flag": "--wait",
            "spellings": "--wait",
            "takes": "text",
            "default": "30",
            "variable": "HOROVOD_WAIT",
        },
        {"flag": "command", "spellings": "command", "takes": "the rest"},
    ]


def test_a_folder_that_is_no_sdist_is_named(tmp_path):
    done = subprocess.run([sys.executable, TOOL, tmp_path], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"{tmp_path} has no module horovod; expected an unpacked sdist\n"
