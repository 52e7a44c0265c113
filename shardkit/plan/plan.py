"""ShardingPlan: the data of a plan, with its check and its forms as text, JSON and Python."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from shardkit.errors import refuse
from shardkit.plan import check, serialize
from shardkit.plan.data import PlanData


@dataclass(frozen=True)
class ShardingPlan(PlanData):
    """Every decision about how to shard a model, made before anything is changed; plain data, pure and local.

    ``print(plan)`` is a table, ``plan.diff(other)`` compares, ``plan.to_python()`` writes the torch code,
    ``plan.to_dict()`` and ``from_dict`` go through JSON.

    Attributes:
        units: the ``fully_shard`` calls in the order they are made, children first and the root last.
        mesh: shape and axis names of the data-parallel mesh.
        params: what is known of each parameter of the model, in the model's order.
        ignored: FQNs of the parameters that are left alone: not sharded, moved or reduced.
        replicated: FQNs of the parameters that cannot be sharded, such as scalars and empty ones. Every rank holds them
            on the mesh's device in their stored dtype, and their gradients are reduced over the whole mesh.
        prefetch: units ahead to all-gather explicitly; 0 leaves it to torch, which gathers one ahead.
        forward_methods: methods besides forward that gather the parameters of their module when called, by dotted
            names from the root.
        tiles: modules that compute in tiles of tokens, as pairs ``(fqn, number)``; a mapping is converted.
        notes: what the reader should know about how the plan was made; not compared.
    """

    def check(self) -> None:
        """Raise one PlanError that lists everything wrong with the plan itself; pure and local."""
        refuse(check.problems(self))

    def digest(self) -> bytes:
        """Return the SHA-256 of the JSON form: 32 bytes, equal on two ranks exactly when their plans are."""
        data = {key: value for key, value in self.to_dict().items() if key != "notes"}
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).digest()

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data: strings, numbers, lists and dicts."""
        return serialize.plan_to_dict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ShardingPlan:
        """Read the plan that ``to_dict`` wrote.

        Raises:
            PlanError: a key is missing or unknown, or a value has the wrong type.
        """
        return cls(**serialize.fields_of_plan(data))

    def diff(self, other: ShardingPlan) -> str:
        """Return one line per difference, ``-`` for this plan and ``+`` for ``other``; empty when they are equal."""
        from shardkit.plan.table import diff

        return diff(self, other)

    def to_python(self) -> str:
        """Return plain torch code, without shardkit, that shards a ``model`` in scope exactly as this plan does.

        It lacks what shardkit adds at run time: resharding after forwards without grad, calling any module first, and
        correct gradients of gradients. Of modules in tiles it cuts the first argument only.
        """
        from shardkit.plan.python import python

        return python(self)

    def __str__(self) -> str:
        from shardkit.plan.table import table

        return table(self)
