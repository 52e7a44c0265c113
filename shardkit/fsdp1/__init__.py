"""From FSDP1 to FSDP2: arguments and configuration files, translated, and a drop-in for its class.

Every public name of ``torch.distributed.fsdp`` is found here too, and those of its modules
``wrap``, ``api``, ``fully_sharded_data_parallel`` and ``sharded_grad_scaler`` in the modules of the
same name. All but ``FullyShardedDataParallel`` are torch's own objects, and private modules stay
torch's. ``as_dtensors`` is ours.
"""

import importlib
import typing

import torch.distributed.fsdp

# What a program's star import brings: FSDP1's names, not ours.
from torch.distributed.fsdp import __all__ as __all__

from shardkit._fsdp.plain import as_dtensors as as_dtensors
from shardkit.fsdp1.configs import from_config as from_config
from shardkit.fsdp1.dropin.module import FullyShardedDataParallel as FullyShardedDataParallel
from shardkit.fsdp1.translate import shard_like_fsdp1 as shard_like_fsdp1
from shardkit.fsdp1.translate import translate_fsdp1 as translate_fsdp1
from shardkit.fsdp1.translate.notes import SUPPORT as SUPPORT
from shardkit.fsdp1.translate.notes import Note as Note
from shardkit.fsdp1.translate.notes import Support as Support
from shardkit.fsdp1.translate.shard import Translation as Translation

if typing.TYPE_CHECKING:
    # At run time __getattr__ finds these names, and all others that the installed torch has.
    from torch.distributed.fsdp import *  # type: ignore[assignment]  # noqa: F403
    from torch.distributed.fsdp import FlatParameter as FlatParameter


def __getattr__(name: str) -> typing.Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("wrap", "api", "fully_sharded_data_parallel", "sharded_grad_scaler"):
        return importlib.import_module(f"{__name__}.{name}")
    return getattr(torch.distributed.fsdp, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
