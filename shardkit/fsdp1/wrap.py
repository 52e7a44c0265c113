"""``torch.distributed.fsdp.wrap``: torch's own policies, ``wrap`` and ``enable_wrap``, which take
any wrapper class.
"""

import typing as _typing

import torch.distributed.fsdp.wrap as _torchs

# Every public name, for a program's star import.
from torch.distributed.fsdp.wrap import *  # noqa: F403


def __getattr__(name: str) -> _typing.Any:  # _or_policy and the like
    return getattr(_torchs, name)
