"""Every private torch name and every torch version check, each with the reason it is needed.

Nothing else in shardkit imports a torch name with an underscore (``tests/test_layers.py`` holds that rule).
When a new torch breaks shardkit, this file is where to look first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

# testing: sees every collective that is dispatched. The module has an underscore, yet the class is the documented
# way to intercept operators, and CommDebugMode is built on it.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

MINIMUM_TORCH = (2, 11)


def torch_version() -> tuple[int, int]:
    """Major and minor version of the torch that is imported, such as ``(2, 13)``."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


if torch_version() < MINIMUM_TORCH:
    raise ImportError(
        f"torch: version {torch.__version__} is too old. shardkit needs torch >= "
        f"{'.'.join(map(str, MINIMUM_TORCH))}. Upgrade with: pip install --upgrade torch."
    )


# grads: one kernel for many tensors. torch.nn.utils.clip_grad_norm_ is built on the same two; torch has no
# public name for them. The dtype argument of the norm is older than torch 2.11.
foreach_norm = torch._foreach_norm
foreach_mul_ = torch._foreach_mul_


def named_sharded_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """``model.named_parameters()``, with the sharded parameter wherever a stand-in is registered.

    Between an unshard and a reshard (``reshard_after_forward=False`` after a forward, an int, or
    ``set_reshard_after_backward(False)``) FSDP2 registers unsharded parameters, while gradients and the
    optimizer's entries stay with the sharded ones, which torch 2.13 gives no public way to see. Local, pure.
    """
    sharded: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for fsdp_param in _fsdp_params(module):
                if fsdp_param.sharded_state.name != "SHARDED":
                    info = fsdp_param._module_info
                    sharded[getattr(info.module, info.param_name)] = fsdp_param.sharded_param
    return [(name, sharded.get(param, param)) for name, param in model.named_parameters()]


def _fsdp_params(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # torch >= 2.12: a module may have several
        return [param for group in state._fsdp_param_groups for param in group.fsdp_params]
    return list(state._fsdp_param_group.fsdp_params) if state._fsdp_param_group else []


# What a forked test rank would otherwise import in its first forward (``torch._dynamo``: 0.5 to 2 s a rank on
# torch 2.11 and 2.13). The fork server of ``shardkit.testing`` imports them once for all ranks.
RANK_IMPORTS = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo")


def fake_store() -> Any:
    """A store for the ``fake`` backend, which the import registers.

    torch documents the backend only in its own tests; without this import ``init_process_group("fake")``
    fails with "Unknown c10d backend type FAKE" (torch 2.11 to 2.13).
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()
