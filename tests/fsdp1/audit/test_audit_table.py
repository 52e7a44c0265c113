"""The audit's table holds every name of FSDP1 that torch has, and its replacements name what there is."""

import builtins
import re
import types

import torch.distributed.fsdp as fsdp
from torch.distributed.fsdp import FullyShardedDataParallel, api, fully_sharded_data_parallel, sharded_grad_scaler, wrap

import shardkit
import shardkit.fsdp1
import shardkit.grads
import shardkit.state
from shardkit import replacements
from shardkit.fsdp1.audit import visit
from shardkit.fsdp1.audit.visit import MODULES

ROWS = replacements.NAMES | replacements.MEMBERS | replacements.ATTRIBUTES | replacements.PRIVATE | visit.OTHERS
INHERITED = {"state_dict", "load_state_dict"}  # of nn.Module; every other member is FSDP1's own


def public_of_fsdp1() -> set[str]:
    """What torch offers in public, less FSDP2's: what is listed, and what is only imported into the package."""
    modules = (wrap, api, fully_sharded_data_parallel)
    found = {name: value for name, value in vars(fsdp).items() if not name.startswith("_")}
    found["ShardedGradScaler"] = sharded_grad_scaler.ShardedGradScaler
    found |= {name: getattr(module, name) for module in (fsdp, *modules) for name in module.__all__}
    own = {name: value for name, value in found.items() if not isinstance(value, types.ModuleType)}
    return {name for name, value in own.items() if getattr(fsdp._fully_shard, name, None) is not value}


def test_every_public_name_of_fsdp1_has_a_row_and_no_row_is_of_no_name():
    assert replacements.NAMES.keys() == public_of_fsdp1()


def test_every_public_method_of_the_wrapper_has_a_row():
    own = {name for name in vars(FullyShardedDataParallel) if not name.startswith("_")}
    assert replacements.MEMBERS.keys() == own | INHERITED


def test_a_module_that_torch_adds_is_noticed():
    found = {name for name, value in vars(fsdp).items() if isinstance(value, types.ModuleType) and name[0] != "_"}
    assert found == set(MODULES)


# What a replacement may call besides methods of the model: torch's, of three modules, and shardkit's.
OFFERED = [shardkit, shardkit.fsdp1, shardkit.grads, shardkit.state, fsdp, builtins]


def called(template: str) -> set[str]:
    """The plain names that a replacement calls."""
    code = re.sub(r"\{(\w+)\}", r"\1", template.replace("{{", "(").replace("}}", ")"))
    return set(re.findall(r"(?<![\w.])([A-Za-z_]\w*)\(", code)) - {"receiver"}


def test_every_row_says_something_and_what_it_calls_exists():
    assert [name for name, row in ROWS.items() if not row.use and not row.sentence] == []
    calls = {name for row in ROWS.values() for name in called(row.use)}
    assert {"full_state_dict", "clip_grad_norm_", "by_class", "no_sync"} <= calls
    missing = {name for name in calls if not any(hasattr(module, name) for module in OFFERED)}
    assert missing == set()


def test_the_private_names_are_torchs():
    """A row for a name that torch never had helps nobody."""
    modules = [value for value in vars(fsdp).values() if isinstance(value, types.ModuleType)]
    assert [
        name for name in replacements.PRIVATE if not any(hasattr(module, name) for module in (fsdp, *modules))
    ] == []
