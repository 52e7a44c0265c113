"""ShardingPlan: the exact list of ``fully_shard`` calls you would have written by hand, as plain
data.

``types`` defines its parts, ``data`` what follows from them; ``check`` validates it; ``text`` and
``code`` write it; ``counting`` counts its collectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardkit.errors import PlanError, refuse
from shardkit.plan import check
from shardkit.plan.data import VERSION, PlanData
from shardkit.plan.types import Collectives as Collectives
from shardkit.plan.types import MeshSpec as MeshSpec
from shardkit.plan.types import ParamSpec as ParamSpec
from shardkit.plan.types import ShardUnit as ShardUnit
from shardkit.plan.types import ancestors as ancestors
from shardkit.plan.types import is_world_size as is_world_size


@dataclass(frozen=True)
class ShardingPlan(PlanData):
    """Every decision about how to shard a model, made before anything is changed; plain data, pure
    and local.

    ``print(plan)`` is a table, ``plan.diff(other)`` compares, ``plan.to_python()`` writes the torch
    code, ``plan.to_dict()`` and ``from_dict`` go through JSON.

    Attributes:
        units: the ``fully_shard`` calls in the order they are made, children first and the root
            last.
        mesh: shape and axis names of the data-parallel mesh.
        params: what is known of each parameter of the model, in the model's order.
        ignored: FQNs of the parameters that are left alone: not sharded, moved or reduced.
        replicated: FQNs of the parameters that cannot be sharded, such as scalars and empty ones,
            and those of modules in ``replicate=``. Every rank holds them on the mesh's
            device in their stored dtype, and their gradients are reduced over the whole mesh.
        prefetch: units ahead to all-gather explicitly; 0 leaves it to torch, which gathers one
            ahead.
        forward_methods: methods besides forward that unshard the parameters of their module when
            called, by dotted names from the root.
        tiles: modules that compute in tiles of tokens, as pairs ``(fqn, number)``; a mapping is
            converted.
        order: names of the units as the forward of an ``example_batch`` called them, where the
            model's order differs.
        notes: what the reader should know about how the plan was made; not compared.
    """

    def check(self) -> None:
        """Raise one PlanError that lists everything wrong with the plan itself; pure and local."""
        refuse(check.problems(self))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ShardingPlan:
        """Read the plan that ``to_dict`` wrote.

        Raises:
            PlanError: a key is missing or unknown, or a value has the wrong type.
        """
        try:
            fields = {name: _tuples(value) for name, value in data.items()}
            if fields.pop("version") != VERSION:
                raise ValueError(f"version {data['version']!r}")
            fields["mesh"] = MeshSpec(**fields["mesh"])
            fields["units"] = tuple(map(_unit, data["units"]))
            fields["params"] = tuple(map(_param, data["params"]))
            return cls(**fields)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(
                f"plan cannot be read ({type(error).__name__}: {error}). It must be what "
                f"ShardingPlan.to_dict() wrote, version {VERSION}. Write it again with this "
                "version of shardkit."
            ) from error

    def collectives(
        self,
        micro_batches: int = 1,
        *,
        keep_unsharded: bool | Literal["frozen"] | None = None,
        shard_gradients: bool = False,
    ) -> Collectives:
        """Predict the collectives of one step on each rank; pure and local.

        Holds for eager torch when the units run in the model's order, each once per forward; a unit
        that runs twice is unsharded again.

        Args:
            micro_batches: forwards and backwards with gradients, in a step of
                ``shardkit.accumulate``.
            keep_unsharded: as given to ``accumulate``.
            shard_gradients: as given to ``accumulate``.
        """
        from shardkit.plan.counting import collectives

        return collectives(self, micro_batches, keep_unsharded, shard_gradients)

    def diff(self, other: ShardingPlan) -> str:
        """Return one line per difference, ``-`` for this plan and ``+`` for ``other``; empty when
        they are equal.
        """
        from shardkit.plan.text import diff

        return diff(self, other)

    def to_python(self, before: str = "") -> str:
        """Return plain torch code, without shardkit, that shards a ``model`` in scope exactly as
        this plan does.

        ``before`` is code to run between building the mesh and sharding, such as a broadcast.

        It lacks what shardkit adds at run time: ``may_skip``, tiles, resharding after forwards
        without grad, calling any module first, and correct gradients of gradients. With
        ``"selective"`` it keeps all matrix products, and no attention.
        """
        from shardkit.plan.code import python

        return python(self, before)

    def __str__(self) -> str:
        from shardkit.plan.text import table

        return table(self)


def _tuples(value: Any) -> Any:
    """Return JSON data with tuples for its lists."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _unit(data: dict[str, Any]) -> ShardUnit:
    policy = dict(data["mp_policy"])
    for name, value in policy.items():
        if isinstance(value, str):
            policy[name] = getattr(torch, value)
    offload = data["offload_policy"]
    fields = {
        **_tuples(data),
        "mp_policy": MixedPrecisionPolicy(**policy),
        "offload_policy": CPUOffloadPolicy(**offload) if offload else OffloadPolicy(),
    }
    return ShardUnit(**fields)


def _param(data: list[Any]) -> ParamSpec:
    fqn, shape, dtype, *others = _tuples(data)
    return ParamSpec(fqn, shape, getattr(torch, dtype), *others)
