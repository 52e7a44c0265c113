"""The bytes that this rank hands to collectives, by the operator's name."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode

GATHER, SCATTER, EXCHANGE = (
    "c10d::_allgather_base_",
    "c10d::_reduce_scatter_base_",
    "c10d::alltoall_base_",
)


class SentBytes(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.name() in (GATHER, SCATTER, EXCHANGE):
            self.bytes[op.name()] += args[1].nbytes  # the output comes first
        return op(*args, **(kwargs or {}))
