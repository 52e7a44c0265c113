"""Run one forward on fake tensors, and find what FSDP2 would do wrongly: parameters that are used
while their unit is not unsharded, and inputs that a unit changes for others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardkit._torch.dispatch import TorchDispatchMode, has_wrappers, is_view, tree_leaves
from shardkit.errors import PlanError, listing
from shardkit.memory.tracing import hook_unit, local_of, on_fake_tensors, tensors_of
from shardkit.plan import ShardingPlan, ShardUnit
from shardkit.planning.tree import ModelTree

logger = logging.getLogger("shardkit")

# Why FSDP2 would train a unit wrongly.
OUTSIDE = "parameters are used outside of it"
FILLED = "it writes into lists or dicts of its caller, and FSDP2 passes it copies"
CHANGED = "its input, or its output that is a view, is changed in place after FSDP2 hooked it"
REPLACED = "functional_call gives it other parameters, and FSDP2 puts its own back"
TRANSFORMED = "torch.func differentiates it, and FSDP2 frees its parameters before"
FREED = "it frees its inputs until backward restores them, and FSDP2 passes it views"


def plan_checked(
    tree: ModelTree, build: Callable[[], ShardingPlan], batch: Any, *, by_default: bool
) -> ShardingPlan:
    """Return the plan of ``build()``, checked by one forward on fake tensors. Local.

    A unit of the default rule that FSDP2 would train wrongly is left out, with a note; in rules of
    the user's it is an error. Pure, except that the tree keeps which modules those are.
    """
    notes: list[str] = []
    plan = build()
    uses = dry_run(tree.root.module, plan, batch)
    if by_default and uses.called_last is not None:
        tree.called_last = tree.node(uses.called_last)
        with_head = build()
        if with_head != plan:
            plan = with_head
            uses = dry_run(tree.root.module, plan, batch)
    while uses.wrong:
        problems = []
        wrong = set()  # names of units
        for reason, units in uses.wrong.items():
            for name, details in units.items():
                wrong.add(name)
                problems.append(
                    f"{name} cannot be a unit, because {reason}: {listing(details)}. Leave {name} "
                    "out of units=, so that an outer unit shards it, or change the forward."
                )
            first_details = dict.fromkeys(next(iter(details)) for details in units.values())
            first = listing(first_details, 4)
            notes.append(f"{listing(units, 4)}: not a unit, because {reason}: {first}")
        nodes = []
        for unit in plan.units:
            if unit.name in wrong:
                nodes += [tree.node(fqn) for fqn in unit.modules]
        if not by_default or all(node.is_no_unit for node in nodes):
            raise PlanError("\n".join(problems))
        for node in nodes:
            node.is_no_unit = True
        plan = build()
        uses = dry_run(tree.root.module, plan, batch)

    idle = [unit.name for unit in plan.units if unit.name not in uses.called]
    if idle:
        notes.append(f"{listing(idle, 4)}: not called in the forward of example_batch")
    lost = []
    if uses.written:
        lost.append(
            f"{listing(uses.written)}: written inside forward; FSDP2 loses the write, and backward "
            "computes wrong gradients with the old values; make it a buffer, or compute with a new "
            "tensor (docs/kinds-of-models.md)"
        )
    if uses.filled_by_root:
        lost.append(
            f"{listing(uses.filled_by_root)}: written into by the model, which gets a copy from "
            "FSDP2; return it (docs/kinds-of-models.md)"
        )
    if not dist.is_initialized() or dist.get_rank() == 0:
        for note in lost:
            logger.warning("%s", note)
    notes += lost
    expected = [unit.name for unit in plan.execution_order() if unit.name in uses.called]
    order = () if expected == list(uses.called) else tuple(uses.called)
    return replace(plan, order=order, notes=(*plan.notes, *notes))


def dry_run(model: nn.Module, plan: ShardingPlan, batch: Any) -> Uses:
    """Run ``model`` on fake tensors, or where they do not do on copies of the real ones, in the
    dtypes that ``plan`` computes in; PlanError if that fails.
    """
    fix = (
        "Pass a batch that the model accepts, or leave example_batch out; units=[] (one unit) "
        "suits any forward"
    )
    unit_of = {}
    for unit in plan.units:
        unit_of.update(dict.fromkeys(unit.params, unit.name))
    real = dict(model.named_parameters())

    def watch(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Uses:
        uses = Uses()
        fakes = dict(model.named_parameters())
        for fqn, unit_name in unit_of.items():
            # A function that holds the real parameter may still pass it to operators.
            for param in (real[fqn], fakes[fqn]):
                uses.owned[id(param)] = fqn, unit_name
            uses.storages[id(local_of(fakes[fqn]).untyped_storage())] = fqn
        for unit in plan.units:
            uses.watch(unit, [model.get_submodule(fqn) for fqn in unit.modules])
        for path in plan.forward_methods:  # each unshards its unit
            fqn, _, name = path.rpartition(".")
            owner, method = model.get_submodule(fqn), nn.Module()
            method.forward = getattr(owner, name)
            uses.watch(next(unit for unit in plan.units if fqn in unit.modules), [method])
            vars(owner)[name] = method
        for fqn, module in model.named_modules():
            if module._parameters and not module._modules:
                module.register_forward_hook(partial(uses.note_call, fqn))
        with uses:
            model(*args, **kwargs)
        return uses

    uses = on_fake_tensors(watch, model, plan, batch, "example_batch", fix)
    if plan.units[-1].name not in uses.called:  # the root
        raise PlanError(
            f"{type(model).__name__} has a __call__ of its own, as in GPyTorch, which runs no hooks "
            "of the model, so FSDP2 unshards nothing. Call it in the forward of a module around "
            "it, and shard that."
        )
    return uses


def _containers(tree: Any) -> list[Any]:
    """Return the lists and dicts in an argument."""
    containers = [tree] if isinstance(tree, (list, dict)) else []
    if containers or type(tree) is tuple:
        for value in tree.values() if isinstance(tree, dict) else tree:
            containers += _containers(value)
    return containers


def _content(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else [*container]


def _storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return a tensor's storage; None for one that ``torch.func.grad`` wraps, which has none."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None


class Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what a forward does that FSDP2 does not allow for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By reason and unit, the parameters or inputs that it is about; dicts keep their order.
        self.wrong: dict[str, dict[str, dict[str, None]]] = {}
        self.called: dict[str, None] = {}  # units that ran, in order
        self.storages: dict[int, str] = {}  # the FQN of the parameter with this storage, by id
        self.written: dict[str, None] = {}  # FQNs of parameters that operators in place wrote into
        self.filled_by_root: dict[str, None] = {}  # lists and dicts of the batch
        self.owned: dict[int, tuple[str, str]] = {}  # FQN and unit of each parameter, by id
        self.called_last: str | None = None  # the FQN of a layer
        # tensors that must not change: inputs of units that run, and outputs that are views, by the
        # id of their storage and by unit
        self.hooked: dict[int, dict[str, Tensor]] = {}
        self._running: list[str] = []
        self._kept: set[str] = set()

    def watch(self, unit: ShardUnit, modules: Sequence[nn.Module]) -> None:
        """Take a unit for unsharded from before its first module runs until all have run, or to the
        end if it is kept; compare its inputs afterwards with those before.
        """
        policy = unit.mp_policy
        casts = policy.cast_forward_inputs and policy.param_dtype is not None
        containers: list[tuple[str, Any, list[Any]]] = []  # argument, container, content before
        tensors: list[tuple[str, Tensor, int]] = []  # argument, tensor, bytes before
        params = [dict(module.named_parameters()) for module in modules]

        def enter(inputs: Any) -> Any:
            self._running.append(unit.name)
            self.called.setdefault(unit.name)
            if unit.reshard_after_forward is False:
                self._kept.add(unit.name)
            for module, own in zip(modules, params, strict=True):
                for fqn, param in module.named_parameters():
                    if param is not own.get(fqn):
                        self._note(REPLACED, unit.name, fqn)
            if not casts and not torch.is_grad_enabled():
                return inputs  # FSDP2 passes the inputs themselves
            args, kwargs = inputs
            for key, value in ({f"argument {at}": x for at, x in enumerate(args)} | kwargs).items():
                for container in _containers(value):
                    containers.append((key, container, _content(container)))
                for tensor in tensors_of(value):
                    if not tensor.requires_grad:
                        continue
                    storage = _storage_of(tensor)
                    if storage is None:
                        self._note(TRANSFORMED, unit.name, key)
                    else:
                        tensors.append((key, tensor, storage.nbytes()))
                        self._hook(unit.name, tensor)
            return inputs

        def leave(output: Any) -> Any:
            self._running.remove(unit.name)
            for key, container, before in containers:
                after = _content(container)
                is_same = list(map(id, before)) == list(map(id, after))
                if is_same or not tensors_of([before, after]):
                    continue
                if unit.modules == ("",):
                    self.filled_by_root[key] = None
                else:
                    self._note(FILLED, unit.name, key)
            for key, tensor, size in tensors:
                if tensor.untyped_storage().nbytes() < size:
                    self._note(FREED, unit.name, key)
                self.hooked.get(id(tensor.untyped_storage()), {}).pop(unit.name, None)
            for tensor in tensors_of(output):
                if tensor.requires_grad and is_view(tensor) and _storage_of(tensor) is not None:
                    self._hook(unit.name, tensor)
            containers.clear()
            tensors.clear()
            return output

        hook_unit(unit, modules, enter, leave)

    def note_call(self, fqn: str, *_: Any) -> None:
        """Remember which layer is called last."""
        self.called_last = fqn

    def _hook(self, unit: str, tensor: Tensor) -> None:
        self.hooked.setdefault(id(tensor.untyped_storage()), {})[unit] = tensor

    def _note(self, reason: str, unit: str, what: str) -> None:
        self.wrong.setdefault(reason, {}).setdefault(unit, {})[what] = None

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Record the parameters among an operator's arguments, and run it."""
        running = self._running[-1] if self._running else "no unit"
        for leaf in tree_leaves((args, kwargs)):
            fqn, unit = self.owned.get(id(leaf), ("", ""))
            if fqn and unit not in self._kept and unit not in self._running:
                self._note(OUTSIDE, unit, f"{fqn} in {running}")
        # Operators in place, such as aten.copy_.default, also through .data or a view.
        if f"{func}.".split(".")[1].endswith("_"):
            for tensor in tensors_of(args[:1]):
                storage = id(tensor.untyped_storage())
                if storage in self.storages:
                    self.written[self.storages[storage]] = None
                for unit in self.hooked.get(storage, ()):
                    self._note(CHANGED, unit, f"{func} in {running}")
        if has_wrappers(types):
            return NotImplemented  # called again with what they wrap
        return func(*args, **(kwargs or {}))
