"""What torch offers and shardkit answers for, on the torch that is installed."""

import ast
import dataclasses
import inspect
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint import state_dict as checkpoint_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad
from torch.utils import _python_dispatch

import shardkit
from shardkit import ShardkitError, shard_model, zero_grad
from shardkit._fsdp import fsdp_units, states_of
from shardkit._fsdp.states import without_hooks
from shardkit._torch import torch_version, units_of
from shardkit._torch.steps import UnscalingGradScaler
from shardkit.fsdp1 import FullyShardedDataParallel as FSDP
from shardkit.testing import RankPool, fake_world

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "torch-versions.md"


def offered():
    """Every argument of ``fully_shard`` and its policies, and every public method of
    ``FSDPModule``.
    """
    names = set(inspect.signature(fully_shard).parameters)
    for policy in (MixedPrecisionPolicy, CPUOffloadPolicy):
        names |= {field.name for field in dataclasses.fields(policy)}
    return names | {name for name in vars(FSDPModule) if not name.startswith("_")}


def test_the_page_answers_for_all_that_fully_shard_offers():
    columns = re.findall(r"^\| ([^|]+) \| .+ \|$", PAGE.read_text(), re.MULTILINE)
    answered = {name for column in columns for name in re.findall(r"`(\w+)`", column)}
    assert len(offered()) >= 30
    assert offered() <= answered, f"new in this torch, add a row: {sorted(offered() - answered)}"


# Private names of torch: every one that the source has is in the torch that is installed.

FOLDERS = ("_torch", "_fsdp")  # the only ones that may use private names
# Attributes of FSDP2's own classes, which are private without an underscore.
PLAIN = (
    "modules", "fsdp_params", "device", "mesh_info", "mp_policy", "post_forward_mesh_info",
    "reshard_after_backward", "reduce_grads", "all_reduce_grads", "gradient_divide_factor", "post_backward",
    "finalize_backward", "sharded_param", "reset_sharded_param", "all_gather_outputs", "pre_backward", "is_unsharded",
    "sharded_state", "sharded_size", "shard_mesh", "pin_memory",
    "to_sharded_dtensor",
)  # fmt: skip
# the first torch that has them
LATER = {
    "_fsdp_param_groups": (2, 12),
    "_partial_reduce_output_layout": (2, 15),
}
# Marks that one side sets for the other, Python's own, a package that is only named for import, and
# a group that FSDP1's tensors carry.
NOT_TORCHS = {
    "_dynamo", "_in_backward_optimizers", "_opt_called", "_step_supports_amp_scaling",
    "_wrapped_by_lr_sched", "_process_group", "_registered", "_shardkit_trained",
    "_shardkit_placeholder",
}  # fmt: skip
OURS = {"self", "_fsdp", "watch", "hold"}
SUBCLASSES = ("plain.py",)  # of FSDP2's classes, so that ``self`` has torch's names there


def used():
    """The private names of torch in the folders that may use them."""
    found = set(PLAIN)
    for path in (path for folder in FOLDERS for path in (ROOT / "shardkit" / folder).glob("*.py")):
        ours = OURS - {"self"} if path.name in SUBCLASSES else OURS
        names = _names(ast.parse(path.read_text()), ours)
        found |= {name for name in names if re.fullmatch(r"_[a-z]\w*", name)}
    return found - NOT_TORCHS


def _names(tree, ours):
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ours:
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and "._" in (node.module or ""):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.rpartition(".")[2]


def missing(names):
    """Those that nothing of the imported torch has: an object of a small model after one backward,
    a class or a module.
    """
    with fake_world(4):
        model = shard_model(nn.Linear(4, 4), reshard_after_forward=2)
        model(torch.ones(2, 4)).sum().backward()
        state = states_of([model])[0]
        unit = units_of(state)[0]
        owners = [
            *(model, model.weight, state, unit, unit.fsdp_params[0]),
            *(nn.Parameter(torch.ones(1)), nn.Module(), nn.Linear(1, 1).state_dict()),
            *(torch.optim.Adam, torch.amp.GradScaler, DeviceMesh, dist.ProcessGroup),
            *(fsdp.MixedPrecision(), fsdp.ShardedStateDictConfig(), fsdp.wrap),
            *(fsdp.wrap.ModuleWrapPolicy({nn.Linear}), torch.ops.aten, torch.ops.aten.add.Tensor),
            *(torch, torch._C, torch._C._distributed_c10d.Backend.Options, torch._compile),
            *(torch.utils, nn.init, clip_grad, _python_dispatch, checkpoint_state),
            *(dist, dist.distributed_c10d, dist._state_dict_utils),
            *(dist.tensor, dist.tensor._random),
        ]
    known = {name for name in names if any(hasattr(owner, name) for owner in owners)}
    return names - known - {name for name, first in LATER.items() if torch_version() < first}


def test_no_private_name_is_missing_and_a_missing_one_is_found():
    names = used()
    assert len(names) > 50
    assert "_local_tensor" in names
    assert missing(names | {"_renamed"}) == {"_renamed"}


def test_what_torch_lacks_is_named_where_it_is_used(monkeypatch):
    with fake_world(2):
        model = torch.nn.Linear(4, 4)
        fully_shard(model)
        unit = fsdp_units(model)[0]
        monkeypatch.delattr(unit, "reduce_grads")
        with pytest.raises(
            ShardkitError, match=r"^FSDPParamGroup\.reduce_grads is not in torch 2\."
        ):
            zero_grad(model)
        monkeypatch.delattr(states_of([model])[0], "_mp_policy")
        with pytest.raises(ShardkitError, match=r"^FSDPState\._mp_policy is not in torch 2\."):
            without_hooks([model]).__enter__()
    monkeypatch.delattr(torch.amp.GradScaler, "_unscale_grads_")
    with pytest.raises(ShardkitError, match=r"^GradScaler\._unscale_grads_ is not in torch 2\."):
        type("Scaler", (UnscalingGradScaler,), {})


def check_without_gpu(backend):
    """Each way to begin ends on the CPU or in an error that says so."""
    dist.destroy_process_group()
    del os.environ["RANK"], os.environ["WORLD_SIZE"]  # which the pool sets, and sets again
    if backend is not None:
        dist.init_process_group(backend or None, store=dist.HashStore(), rank=0, world_size=1)
    with shardkit.init_on_meta():
        model = torch.nn.Linear(4, 4)
    shardkit.materialize(shard_model(model))
    model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad.device.type == "cpu"
    for device_id in (0, torch.device("cuda", 0)):
        with pytest.raises(RuntimeError, match=r"accelerator|NVIDIA|CUDA"):  # torch's own
            FSDP(torch.nn.Linear(4, 4), device_id=device_id)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize("backend", [None, "", "gloo"], ids=["no group", "no backend", "gloo"])
def test_without_a_gpu_everything_is_on_the_cpu_also_with_a_wheel_for_cuda(
    backend,
):
    with RankPool(1) as rank:
        rank.run(check_without_gpu, backend)
