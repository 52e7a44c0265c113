"""Run one forward on fake tensors, and find parameters that are used while their unit is not
gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from shardkit._torch.dispatch import TorchDispatchMode, tree_leaves
from shardkit.errors import PlanError, listing, message
from shardkit.memory.trace import hook_unit, on_fake_tensors, tensors_of
from shardkit.plan import ShardingPlan, ShardUnit
from shardkit.planning.tree import ModelTree


def plan_checked(
    tree: ModelTree, build: Callable[[], ShardingPlan], batch: Any, *, by_default: bool
) -> ShardingPlan:
    """Return the plan of ``build()``, checked by one forward: each unit has what it uses. Local.

    A unit of the default rule whose parameters are used outside of it is left out, with a note; in
    rules of the user's it is an error. Pure, except that the tree keeps which modules those are.
    """
    notes: list[str] = []
    plan = build()
    uses = dry_run(tree.root.module, plan, batch)
    while uses.outside:
        wrong = [unit for unit in plan.units if unit.name in uses.outside]
        found = {tree.node(fqn) for unit in wrong for fqn in unit.modules}
        if not by_default or all(node.used_uncalled for node in found):
            raise PlanError("\n".join(_problem(u.name, uses.outside[u.name]) for u in wrong))
        for node in found:
            node.used_uncalled = True
        reads = []
        for unit in wrong:
            fqn, where = next(iter(uses.outside[unit.name].items()))
            reads.append(f"{fqn} in {where}")
        notes.append(
            f"{listing((unit.name for unit in wrong), 4)}: not a unit, because parameters are used "
            f"outside of it: {listing(reads, 4)}"
        )
        plan = build()
        uses = dry_run(tree.root.module, plan, batch)

    idle = [unit.name for unit in plan.units if unit.name not in uses.called]
    if idle:
        notes.append(f"{listing(idle, 4)}: not called in the forward of example_batch")
    if uses.written:
        fix = "make it a buffer (docs/kinds-of-models.md)"
        notes.append(
            f"{listing(uses.written)}: written inside forward; FSDP2 loses the write, {fix}"
        )
    if uses.filled:
        fix = "return it, or keep it inside one unit (docs/kinds-of-models.md)"
        names = listing(uses.filled, 4)
        notes.append(f"{names}: written into by the unit, which gets a copy from FSDP2; {fix}")
    expected = [unit.name for unit in plan.execution_order() if unit.name in uses.called]
    order = () if expected == list(uses.called) else tuple(uses.called)
    return replace(plan, order=order, notes=(*plan.notes, *notes))


def dry_run(model: nn.Module, plan: ShardingPlan, batch: Any) -> Uses:
    """Run ``model`` on fake tensors, in the dtypes that ``plan`` computes in; PlanError if that
    fails.
    """
    unit_of = {fqn: unit.name for unit in plan.units for fqn in unit.params}
    fix = (
        "Pass a batch that the model accepts, or leave example_batch out; units=[] (one unit) "
        "suits any forward"
    )
    # a function that holds one may still pass it to operators
    real = list(model.named_parameters())
    with on_fake_tensors(model, plan, batch, "example_batch", fix) as (args, kwargs):
        uses = Uses()
        for fqn, param in (*real, *model.named_parameters()):
            if fqn in unit_of:
                uses.owned[id(param)] = fqn, unit_of[fqn]
        for fqn, param in model.named_parameters():
            if fqn in unit_of:
                uses.storages[id(param.untyped_storage())] = fqn
        for unit in plan.units:
            uses.watch(unit, [model.get_submodule(fqn) for fqn in unit.modules])
        for path in plan.forward_methods:  # each gathers its unit
            fqn, _, name = path.rpartition(".")
            owner, method = model.get_submodule(fqn), nn.Module()
            method.forward = getattr(owner, name)
            uses.watch(next(unit for unit in plan.units if fqn in unit.modules), [method])
            vars(owner)[name] = method
        with uses:
            model(*args, **kwargs)
    return uses


def _problem(unit: str, params: Mapping[str, str]) -> str:
    verb, inside = "is" if len(params) == 1 else "are", listing(dict.fromkeys(params.values()))
    rule = "FSDP2 gathers the parameters of a unit only while one of its modules is called"
    fix = f"Leave {unit} out of units=, so that an outer unit gathers it, or call the module"
    return message(
        listing(params), f"{verb} used in {inside} while the unit {unit} is not gathered", rule, fix
    )


def _containers(tree: Any) -> Iterator[Any]:
    """Yield the lists and dicts in an argument; FSDP2 copies those with tensors that require grad,
    or that it casts.
    """
    if isinstance(tree, (list, dict)):
        yield tree
    if isinstance(tree, (list, dict)) or type(tree) is tuple:
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _containers(each)


def _entries(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else [*container]


class Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the parameters that operators read while FSDP2 would not have gathered their unit."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # by unit and FQN of a parameter: what ran when it was read
        self.outside: dict[str, dict[str, str]] = {}
        self.called: dict[str, None] = {}  # units that ran, in order
        self.storages: dict[int, str] = {}  # the FQN of the parameter with this storage, by id
        self.written: dict[str, None] = {}  # FQNs of parameters that operators in place wrote into
        # lists and dicts among a unit's inputs that it wrote into
        self.filled: dict[str, None] = {}
        self.owned: dict[int, tuple[str, str]] = {}  # FQN and unit of each parameter, by id
        self._running: list[str] = []
        self._kept: set[str] = set()

    def watch(self, unit: ShardUnit, modules: Sequence[nn.Module]) -> None:
        """Take a unit for gathered from before its first module runs until all have run, or to the
        end if it stays.
        """
        held: list[tuple[str, Any, list[Any]]] = []

        def enter(inputs: Any) -> Any:
            self._running.append(unit.name)
            self.called.setdefault(unit.name)
            if unit.reshard_after_forward is False:
                self._kept.add(unit.name)
            casts = unit.mp_policy.cast_forward_inputs and unit.mp_policy.param_dtype is not None
            named = {f"argument {at}": each for at, each in enumerate(inputs[0])} | inputs[1]
            for key, container in (
                (key, each) for key, tree in named.items() for each in _containers(tree)
            ):
                if casts or any(tensor.requires_grad for tensor in tensors_of(container)):
                    held.append((key, container, _entries(container)))
            return inputs

        def leave(output: Any) -> Any:
            self._running.remove(unit.name)
            for key, container, before in held:
                if list(map(id, before)) != list(map(id, _entries(container))):
                    self.filled[f"{unit.name} ({key})"] = None
            held.clear()
            return output

        hook_unit(unit, modules, enter, leave)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Record the parameters among an operator's arguments, and run it."""
        for leaf in tree_leaves((args, kwargs)):
            fqn, unit = self.owned.get(id(leaf), ("", ""))
            if fqn and unit not in self._kept and unit not in self._running:
                self.outside.setdefault(unit, {}).setdefault(fqn, self._running[-1])
        # in place, as aten.copy_.default, also through .data or a view
        if f"{func}.".split(".")[1].endswith("_"):
            for leaf in tree_leaves(args[:1]):
                if isinstance(leaf, Tensor) and id(leaf.untyped_storage()) in self.storages:
                    self.written[self.storages[id(leaf.untyped_storage())]] = None
        return func(*args, **(kwargs or {}))
