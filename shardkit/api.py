"""The front door: plan a model, or plan it and shard it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from shardkit.apply.mesh import spec_of
from shardkit.apply.shard import ModelT, plan_and_apply
from shardkit.apply.validate import check_unsharded
from shardkit.errors import PlanError
from shardkit.plan import MeshSpec, ShardingPlan
from shardkit.planning.build import build_plan
from shardkit.planning.selection import Overrides, Rule
from shardkit.planning.tree import ModelTree

logger = logging.getLogger("shardkit")


def plan_model(
    model: nn.Module,
    *,
    units: Rule | Sequence[Rule] | None = None,
    mesh: DeviceMesh | MeshSpec | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  never changed
    ignored_params: Iterable[nn.Parameter | str] | None = None,
    float32: Rule | Sequence[Rule] = (),
    replicate: Rule | Sequence[Rule] = (),
    tiles: Mapping[Any, int] | None = None,
    checkpoint_activations: bool | str | Callable[..., Any] = False,
    compile: bool = False,
    prefetch: int = 0,
    forward_methods: Iterable[str] = (),
    example_batch: Any = None,
    memory_budget: int | str | None = None,
) -> ShardingPlan:
    """Plan how ``shard_model`` would shard ``model``, as plain data that prints as a table.

    Pure and local: nothing of the model changes, and it may be on the meta device. With a MeshSpec
    no process group is needed, so the plan for a cluster can be read on a laptop.

    Args:
        model: the whole model.
        units: which modules share one all-gather: a rule or a list of them (``by_class``,
            ``by_name``, ``by_size``, ``group``, a class, an FQN glob, or a callable
            ``(fqn, module)`` that returns a bool or a dict of settings); the first match wins, the
            root takes the rest. None is blocks, the input embedding, and ``[norm, head]``.
        mesh: one axis shards (FSDP), two replicate and shard (HSDP), ``(n, 1)`` only replicates; a
            MeshSpec, a DeviceMesh, a sub-mesh beside tensor-parallel axes, or None for all ranks in
            one axis.
        reshard_after_forward: True frees each unit's unsharded parameters after its forward and
            all-gathers them again in backward, which saves memory; False keeps them, which saves an
            all-gather; an int keeps them sharded over that many ranks, a divisor of the shard axis,
            such as those of one host; as in torch, 1 is False and all its ranks are True. None is
            True, but False for ``[norm, head]`` and the root, which backward needs at once.
        mp_policy: dtypes to compute and reduce in; its ``output_dtype`` is applied to the root
            only.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, gradients and optimizer state on the
            CPU.
        float32: modules, by rules without settings, that compute in float32 whatever ``mp_policy``
            says, such as norms, routers and heads. Those inside of one unit are a unit of their
            own. Each casts inputs in bf16 or fp16 to float32, and its outputs back; an
            ``nn.Linear``, such as a router or a head, returns float32.
        ignored_params: parameters, or their FQNs, to leave alone; their gradients are not reduced.
            Scalars and empty parameters need not be: FSDP2 cannot shard them, so they are
            replicated and their gradients reduced.
        replicate: modules, by rules without settings, whose parameters every rank holds in full,
            such as norms; they are in no unit, and one all-reduce at the end of backward reduces
            the gradients of all.
        tiles: in how many tiles of tokens modules compute, by their class or an FQN glob:
            ``{"**.mlp": 4}``.
        checkpoint_activations: recompute the blocks' forwards in backward instead of keeping their
            activations: those of the default rule, or, with your own, units of one module with
            submodules. Without blocks, an error. ``"selective"`` keeps attention and every other
            matrix product, and a policy of
            ``torch.utils.checkpoint.create_selective_checkpoint_contexts``, defined in a module,
            what it saves.
        compile: ``torch.compile`` the forward of the blocks.
        prefetch: the number of units to all-gather ahead explicitly; 0 leaves it to torch, which
            all-gathers one ahead.
        forward_methods: methods besides ``forward`` that are called from outside and unshard what
            they need, such as ``"encode"``, or ``"vae.encode"`` where ``vae`` is a unit.
            ``generate`` is among them where there is one.
        example_batch: one rank's micro-batch, for a dry run: a mapping of keyword arguments, a
            tuple of positional arguments, or a single argument; only shapes and dtypes are read. A
            forward on fake tensors, or where that fails on copies of model and batch, finds
            parameters used while their unit is not unsharded: the default rule leaves such units
            out, with a note; in your own rules they are an error. Units that are not called get a
            note.
        memory_budget: bytes of each rank's GPU, as an int or a string such as ``"80GiB"``: the plan
            becomes the cheapest one whose peak fits in nine tenths of it, as chosen by
            :func:`shardkit.memory.plan_for_budget`, which takes more arguments. Rank 0 logs the
            choice, as INFO. Needs ``example_batch``.

    Raises:
        PlanError: what cannot be sharded as asked; all offenders are listed. With ``example_batch``
            also a parameter used outside of its unit, or a model that does not run.

    Examples:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        >>> len(plan_model(model, mesh=MeshSpec.sharded(4)).units)
        3
    """
    settings = Overrides(
        mp_policy=mp_policy or MixedPrecisionPolicy(),
        offload_policy=offload_policy or OffloadPolicy(),
        checkpoint_activations=checkpoint_activations,
        compile=compile,
    )
    if reshard_after_forward is not None:
        settings["reshard_after_forward"] = reshard_after_forward
    tree = ModelTree(model)
    check_unsharded(tree, mesh if isinstance(mesh, DeviceMesh) else None)
    build = partial(
        build_plan,
        tree,
        spec_of(mesh),
        units=units,
        settings=settings,
        ignored_params=list(ignored_params or ()),
        float32=float32,
        replicate=replicate,
        tiles=tiles,
        prefetch=prefetch,
        forward_methods=list(forward_methods),
    )
    if example_batch is None:
        plan = build()
    else:
        from shardkit.memory.dry_run import plan_checked

        plan = plan_checked(tree, build, example_batch, by_default=units is None)
    if memory_budget is not None:
        if example_batch is None:
            raise PlanError(
                "memory_budget needs example_batch: activations depend on the batch. Pass one "
                "rank's micro-batch."
            )
        from shardkit.memory import plan_for_budget

        choice = plan_for_budget(model, memory_budget, plan=plan, batch=example_batch)
        plan = choice.plan
        plan.check()
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.info("%s", choice)
    return plan


def shard_model(
    model: ModelT,
    *,
    units: Rule | Sequence[Rule] | None = None,
    mesh: DeviceMesh | MeshSpec | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  never changed
    ignored_params: Iterable[nn.Parameter | str] | None = None,
    float32: Rule | Sequence[Rule] = (),
    replicate: Rule | Sequence[Rule] = (),
    tiles: Mapping[Any, int] | None = None,
    checkpoint_activations: bool | str | Callable[..., Any] = False,
    compile: bool = False,
    prefetch: int = 0,
    forward_methods: Iterable[str] = (),
    example_batch: Any = None,
    memory_budget: int | str | None = None,
    sync_module_states: bool = False,
) -> ModelT:
    """Shard ``model`` in place and return it: ``apply_plan(model, plan_model(model, ...))``.

    Collective: every rank must call, with the same arguments, and with models of the same values: a
    sample of every parameter and buffer is compared before anything is changed. Under ``torchrun``
    the process group is made from its variables; without it, a group of one process is made, so one
    script runs either way. Build the optimizer afterwards, since sharding replaces the model's
    parameters. Arguments that are not below are as for ``plan_model``.

    Args:
        model: the whole model.
        sync_module_states: broadcast the parameters and buffers of the mesh's first rank to all
            ranks, one tensor at a time and before sharding, so that the models' values may differ.
            Ignored parameters are not broadcast.

    Raises:
        PlanError: on every rank, with the model unchanged, when it cannot be sharded as asked on
            any of them.
    """
    arguments = dict(locals())  # but for these two those of plan_model
    del arguments["model"], arguments["sync_module_states"]
    return plan_and_apply(
        model,
        lambda: plan_model(model, **arguments),
        mesh if isinstance(mesh, DeviceMesh) else None,
        sync_module_states,
    )
