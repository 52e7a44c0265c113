"""What torch offers and shardkit answers for, on the torch that is installed."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

PAGE = Path(__file__).parents[1] / "docs" / "torch-versions.md"


def offered() -> set[str]:
    """Every argument of ``fully_shard`` and its policies, and every public method of ``FSDPModule``."""
    names = {f"fully_shard({name})" for name in inspect.signature(fully_shard).parameters}
    for policy in (MixedPrecisionPolicy, CPUOffloadPolicy):
        names |= {f"{policy.__name__}({field.name})" for field in dataclasses.fields(policy)}
    return names | {f"FSDPModule.{name}" for name in vars(FSDPModule) if not name.startswith("_")}


def test_the_page_answers_for_all_that_fully_shard_offers() -> None:
    answered = set(re.findall(r"^\| `([^`]+)` \| .+ \|$", PAGE.read_text(), re.MULTILINE))
    assert len(answered) > 30
    assert offered() <= answered, f"new in this torch, add a row: {sorted(offered() - answered)}"
