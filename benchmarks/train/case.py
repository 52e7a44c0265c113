"""One row of the tables: a model, who shards it, and how it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:  # tables are made without torch
    from torch import Tensor, nn

Checkpointing: TypeAlias = Literal["none", "unit", "selective"]
Stepping: TypeAlias = Literal["fused", "foreach", "local", "in_backward"]


@dataclass(frozen=True)
class Case:
    """What is measured. Plain strings and numbers, which go into the result's JSON.

    Attributes:
        name: unique in its suite; the result's file name.
        side: who shards the model, a key of ``sides.SIDES``.
        model: a key of ``models.SHAPES``, or ``"hf-"`` and one for transformers' Llama of that
            shape.
        fake_ranks: 0 runs on the ranks that were launched; n is one rank of n pretended ones, whose
            collectives do nothing (the ``fake`` process group): real memory and kernels, no
            communication.
        sequence, micro_batch: tokens in a row, and rows for each rank in a step.
        bf16: compute in bfloat16; False computes in float32.
        masters: float32 parameters, which the optimizer steps; False keeps parameters, gradients
            and optimizer state in bfloat16, as some published runs do.
        reshard: ``reshard_after_forward``; None is the side's own choice.
        strategy: FSDP1's ShardingStrategy by name, for its sides.
        replicas: replicas of HSDP; 1 shards over all ranks.
        checkpointing: what is recomputed in backward.
        compile: each block, in place.
        offload: parameters, gradients and optimizer state on the CPU.
        stepping: which AdamW; ``"local"`` is shardkit's step on local shards.
        budget_gib: memory budget in GiB, for shardkit's side under one.
    """

    name: str
    side: str
    model: str
    fake_ranks: int = 0
    sequence: int = 4096
    micro_batch: int = 1
    bf16: bool = True
    masters: bool = True
    reshard: bool | int | None = None
    strategy: str | None = None
    replicas: int = 1
    checkpointing: Checkpointing = "none"
    compile: bool = False
    offload: bool = False
    stepping: Stepping = "fused"
    budget_gib: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens of one step of one rank."""
        return self.sequence * self.micro_batch


@dataclass
class Training:
    """A model ready to train.

    Attributes:
        model: sharded.
        step: one whole step on token ids ``(micro_batch, sequence)``: forward, backward, clipping,
            optimizer. Returns the loss before the step, detached, 0-d, not synchronized with the
            CPU.
    """

    model: nn.Module
    step: Callable[[Tensor], Tensor]
