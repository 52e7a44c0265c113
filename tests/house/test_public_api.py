"""The public names: what they are, and that they are documented.

``__init__.pyi`` lists the names, README has the two commands.
"""

import inspect
import re
import subprocess
from types import ModuleType

import torch.distributed.fsdp
from test_docs import ROOT, blocks

import shardkit
import shardkit.checkpoint
import shardkit.fsdp1
import shardkit.integrations
import shardkit.memory
import shardkit.sequence
import shardkit.state
import shardkit.testing
import shardkit.watching

STUB = (ROOT / "shardkit" / "__init__.pyi").read_text()
NAMES = set(re.findall(r" as (\w+)", STUB))
OF_TORCH = {name for name in NAMES if hasattr(torch.distributed.fsdp, name)}
MOST = 40  # public names at the top level: a small library
PUBLIC_MODULES = (
    shardkit.checkpoint,
    shardkit.fsdp1,
    shardkit.integrations,
    shardkit.memory,
    shardkit.sequence,
    shardkit.state,
    shardkit.testing,
    shardkit.watching,
)


def public(module):
    """The names of a package that are not its submodules."""
    # whose names are loaded when they are asked for
    names = module.__all__ if module is shardkit else vars(module)
    found = {name: getattr(module, name) for name in names if not name.startswith("_")}
    return {name: value for name, value in found.items() if not isinstance(value, ModuleType)}


def test_the_public_names_are_those_of_the_stub():
    assert {"shard_model", "plan_model", "OffloadPolicy"} <= NAMES == public(shardkit).keys()
    star = {}
    exec("from shardkit import *", star)
    assert star.keys() - {"__builtins__"} == NAMES
    assert len(NAMES) <= MOST


# --- Documented -----------------------------------------------------------------------------------


def ours():
    """Every public function and class that is not torch's, and every public method and property of
    the classes.
    """
    for package in (shardkit, *PUBLIC_MODULES):
        for name, value in public(package).items():
            if name not in OF_TORCH and (isinstance(value, type) or inspect.isfunction(value)):
                yield f"{package.__name__}.{name}", value
                yield from methods(f"{package.__name__}.{name}", value)


def methods(name, cls):
    for attribute, value in vars(cls).items() if isinstance(cls, type) else ():
        value = (
            getattr(value, "fget", None)
            or getattr(value, "func", None)
            or getattr(value, "__func__", value)
        )
        if not attribute.startswith("_") and inspect.isfunction(value):
            yield f"{name}.{attribute}", value


def undocumented(name, value):
    # A dataclass without a docstring gets its signature for one.
    own = value.__dict__.get("__doc__") if isinstance(value, type) else value.__doc__
    return (
        []
        if own and not own.startswith(f"{name.split('.')[-1]}(")
        else [f"{name} has no docstring"]
    )


def test_everything_public_is_documented():
    found = dict(ours())
    assert {
        "shardkit.plan_model",
        "shardkit.ShardingPlan.diff",
        "shardkit.testing.RankPool.run",
    } <= found.keys()
    assert [problem for name, value in found.items() for problem in undocumented(name, value)] == []


# --- README ---------------------------------------------------------------------------------------


def test_ci_runs_the_one_test_command_of_the_readme():
    extraction = next(
        line
        for line in (ROOT / ".ci" / "run").read_text().splitlines()
        if line.startswith("command=")
    )
    script = f'{extraction}\nprintf %s "$command"'
    found = subprocess.run(
        ["bash", "-euc", script], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    shown = [
        block.code.strip()
        for block in blocks((ROOT / "README.md").read_text())
        if block.language == "bash"
    ]
    assert shown[1] == found
    assert found.startswith("python3 -m venv .venv && ")
    assert found.endswith(' -e ".[test]" && pytest')
