"""``torch.distributed.fsdp.sharded_grad_scaler``: loss scaling for fp16, of FSDP1's class and with its arguments."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler
from torch.optim import Optimizer

from shardkit import (
    grads,
)  # not GradScaler by name: that name is torch's own here, as in torch's module
from shardkit.fsdp1.dropin.optimizers import settle

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(grads.GradScaler, TorchShardedGradScaler):
    """torch's ``ShardedGradScaler``, with gradients unscaled as by :class:`shardkit.GradScaler`.

    Arguments, ``scale``, growth and backoff are torch's own, and so is the default device "cuda": without CUDA it warns
    and scales nothing, so pass ``device="cpu"`` there. Only ``unscale_`` differs: it handles a mixture of plain and
    sharded parameters, parameters on several meshes, and ranks without gradients, which torch's refuses or hangs on
    (torch 2.13). ``unscale_`` is collective, and so is a ``step`` without it.
    """

    __init__ = TorchShardedGradScaler.__init__  # the order of its arguments is not that of other scalers

    def unscale_grads(self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Tensor:
        """Unscale the gradients of the sharded parameters, also where the optimizer was built before wrapping."""
        settle(optimizer)
        return super().unscale_grads(optimizer, inv_scale, found_inf, allow_fp16)
