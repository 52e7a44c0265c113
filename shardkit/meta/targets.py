"""materialize: compute on each rank its shards of the values that ordinary construction gives."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardkit._fsdp import (
    fsdp_params,
    post_accumulate_hooks,
    set_post_accumulate_hooks,
    tensor_hooks,
)
from shardkit._torch import local_tensor
from shardkit.errors import ShardkitError
from shardkit.meta.record import is_plain_meta, records
from shardkit.meta.replay import Final, Player
from shardkit.meta.tape import View, open_tape
from shardkit.ranks import check_equal, groups_of, raise_on_all_ranks
from shardkit.references import Setter, references
from shardkit.shards import as_sharded, device_of, local_part, wrapped_as

logger = logging.getLogger("shardkit")

_MANY = 10**9  # elements, of which a CPU draws as many random numbers in 5 to 10 s


@dataclass(eq=False)
class Target:
    """One meta tensor of the model, under all its names."""

    tensor: Tensor
    fqns: list[str] = field(default_factory=list)
    slots: list[tuple[nn.Module, str]] = field(default_factory=list)  # as parameter or buffer
    places: list[Setter] = field(default_factory=list)  # elsewhere: each puts another tensor there
    view: View | None = None  # on the tape
    value: Tensor | None = None


def materialize(model: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """Give a sharded meta model the values of ordinary construction, bit for bit; return it.

    Every meta parameter, buffer, and tensor in attributes of modules and in lists, tuples and dicts
    that are attributes, gets this rank's part of the value that the same code would have computed
    without ``init_on_meta``; elements that the code never writes are undefined here as there.
    Parameters stay the same objects, with their ``requires_grad``, ties, attributes and
    post-accumulate hooks. Real tensors are left alone. In place.

    Each rank replays the construction and keeps its shards: about the time of one construction, and
    beyond the shards about one largest full tensor in host memory. **Collective** over the ranks of
    the model's meshes: a few numbers, to check that all are to make the same model.

    Args:
        model: built under ``init_on_meta``, and sharded with ``shard_model``, ``apply_plan`` or
            torch's ``fully_shard``, or split by ``parallelize_module``; before its first forward.
        device: where the values are computed; None is where the model was built, as a rule the CPU.
            ``"cuda"`` is faster, and draws other numbers: those of construction on a GPU right
            after ``torch.manual_seed`` with the same seed, even if numbers were drawn on the GPU
            since. The shards end up on their mesh's device, or on the CPU when offloaded.

    torch's default generator ends where ordinary construction leaves it, but is left alone if
    someone drew from it or seeded it since.

    Raises:
        ShardkitError: the model is not sharded, or was not built under ``init_on_meta``; ranks have
            different seeds or constructions. Nothing was changed.
    """
    groups = groups_of(model)
    targets = find_targets(model)
    if not groups and not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ShardkitError(
            "model is not sharded. materialize computes only this rank's shards. "
            "Call shard_model(model) or fully_shard first."
        )
    if not targets:
        raise ShardkitError(
            "model has no parameters or buffers on the meta device. materialize is called once, on "
            "a model that was built under init_on_meta(). Remove the call if the model has its "
            "values already."
        )
    with raise_on_all_ranks(groups, call="materialize"):
        player = prepare(model, targets, device, settle=True)
        digests = player.digests()
    fix = (
        "Build the same model on all ranks, and call torch.manual_seed with one number before "
        "init_on_meta(); seed the data by rank afterwards"
    )
    check_equal(digests, groups, fix=fix)
    elements = sum(target.tensor.numel() for target in targets)
    if player.device.type == "cpu" and elements > _MANY:
        logger.warning(
            "materialize: each rank computes all %.1f billion elements on its CPU; device='cuda' "
            "is faster",
            elements / 1e9,
        )
    player.compute()
    install(model, targets)
    forget(model)
    return model


def forget(model: nn.Module) -> None:
    for module in model.modules():
        records.pop(module, None)


def is_on_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"


def find_targets(model: nn.Module, chosen: Callable[[Tensor], bool] = is_on_meta) -> list[Target]:
    """Return the chosen parameters and buffers, and other meta tensors that modules hold, each
    once. Local, pure.
    """
    targets: dict[int, Target] = {}
    for path, module in model.named_modules():
        prefix = path + "." if path else ""
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and chosen(tensor):
                target = targets.setdefault(id(tensor), Target(tensor))
                target.fqns.append(prefix + name)
                target.slots.append((module, name))
    for reference in references(model):
        tensor = reference.tensor
        # An RNN updates its _flat_weights in forward, and with weight_norm they are old parameters.
        if is_plain_meta(tensor) and "_flat_weights[" not in reference.name:
            target = targets.setdefault(id(tensor), Target(tensor))
            target.places.append(reference.put)
            if not target.fqns:
                target.fqns.append(f"{reference.name} (an attribute)")
    return list(targets.values())


def prepare(
    model: nn.Module,
    targets: list[Target],
    device: torch.device | str | None = None,
    settle: bool = False,
) -> Player:
    """Return what computes the ``value`` of the targets, and with ``settle`` leaves torch's
    generators right.

    Local; raises unless all can be computed.
    """
    for target in targets:
        target.view = _recorded(target)
    _check_targets(targets)
    cutter = Cutter(model)
    finals = []
    for target in targets:
        assert target.view is not None
        finals.append(Final(target.view, partial(cutter.cut, target)))
    return Player(open_tape(), finals, device, settle)


def _recorded(target: Target) -> View | None:
    """Find a tensor on the tape: by its storage, or by its module and name if it has a new one."""
    if is_plain_meta(target.tensor):
        view = open_tape().find(target.tensor)
        if view is not None:
            return view
    views: set[View] = set()
    for module, name in target.slots:
        if module in records and name in records[module].views:
            views.add(records[module].views[name])
    if len(views) > 1:
        _refuse(
            [target],
            "became one tensor after init_on_meta. Each was recorded with its own value. Tie them "
            "inside init_on_meta().",
        )
    return next(iter(views), None)


def _refuse(targets: list[Target], problem: str) -> None:
    names: list[str] = []
    for target in targets:
        names += target.fqns
    if names:
        raise ShardkitError(f"{', '.join(names)} {problem}")


def _check_targets(targets: list[Target]) -> None:
    _refuse(
        [target for target in targets if target.view is None],
        "was made on the meta device outside init_on_meta() or by Tensor.new, or quantized. Its "
        "initial values were not recorded, and materialize does not guess values. Build the model, "
        "its adapters (get_peft_model) and its initializers inside init_on_meta().",
    )
    written = open_tape().written()
    registered = {target.view for target in targets if target.slots}
    replaced, unwritten, reshaped = [], [], []
    for target in targets:
        view, tensor = target.view, target.tensor
        assert view is not None
        if tensor.numel() and view.storage not in written:
            unwritten.append(target)
        # A parameter from before fully_shard would get values of its own, and never train.
        if not target.slots and isinstance(tensor, nn.Parameter) and view in registered:
            replaced.append(target)
        if view.size != tuple(tensor.shape):
            reshaped.append(target)
    _refuse(
        unwritten,
        "would stay uninitialized: its construction writes nothing to it. Initialize it inside "
        "init_on_meta().",
    )
    _refuse(
        replaced,
        "is a parameter that fully_shard has replaced in its module, and would not train. Shard "
        "with shard_model, which updates such references, or remove the reference before sharding.",
    )
    _refuse(
        reshaped, "has another shape than was recorded. Change the shape inside init_on_meta()."
    )
    check_unbound(targets)


def check_unbound(targets: list[Target]) -> None:
    """Raise if ``install`` would lose a gradient hook, or be refused because of a weak
    reference.
    """
    held = []
    for target in targets:
        tensor = target.tensor
        if isinstance(tensor, DTensor) and (weakref.getweakrefs(tensor) or tensor_hooks(tensor)):
            held.append(target)
    _refuse(
        held,
        "has a hook of register_hook, or a weak reference to it exists. materialize uses "
        "torch.utils.swap_tensors, which drops such hooks and raises for weak references. Register "
        "the hook, or create the reference, after materialize.",
    )


# ---- cutting this rank's part out of each full tensor, and installing it -------------------------


def target_device(model: nn.Module) -> Callable[[Tensor], torch.device]:
    """Return a function that says where each tensor belongs: on its (or the first) mesh, or on the
    CPU if offloaded.
    """
    params = fsdp_params(model.modules())
    offloaded = {id(param.sharded_param) for param in params if param.offload_to_cpu}
    device_of_plain = torch.device("cpu")
    for param in model.parameters():
        if isinstance(param, DTensor):
            device_of_plain = device_of(param.device_mesh)
            break

    def device(tensor: Tensor) -> torch.device:
        if not isinstance(tensor, DTensor):
            return device_of_plain
        return torch.device("cpu") if id(tensor) in offloaded else device_of(tensor.device_mesh)

    return device


class Cutter:
    """Keeps this rank's part of a full value, on the device where it belongs."""

    def __init__(self, model: nn.Module) -> None:
        self._device = target_device(model)
        # Of plain tensors on their device, by number: tensors that share memory share it there.
        self._storages: dict[int, torch.UntypedStorage] = {}

    def cut(self, target: Target, full: Tensor) -> None:
        """Set ``target.value`` from the full value, whose memory may be kept as a whole."""
        tensor, view, device = target.tensor, target.view, self._device(target.tensor)
        assert view is not None
        if isinstance(tensor, DTensor):
            # a collective sends memory as it is
            part = local_part(full, tensor).resolve_conj().resolve_neg()
            local = part.to(device, tensor.dtype, copy=True, memory_format=torch.contiguous_format)
            target.value = as_sharded(wrapped_as(local, local_tensor(tensor)), tensor)
        elif full.dtype != tensor.dtype:
            target.value = full.to(device, tensor.dtype, copy=True)
        else:
            if view.storage not in self._storages:
                in_bytes = torch.empty(0, dtype=torch.uint8, device=full.device)
                in_bytes.set_(full.untyped_storage())
                self._storages[view.storage] = in_bytes.to(device).untyped_storage()
            target.value = view.of(self._storages[view.storage])


def install(model: nn.Module, targets: Iterable[Target]) -> None:
    """Give each tensor object its value. The objects stay, so optimizers, ties and attributes keep
    working.
    """
    for target in targets:
        tensor, value = target.tensor, target.value
        assert value is not None
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=tensor.requires_grad)
        value.__dict__.update(tensor.__dict__)
        target.value = None
        hooks = post_accumulate_hooks(tensor)
        try:
            torch.utils.swap_tensors(tensor, value)  # type: ignore[no-untyped-call]
        except RuntimeError:  # a weak reference to it, or a view of it, holds its present content
            if isinstance(tensor, DTensor):
                raise
            for module, name in target.slots:
                registry: dict[str, Any] = module._buffers
                if name in module._parameters:
                    registry = module._parameters
                registry[name] = value
            for put in target.places:
                put(value)
        if hooks:
            set_post_accumulate_hooks(tensor, hooks)
    for param in fsdp_params(model.modules()):
        param.reset_sharded_param()  # take up the new local shard
