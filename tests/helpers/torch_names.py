"""The private names of torch in shardkit's source;
``PYTHONPATH=. python tests/helpers/torch_names.py`` prints them with the functions that need them,
those first that the installed torch lacks.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint import state_dict as checkpoint_state
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grad
from torch.utils import _python_dispatch

from shardkit._fsdp import states_of
from shardkit._torch import torch_version, units_of
from shardkit.api import shard_model
from shardkit.testing import fake_world

SOURCE = Path(__file__).parents[2] / "shardkit"
FOLDERS = ("_torch", "_fsdp")  # the only ones that may use private names
# Attributes of FSDP2's own classes, which are private without an underscore.
PLAIN = (
    "modules", "fsdp_params", "device", "mesh_info", "mp_policy", "post_forward_mesh_info",
    "reshard_after_backward", "reduce_grads", "all_reduce_grads", "gradient_divide_factor", "post_backward",
    "finalize_backward", "sharded_param", "reset_sharded_param", "all_gather_outputs", "pre_backward", "is_unsharded",
    "sharded_state", "sharded_size", "padded_sharded_param_size", "fsdp_placement", "shard_mesh", "pin_memory",
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
    "_getframe", "_dynamo", "_in_backward_optimizers", "_opt_called", "_step_supports_amp_scaling",
    "_wrapped_by_lr_sched", "_process_group", "_registered", "_shardkit_trained",
}  # fmt: skip
OURS = {"self", "_fsdp", "watch", "hold"}
SUBCLASSES = ("plain.py",)  # of FSDP2's classes, so that ``self`` has torch's names there


def used() -> dict[str, set[str]]:
    """Return where each name is used, as ``file: function``."""
    found = defaultdict(set, {name: {"_fsdp"} for name in PLAIN})
    for path in (path for folder in FOLDERS for path in sorted((SOURCE / folder).glob("*.py"))):
        for top in ast.parse(path.read_text()).body:
            place = f"{path.relative_to(SOURCE)}: {getattr(top, 'name', 'imports')}"
            for name in _names(top, OURS - {"self"} if path.name in SUBCLASSES else OURS):
                if re.fullmatch(r"_[a-z]\w*", name) and name not in NOT_TORCHS:
                    found[name].add(place)
    return dict(found)


def _names(top: ast.stmt, ours: set[str]) -> Iterator[str]:
    for node in ast.walk(top):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ours:
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and "._" in (node.module or ""):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.rpartition(".")[2]


def missing(names: list[str]) -> list[str]:
    """Return those that nothing of the imported torch has. Local."""
    with fake_world(4):
        owners = list(_owners())
        new = {name for name, version in LATER.items() if torch_version() < version}
        return [
            name
            for name in names
            if name not in new and not any(hasattr(each, name) for each in owners)
        ]


def _owners() -> Iterator[Any]:
    """Yield what has private names: objects of a small model after one backward, classes and
    modules.
    """
    model = shard_model(nn.Linear(4, 4), reshard_after_forward=2)
    model(torch.ones(2, 4)).sum().backward()
    state = states_of([model])[0]
    unit = units_of(state)[0]
    yield from (
        model,
        model.weight,
        state,
        unit,
        unit.fsdp_params[0],
        nn.Parameter(torch.ones(1)),
        nn.Module(),
    )
    yield from (
        torch.optim.Adam,
        torch.amp.GradScaler,
        torch.ops.aten,
        torch.ops.aten.add.Tensor,
        DeviceMesh,
    )
    yield from (
        nn.Linear(1, 1).state_dict(),
        fsdp.MixedPrecision(),
        fsdp.ShardedStateDictConfig(),
        fsdp.wrap,
    )
    yield from (
        fsdp.wrap.ModuleWrapPolicy({nn.Linear}),
        torch.distributed.ProcessGroup,
        torch.distributed,
    )
    yield from (
        torch,
        torch._C,
        torch._C._distributed_c10d.Backend.Options,
        torch._compile,
        torch.utils,
    )
    yield from (nn.init, clip_grad, _python_dispatch, torch.distributed.distributed_c10d)
    yield from (torch.distributed._state_dict_utils, checkpoint_state)


def main() -> int:
    """Print each name with what needs it, the missing ones first; return 1 if there is
    one, else 0.
    """
    names = used()
    gone = missing(list(names))
    print(f"torch {torch.__version__}: {len(gone)} of {len(names)} private names are missing")
    for name in sorted(names, key=lambda name: (name not in gone, name)):
        print(f"{'MISSING ' * (name in gone)}{name}, needed by {', '.join(sorted(names[name]))}")
    return bool(gone)


if __name__ == "__main__":
    sys.exit(main())
