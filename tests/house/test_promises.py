"""What docs/promises.md says: a checkpoint and a plan that 0.1.0 wrote load, and the pages use
public packages only.

``saved_by_0_1_0`` was written once, on two ranks, and stays as it is: from a folder without the
directory, ``PYTHONPATH=tests/house torchrun --nproc-per-node 2 -m test_promises``.
"""

import json
import random
import re
from pathlib import Path

import torch
import torch.distributed as dist
from test_docs import PAGES, ROOT
from test_public_api import PUBLIC_MODULES
from torch import nn
from trees import assert_same

from shardkit import (
    MeshSpec,
    MixedPrecisionPolicy,
    ShardingPlan,
    apply_plan,
    by_name,
    group,
    plan_model,
    shard_model,
)
from shardkit.checkpoint import latest_checkpoint, load_checkpoint, load_extras, save_checkpoint
from shardkit.testing import fake_world

SAVED = Path(__file__).parent / "saved_by_0_1_0"


class Model(nn.Module):
    """Tied weights, two dtypes, a scalar, a buffer and a frozen part."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.bfloat16) for _ in range(2))
        self.layers[1].requires_grad_(False)
        self.scale = nn.Parameter(torch.zeros(()))
        self.register_buffer("count", torch.tensor(0))


def prepare(model: nn.Module, numbers: bool) -> torch.optim.Optimizer:
    """Return an optimizer with a step behind it, after which each value is known, or zero."""
    for number, param in enumerate(model.parameters(), 1):
        nn.init.constant_(param, number * numbers)
        if param.requires_grad:
            param.grad = torch.full_like(param, 10 * number * numbers)
    nn.init.constant_(model.count, 7 * numbers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5, foreach=False)
    optimizer.step()
    return optimizer


def make_plan() -> ShardingPlan:
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return plan_model(
        Model(),
        mesh=MeshSpec.hybrid(2, 2),
        units=[
            by_name("layers.1", reshard_after_forward=False, may_skip=True),
            by_name("layers.0", mp_policy=half, checkpoint_activations="selective"),
            group("embed", "head"),
        ],
        tiles={"layers.0": 2},
        ignored_params=["layers.1.bias"],
        prefetch=1,
    )


def test_a_checkpoint_of_0_1_0_loads_in_one_process():
    model, expected = Model(), Model()
    optimizer = prepare(model, numbers=False)
    saved = prepare(expected, numbers=True)
    assert latest_checkpoint(SAVED) == SAVED / "step-1"
    assert load_checkpoint(SAVED / "step-1", model, optimizer) == {"rank": 0}
    assert load_extras(SAVED / "step-1") == [{"rank": 0}, {"rank": 1}]
    assert_same(model.state_dict(), expected.state_dict())
    assert_same(optimizer.state_dict(), saved.state_dict())


def is_kept(old: object, new: object) -> bool:
    """Whether ``new`` says all that ``old`` does; fields may have been added."""
    if isinstance(old, dict):
        return all(name in new and is_kept(value, new[name]) for name, value in old.items())
    if isinstance(old, list):
        return len(old) <= len(new) and all(map(is_kept, old, new))
    return old == new


def test_a_plan_of_0_1_0_loads_says_the_same_and_applies():
    saved = json.loads((SAVED / "plan.json").read_text())
    plan = ShardingPlan.from_dict(saved)
    assert is_kept(saved, json.loads(json.dumps(plan.to_dict())))
    with fake_world(4):
        model = apply_plan(Model(), plan)
        assert model.layers[0].weight.to_local().shape == (2, 4)


def test_the_pages_import_from_public_packages_only():
    promises = (ROOT / "docs" / "promises.md").read_text()
    public = set(re.findall(r"`(shardkit\.[a-z0-9]+)`", promises))
    pages = "\n".join(page.read_text() for page in PAGES)
    imported = set(re.findall(r"^from (shardkit\.[a-z0-9]+)", pages, re.MULTILINE))
    assert "shardkit.state" in imported <= public
    assert {module.__name__ for module in PUBLIC_MODULES} <= public


if __name__ == "__main__":
    torch.manual_seed(0)  # generators that are equal on all ranks are saved once
    random.seed(0)
    model = shard_model(Model())
    save_checkpoint(SAVED / "step-1", model, prepare(model, True), extra={"rank": dist.get_rank()})
    (SAVED / "plan.json").write_text(json.dumps(make_plan().to_dict(), indent=1) + "\n")
