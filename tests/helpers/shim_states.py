"""A model with all kinds of state, wrapped by the drop-in and by torch's FSDP1, for tests of state
dicts.
"""

import torch
from fsdp1_models import fsdp1
from small_models import Block
from state_models import VOCAB, Net
from torch import nn
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from shardkit.fsdp1.dropin.module import FullyShardedDataParallel as FSDP

FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)
BLOCKS = ModuleWrapPolicy({Block})
BF16 = torch.bfloat16


def net(seed=0):
    torch.manual_seed(seed)
    model = Net()
    model.version = f"of seed {seed}"
    model.batch_norm.running_mean.uniform_()
    return model


def ours(seed=0, **arguments):
    return FSDP(net(seed), auto_wrap_policy=BLOCKS, use_orig_params=True, **arguments)


def theirs(seed=0, **arguments):
    return fsdp1(net(seed), auto_wrap_policy=BLOCKS, use_orig_params=True, **arguments)


def is_same(found, wanted):
    """Names, order and values; DTensors count as what they are of."""
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        full = found[name].full_tensor() if isinstance(found[name], DTensor) else found[name]
        assert (
            (torch.equal(full, value) and full.dtype == value.dtype)
            if torch.is_tensor(value)
            else full == value
        )
    return True


def wiped(model):
    """The model with zeros everywhere, so that a load that does nothing shows."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
    return model


def batch():
    return torch.arange(6).view(2, 3) % VOCAB


class Around(nn.Module):
    """A module that is not wrapped, with state of its own, around one that is."""

    def __init__(self, inner):
        super().__init__()
        self.own = nn.Linear(3, 3)
        self.inner = inner
        self.register_buffer("count", torch.ones(2))
