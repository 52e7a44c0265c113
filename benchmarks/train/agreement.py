"""Whether two sides compute the same training."""

from __future__ import annotations

from typing import Any

from benchmarks.train.case import Case

# These gather the same shards and call the same kernels, so the first loss has the same bits.
SAME_ENGINE = frozenset({"shardkit", "shardkit-budget", "expert", "naive"})
# Elsewhere sums run in another order, compiled code fuses, and updates of the bare bf16 model round
# to 8 bits. These are relative to the loss: bfloat16 keeps 2**-8 of a value, and the loss is a mean
# of many; later every parameter has moved too.
FIRST = {True: 2**-8, False: 1e-5}
LATER = {True: 2**-5, False: 1e-3}


def compare(case: Case, losses: list[float], other: Case, others: list[float]) -> dict[str, Any]:
    """The first and the largest later difference of losses, what is allowed, and whether that
    holds.

    ``holds`` is None where losses cannot be compared: in a pretended world gathered parameters are
    copies of a shard, so another way of sharding is another model.
    """
    exact = {case.side, other.side} <= SAME_ENGINE and _arithmetic(case) == _arithmetic(other)
    differences = [
        abs(mine - theirs) / abs(theirs) for mine, theirs in zip(losses, others, strict=False)
    ]
    first, later = differences[0], max(differences[1:], default=0.0)
    allowed = (0.0 if exact else FIRST[case.bf16]), LATER[case.bf16]
    comparable = exact or not (case.fake_ranks or other.fake_ranks)
    holds = (first <= allowed[0] and later <= allowed[1]) if comparable else None
    return {
        "with": other.name,
        "first": first,
        "later": later,
        "allowed": list(allowed) if comparable else None,
        "holds": holds,
    }


def _arithmetic(case: Case) -> tuple[object, ...]:
    return (
        case.model,
        case.bf16,
        case.masters,
        case.compile,
        case.sequence,
        case.micro_batch,
        case.fake_ranks,
    )
