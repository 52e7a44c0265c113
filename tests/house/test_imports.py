"""What an import costs: names are loaded when they are asked for, and the core loads nothing beyond
itself.
"""

import ast
import importlib
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import shardkit

ROOT = Path(__file__).parents[2]
MOST_CPU_SECONDS = 0.08  # 0.006 seen; it was 0.33 when every name was loaded at once
# Never needed by the library: the extras, and what torch itself can do without.
OPTIONAL = [
    "numpy",
    "transformers",
    "tokenizers",
    "safetensors",
    "yaml",
    "pytest",
    "hypothesis",
    "matplotlib",
]
PROGRAM = """
import json, runpy, sys, time

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OPTIONAL:
            raise ModuleNotFoundError(name)

import torch, torch.distributed.fsdp, torch.distributed.tensor

def loaded():
    return sorted(name for name in sys.modules if name not in before)

sys.meta_path.insert(0, Refuse())
before, began = set(sys.modules), time.process_time()
import shardkit
report = {"cpu": time.process_time() - began, "import": loaded()}
from shardkit import shard_model
report["name"] = loaded()
refuse = sys.meta_path.pop(0)  # torch's own process group for one process uses hypothesis
shard_model(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)))
report["shard_model"] = loaded()
sys.argv[1:] = ["convert"]
try: runpy.run_module("shardkit", run_name="__main__")
except SystemExit as end: report["command"] = end.code
for name in OPTIONAL: sys.modules.pop(name, None)
sys.meta_path.insert(0, refuse)
import shardkit.testing
report["without_optional_packages"] = loaded()
print(json.dumps(report))
""".replace("OPTIONAL", str(OPTIONAL))


@pytest.fixture(scope="module")
def report():
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    return json.loads(run.stdout)


def test_importing_shardkit_is_cheap(report):
    assert report["cpu"] < MOST_CPU_SECONDS


def test_no_optional_package_is_needed(report):
    assert report["command"] == 2  # a usage error
    assert "testing" in packages(report["without_optional_packages"])


def packages(modules):
    return {name.split(".")[1] for name in modules if name.startswith("shardkit.")}


def test_the_core_loads_nothing_beyond_itself(report):
    assert "apply" in packages(report["shard_model"])
    beyond = {"fsdp1", "memory", "checkpoint", "testing", "state", "meta", "grads", "optim", "demo"}
    assert not packages(report["shard_model"]) & beyond
    assert not [
        name for name in report["shard_model"] if name.startswith("torch.distributed.checkpoint")
    ]


def test_editors_see_the_names_that_programs_get():
    tree = ast.parse((ROOT / "shardkit" / "__init__.pyi").read_text())
    found = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    imports = [
        (node.module, alias.name)
        for node in found
        for alias in node.names
        if alias.asname == alias.name
    ]
    assert sorted(name for _, name in imports) == sorted(shardkit.__all__)
    for module, name in imports:
        assert getattr(shardkit, name) is getattr(importlib.import_module(module), name)


def test_attributes_of_the_package():
    assert set(shardkit.__all__) <= set(dir(shardkit))
    assert shardkit.planning.rules.by_class is shardkit.by_class  # a submodule that nobody imported
    for name in ("shard_modle", "_no_such", "__wrapped__"):
        assert not hasattr(shardkit, name)
    for value in (
        shardkit.by_name,
        shardkit.ShardingPlan,
        shardkit.MeshSpec.sharded(2),
        shardkit.PlanError("a"),
    ):
        assert type(pickle.loads(pickle.dumps(value))) is type(value)
