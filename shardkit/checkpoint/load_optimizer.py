"""Plan how an optimizer's state is read from a checkpoint, and give it to the optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit.checkpoint.source import Source, Stored, by_name, is_stored, read_values
from shardkit.errors import CheckpointError, listing, message
from shardkit.shards import as_sharded, local_value
from shardkit.state.names import parameter_names
from shardkit.state.optimizer import (
    OptimizerState,
    group_names,
    optimizers_of,
    renamed_state,
    sharded_optimizer_state_dict,
)
from shardkit.state.optimizer_load import install, mismatches, room_for, with_rooms
from shardkit.state.plan import Request, raise_listed, rename
from shardkit.state.quantized import is_quantized

_INNER = "__tensor_flatten__"  # the key of quantized state as it was saved until version 0.1: by inner tensors


@dataclass
class OptimizerLoad:
    """What is read for optimizers."""

    optimizers: list[Optimizer]
    names: dict[nn.Parameter, str]  # the FQN of each parameter of the model
    state: OptimizerState  # by FQN, with tensors that are to be filled
    targets: list[tuple[str, Tensor]] = field(default_factory=list)  # memory to read into, with keys
    quantized: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # state, and the memory with its values

    @torch.no_grad()
    def apply(self) -> None:
        """Give each optimizer its state and its groups their options. Local; the targets are filled."""
        for into, values in self.quantized:
            local_value(into).copy_(local_value(values))
        install(self.optimizers, self.names, self.state, exact=True)


def plan_optimizer(
    model: nn.Module, optimizer: Optimizer | Iterable[Optimizer], source: Source, request: Request
) -> OptimizerLoad:
    """Match the stored state with an optimizer, which need not have stepped. Local; changes nothing.

    Existing state of the same shape and dtype is filled in place. New state is placed as by
    ``load_full_optimizer_state_dict``. Values are quantized where the optimizer has quantized state, or would make it
    in its first step, if the saved state was quantized too.
    """
    names, optimizers = parameter_names(model), optimizers_of(optimizer)
    params = {fqn: param for param, fqn in names.items()}
    stored = by_name(dict(source.contents.optimizer or {}), list(params))
    found = renamed_state(stored, partial(rename, key_map=request.key_map))
    own = [fqns for each in optimizers for fqns in group_names(each, names)]
    problems = mismatches(own, found)
    if not request.strict:
        problems = {kind: names for kind, names in problems.items() if kind not in ("missing", "unexpected")}
    rule = "The optimizer must have the parameters and groups that were saved; nothing was changed"
    fix = "Build it as before, with the same parameters frozen, "
    fix += "or pass strict=False to leave out parameters that only one side has"
    raise_listed(f"{request.where} (optimizer)", problems, rule, fix, CheckpointError)
    kept = set(chain.from_iterable(own))
    entries = {fqn: entry for fqn, entry in found["state"].items() if fqn in kept}
    if inner := [n for n, entry in entries.items() if any(isinstance(v, dict) and _INNER in v for v in entry.values())]:
        rule = "Quantized state was saved so until version 0.1, and now as its values"
        fix = "Load the model alone, and start with a fresh optimizer"
        raise CheckpointError(message(request.where, f"has inner tensors of {listing(inner)}", rule, fix))
    load = OptimizerLoad(optimizers, names, {"param_groups": read_values(source, found["param_groups"])})
    present = sharded_optimizer_state_dict(model, optimizers, initialize=source.contents.quantized)["state"]

    def place(fqn: str, path: str, leaf: Stored, there: Tensor | None) -> Tensor:
        if there is not None and is_quantized(there):
            room = torch.empty(local_value(there).shape, dtype=leaf.dtype)
            values = as_sharded(room, there) if isinstance(there, DTensor) else room
            load.quantized.append((there, values))
        else:
            if there is None or (there.shape, there.dtype) != (leaf.shape, leaf.dtype):
                there = room_for(params[fqn], path, leaf, there)
            values = there
        load.targets.append((leaf.key, values))
        return there

    load.state["state"] = with_rooms(entries, present, place, is_stored)
    return load
