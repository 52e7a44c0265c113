"""``torch.distributed.fsdp.sharded_grad_scaler``: torch's own, as gradients are plain tensors."""

from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as ShardedGradScaler

__all__ = ["ShardedGradScaler"]
