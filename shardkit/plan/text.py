"""A plan as text: the table, the difference of two plans, and plain torch code, to leave shardkit at any time."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from torch.distributed.fsdp import CPUOffloadPolicy

from shardkit.errors import listing
from shardkit.plan.check import children_first
from shardkit.plan.data import PlanData, dtype_name, mp_policy_to_dict
from shardkit.plan.types import ShardUnit, count, nbytes

_RESHARDS = {"True": "after forward", "False": "after backward"}
_INDEXED = re.compile(r"(?s)(.*\.|)(0|[1-9][0-9]*)(\..*|)")  # a path around its last component that is a number


def table(plan: PlanData) -> str:
    """Return the plan as a table: a row per unit, equal consecutive units folded, then a summary."""

    def looks(unit: ShardUnit) -> tuple[object, ...]:
        return (*calls(unit), [(*spec[1:4], spec.element_bytes) for spec in plan.specs_of(unit)])

    rows = [_row(plan, units) for units in fold(plan.units, looks)]
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    left = [at for at, title in enumerate(titles) if title not in ("parameters", "bytes")]
    lines = aligned([titles, *([row[title] for title in titles] for row in rows)], left)
    numel, size = sum(spec.numel for spec in plan.params), sum(spec.nbytes for spec in plan.params)
    headline = f"ShardingPlan: {count(numel)} parameters in {len(plan.units)} units on mesh {plan.mesh}"
    headline += f", {nbytes(plan.held_bytes())} of {nbytes(size)} on each rank"
    return "\n".join([headline, "", *lines, "", *_footer(plan)])


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Format rows of cells with columns of one width, those in ``left`` aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust if column in left else str.rjust for column in range(len(widths))]
    return [
        "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _row(plan: PlanData, units: Sequence[ShardUnit]) -> dict[str, str]:
    """Return the cells of one unit, or of several that are alike, by the titles of their columns."""
    unit, specs = units[0], plan.specs_of(units[0])
    each = " each" if len(units) > 1 else ""
    policy, dims = mp_policy_to_dict(unit.mp_policy), Counter(dim for _, dim in unit.shard_dims)
    computes = str(policy.get("param_dtype", "stored dtype")) if policy else ""
    computes += f", reduces in {policy['reduce_dtype']}" if "reduce_dtype" in policy else ""
    dtypes = sorted({(not spec.trainable, dtype_name(spec.dtype)) for spec in specs})
    split = " x ".join(f"{name}={size}" for name, size in plan.mesh.splits(unit.mesh).items())
    return {
        "unit": unit.name if len(units) == 1 else f"{unit.name} .. {units[-1].name}",
        "parameters": count(sum(spec.numel for spec in specs)) + each if specs else "-",
        "bytes": nbytes(sum(spec.nbytes for spec in specs)) + each if specs else "-",
        "dtype": ", ".join(dtype + " frozen" * is_frozen for is_frozen, dtype in dtypes),
        "computes in": computes,
        "reshards": _RESHARDS.get(repr(unit.reshard_after_forward), f"to {unit.reshard_after_forward} ranks"),
        "lives on": "CPU" if unit.offloads else "",
        "checkpointed": _blocks(unit, unit.checkpoint_activations),
        "compiled": _blocks(unit, unit.compile),
        "not on dim 0": ", ".join(f"{number} on dim {dim}" for dim, number in sorted(dims.items())),
        "mesh": f"{plan.mesh_of(unit)}{split and ', split over '}{split}" if any(e.mesh for e in plan.units) else "",
    }


def _blocks(unit: ShardUnit, setting: bool | str) -> str:
    inside = f", {len(unit.blocks_inside)} blocks inside" if unit.blocks_inside else ""
    return f"{'yes' if setting is True else setting}{inside}" if setting else ""


def _footer(plan: PlanData) -> list[str]:
    tiles: dict[str, list[str]] = {}
    for fqn, number in plan.tiles:
        tiles.setdefault(f"in {number} tiles of tokens", []).append(fqn or "(root)")
    listed = {
        "the root keeps": plan.units[-1].params if plan.units else (),
        "ignored": plan.ignored,
        "replicated, gradients reduced": plan.replicated,
        "prefetch": [f"{plan.prefetch} units ahead"] * bool(plan.prefetch),
        "ranks may skip": [unit.name for unit in plan.units if unit.may_skip],
        **tiles,
        "methods that gather": plan.forward_methods,
    }
    counts = plan.collectives()
    return [
        *(f"tied: {' = '.join((spec.fqn, *spec.aliases))}" for spec in plan.params if spec.aliases),
        *(f"{title}: {listing(names, 6)}" for title, names in listed.items() if names),
        f"one forward and backward: {counts.all_gathers} all-gathers, "
        f"{counts.reduce_scatters} reduce-scatters, {counts.all_reduces} all-reduces",
        *(f"note: {note}" for note in plan.notes),
    ]


def fold(units: Sequence[ShardUnit], key: Callable[[ShardUnit], object]) -> list[list[ShardUnit]]:
    """Return runs of units that differ only in one counted path component, as ``layers.0``, ``layers.1``, ..."""
    runs: list[list[ShardUnit]] = []
    open_runs: dict[str, tuple[int, list[ShardUnit]]] = {}
    for unit in units:
        around, index = counted(unit)
        run_key = f"{around} {key(unit)!r}"
        last, run = open_runs.get(run_key, (None, []))
        if index is None or last != index - 1:
            run = []
            runs.append(run)
        run.append(unit)
        if index is not None:
            open_runs[run_key] = (index, run)
    return runs


def counted(unit: ShardUnit) -> tuple[list[tuple[str, str]], int | None]:
    """Return the text around the last number of each FQN, and that number; None if the modules do not share one."""
    found = [match.groups() for fqn in unit.modules if (match := _INDEXED.fullmatch(fqn))]
    if len(found) < len(unit.modules) or len({index for _, index, _ in found}) > 1:
        return [(fqn, "") for fqn in unit.modules], None
    return [(before, after) for before, _, after in found], int(found[0][1])


def calls(unit: ShardUnit) -> tuple[object, ...]:
    """Return what two units must share to be in one loop of the code."""
    reshards, offloads = repr(unit.reshard_after_forward), repr(unit.offload_policy)
    dims = sorted(dim for _, dim in unit.shard_dims)
    inside = unit.blocks_inside if unit.checkpoint_activations or unit.compile else ()
    return reshards, unit.mp_policy, offloads, unit.checkpoint_activations, unit.compile, inside, unit.mesh, dims


def diff(plan: PlanData, other: PlanData) -> str:
    """Return one line per difference, ``-`` for ``plan`` and ``+`` for ``other``, sorted by what differs."""
    shared = {unit.name for unit in plan.units} & {unit.name for unit in other.units}
    mine, theirs = _facts(plan, shared), _facts(other, shared)
    lines = []
    for fact in sorted(mine.keys() | theirs.keys()):
        if mine.get(fact) != theirs.get(fact):
            lines += [f"{sign} {fact}: {facts[fact]}" for sign, facts in (("-", mine), ("+", theirs)) if fact in facts]
    return "\n".join(lines)


def _facts(plan: PlanData, shared: set[str]) -> dict[str, str]:
    """Return one string for each thing that two plans can differ in."""
    data = plan.to_dict()
    whole = ("prefetch", "ignored", "replicated", "forward_methods", "order")
    facts = {name.replace("_", " "): str(data[name]) for name in whole}
    facts |= {"mesh": str(plan.mesh), "order of units": str([unit.name for unit in plan.units])}
    for unit, fields in zip(plan.units, data["units"], strict=True):
        if unit.name in shared:
            facts |= {f"unit {unit.name}: {key}": str(value) for key, value in fields.items()}
        else:
            facts[f"unit {unit.name}"] = f"{len(unit.params)} parameters"
    facts |= {f"tiles of {fqn}": str(number) for fqn, number in plan.tiles}
    return facts | {f"parameter {spec.fqn}": repr(spec[1:]) for spec in plan.params}


_IMPORTS = {
    "torch.distributed.device_mesh": "init_device_mesh",
    "torch.distributed.fsdp": "CPUOffloadPolicy MixedPrecisionPolicy fully_shard register_fsdp_forward_method",
    "torch.distributed.tensor": "Shard",
    "torch.utils.checkpoint": "checkpoint CheckpointPolicy create_selective_checkpoint_contexts",
}
# Functions for the code, by how it uses them. They repeat ours as text: it must run without shardkit.
_HELPERS = {}

_HELPERS["checkpoint_forward("] = """
def checkpoint_forward(module, **options):
    # Backward runs forward again, and what it adds to buffers, such as running statistics, is added twice.
    module.forward = functools.wraps(module.forward)(
        functools.partial(checkpoint, module.forward, use_reentrant=False, **options)
    )
"""

_HELPERS["=selective)"] = """
def selective():  # saves attention, unless it draws random numbers for dropout, and every other matrix product
    is_saved = itertools.cycle([True, False])

    def policy(_, op, *args, **kwargs):
        given = {**dict(zip((each.name for each in op._schema.arguments), args)), **kwargs}
        is_product = op.name() in ("aten::mm", "aten::addmm", "aten::_grouped_mm", "aten::_scaled_mm")
        is_attention = ("attention" in op.name() or "attn" in op.name()) and not given.get("dropout_p")
        saves = next(is_saved) if is_product else is_attention
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
"""

_HELPERS["compute_in("] = """
def compute_in(module, dtype):
    # With its replicated parameters cast, as fully_shard casts by mp_policy.
    forward = module.forward

    @functools.wraps(forward)
    def cast(*args, **kwargs):
        owners = [(each._parameters, dict(each._parameters)) for each in module.modules()]
        try:
            for params, own in owners:
                params.update({n: p.to(dtype) for n, p in own.items() if p is not None and p.is_floating_point()})
            return forward(*args, **kwargs)
        finally:
            for params, own in owners:
                params.update(own)

    module.forward = cast
"""

_HELPERS["tile_forward("] = """
def tile_forward(module, tiles):
    forward = module.forward

    def in_tiles(x, *args, **kwargs):
        def tile(part):
            return forward(part.contiguous(), *args, **kwargs)

        return torch.cat([checkpoint(tile, part, use_reentrant=False) for part in x.chunk(tiles, -2)], -2)

    module.forward = functools.wraps(forward)(in_tiles)
"""

_HELPERS["divide_gradients("] = """
def divide_gradients(module, times):
    # Experts' gradients hold the tokens of all ranks, but torch divides them by the ranks that reduce them.
    def divide(gradient):
        gradient.div_(times)
        if gradient.is_cuda:
            gradient.record_stream(torch.cuda.current_stream())

    module.set_all_reduce_hook(divide)
"""

_PREFETCH = """
units = [model.get_submodule(name) for name in {names}]
for index, unit in enumerate(units):
    unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + {ahead}])
    unit.set_modules_to_backward_prefetch(units[max(0, index - {ahead}) : index][::-1])
"""

_REDUCE = """
def reduce_replicated():
    # Call it after the last backward of each step, before clipping and optimizer.step().
    trained = [param for param in replicated if param.requires_grad]
    grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in trained]
    used = torch.tensor([float(param.grad is not None) for param in trained], device=device_type)
    flat = torch.cat([used, *(grad.flatten() for grad in grads)])  # in float32 or wider
    for axis in range(mesh.ndim):
        dist.all_reduce(flat, group=mesh.get_group(axis))
    used, *totals = flat.split([len(grads), *(grad.numel() for grad in grads)])
    for param, ranks, total in zip(trained, used.tolist(), totals):
        if ranks:
            param.grad = (total / mesh.size()).view(param.shape).to(param.dtype)
"""


def python(plan: PlanData, before: str = "") -> str:
    """Return code that shards the ``model`` in scope; it needs a process group of the mesh's size."""
    runs = fold(plan.units, calls)
    if any(children_first(replace(plan, units=tuple(chain(*runs))))):  # loops would shard a module before its child
        runs = [[unit] for unit in plan.units]
    lines = [*_setup(plan), *before.splitlines(), ""]
    lines += [f"# note: {note}" for note in plan.notes]
    if skipped := [unit.name for unit in plan.units if unit.may_skip]:
        where = f"each rank must call {listing(skipped, 6)} in every step, or the others wait"
        lines.append(f"# Not in this code: may_skip, which torch lacks; {where}.")
    if cast := plan.replicated_modules():
        lines += [f"for name, dtype in {cast}.items():", "    compute_in(model.get_submodule(name), dtype)"]
    lines += [f"tile_forward({_module(_quoted(fqn))}, {tiles})" for fqn, tiles in plan.tiles]
    lines += [line for run in runs for line in _run(plan, run)]
    if plan.prefetch:
        ahead = [unit.modules[0] for unit in plan.execution_order() if unit.modules != ("",)]
        lines.append(_PREFETCH.format(names=ahead, ahead=plan.prefetch).rstrip())
    lines += [_REDUCE.rstrip()] * bool(plan.replicated)
    for name in plan.forward_methods:
        fqn, _, method = name.rpartition(".")
        lines.append(f"register_fsdp_forward_method({_module(_quoted(fqn))}, {_quoted(method)})")
    code = "\n".join(lines)
    code = "".join(f"\n{helper}\n" for use, helper in _HELPERS.items() if use in code) + code
    policies = {str(unit.checkpoint_activations).partition(":") for unit in plan.units}
    return "\n".join([*_imports(code, sorted(module for module, colon, _ in policies if colon)), code, ""])


def _imports(code: str, policies: Sequence[str]) -> Iterator[str]:
    """Yield the imports of what the code uses; ``policies`` are the modules of policies for checkpointing."""

    def used(names: str) -> list[str]:
        return [name for name in names.split() if re.search(rf"(?<![\w.\"]){name}[(.,]", code)]

    standard = used("functools itertools")
    yield from [*(f"import {name}" for name in standard), *[""] * bool(standard)]
    yield from (f"import {name}" for name in ["torch", *policies])
    yield from (f"import torch.distributed as {name}" for name in used("dist"))
    for module, names in _IMPORTS.items():
        if found := used(names):
            yield f"from {module} import {', '.join(found)}"


def _quoted(name: str) -> str:
    """Return a name as Python source, in double quotes; JSON's escapes are valid in Python."""
    return json.dumps(name, ensure_ascii=False)


def _module(name: str) -> str:
    return "model" if name == '""' else f"model.get_submodule({name})"


def _setup(plan: PlanData) -> Iterator[str]:
    yield ""
    yield 'device_type = "cuda" if torch.cuda.is_available() else "cpu"'
    yield f"mesh = init_device_mesh(device_type, {plan.mesh.shape}, mesh_dim_names={plan.mesh.axis_names})"
    if plan.mesh.shard_axes > 1:
        joined = plan.mesh.on(None)
        yield f"joined = init_device_mesh(device_type, {joined.shape}, mesh_dim_names={joined.axis_names})"
    if dims := {fqn: dim for unit in plan.units for fqn, dim in unit.shard_dims}:
        yield from ["dims = {", *(f"    {_quoted(fqn)}: {dim}," for fqn, dim in dims.items()), "}"]
        yield "placements = {model.get_parameter(name): Shard(dim) for name, dim in dims.items()}"
    if plan.unsharded:
        yield f"ignored_params = {{model.get_parameter(name) for name in {list(plan.unsharded)}}}"
    if plan.replicated:
        yield f"replicated = [model.get_parameter(name) for name in {list(plan.replicated)}]"
        yield "for param in (param for param in replicated if not param.is_meta):"
        yield "    param.data = param.data.to(device_type)"


def _run(plan: PlanData, run: Sequence[ShardUnit]) -> Iterator[str]:
    """Yield the code of units that differ in one number: a loop over it, if they are several."""
    if len(run) == 1:
        yield from _unit(plan, run[0], [_quoted(fqn) for fqn in run[0].modules])
        return
    around, first = counted(run[0])
    assert first is not None  # only counted units are folded into a run
    yield f"for i in range({first}, {first + len(run)}):"
    escaped = [[_quoted(part)[1:-1].replace("{", "{{").replace("}", "}}") for part in parts] for parts in around]
    names = [f'f"{before}{{i}}{after}"' for before, after in escaped]
    yield from ("    " + line for line in _unit(plan, run[0], names))


def _unit(plan: PlanData, unit: ShardUnit, names: Sequence[str]) -> Iterator[str]:
    targets = ", ".join(map(_module, names))
    if unit.checkpoint_activations or unit.compile:
        inside = ", ".join(_module(_quoted(fqn)) for fqn in unit.blocks_inside)
        yield f"for module in [{inside or targets}]:"
        yield from ["    checkpoint_forward(module)"] * (unit.checkpoint_activations is True)
        if isinstance(saved := unit.checkpoint_activations, str):
            made = f"functools.partial(create_selective_checkpoint_contexts, {saved.replace(':', '.')})"
            yield f"    checkpoint_forward(module, context_fn={saved if saved == 'selective' else made})"
        yield from ["    module.forward = torch.compile(module.forward)"] * unit.compile
    mesh = "mesh" if plan.mesh.shard_axes == 1 else "joined"
    if unit.mesh is not None:
        mesh = f"mesh[{', '.join(map(_quoted, plan.mesh_of(unit).axis_names))}]"
    given = [f"mesh={mesh}", f"reshard_after_forward={unit.reshard_after_forward}"]
    if policy := mp_policy_to_dict(unit.mp_policy):
        fields = [f"{key}={f'torch.{value}' if isinstance(value, str) else value}" for key, value in policy.items()]
        given.append(f"mp_policy=MixedPrecisionPolicy({', '.join(fields)})")
    if isinstance(unit.offload_policy, CPUOffloadPolicy):
        given.append(f"offload_policy=CPUOffloadPolicy(pin_memory={unit.offload_policy.pin_memory})")
    given += ["ignored_params=ignored_params"] * bool(plan.unsharded)
    given += ["shard_placement_fn=placements.get"] * bool(unit.shard_dims)
    yield f"fully_shard({targets if len(names) == 1 else f'[{targets}]'}, {', '.join(given)})"
    if (parts := plan.mesh.parts(unit.mesh)) > 1:
        yield f"divide_gradients({_module(names[0])}, {parts})"
