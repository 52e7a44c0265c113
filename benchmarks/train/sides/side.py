"""What a side is: a way to build a case's training, and which options it has."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.models import SHAPES
from benchmarks.train.case import Case, Training


@dataclass(frozen=True)
class Side:
    """One row's hand.

    Attributes:
        title: in a few words, for tables.
        options: what of :func:`asked` it can do.
        make: builds the training. Collective.
        refuse: why it cannot do a case though it has all options that are asked for, or None.
        package: that has to be installed, or None.
    """

    title: str
    options: frozenset[str]
    make: Callable[[Case, torch.device], Training]
    refuse: Callable[[Case], str | None] = lambda case: None
    package: str | None = None

    def unavailable(self, case: Case) -> str | None:
        """Why the case cannot be built by this side here, or None. Local, pure; nothing that is
        asked is ignored.
        """
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        missing = [text for option, text in asked(case) if option not in self.options]
        return (
            f"this side has no {', no '.join(missing)}"
            if missing
            else (nonsense(case) or self.refuse(case))
        )

    def build(self, case: Case, device: torch.device) -> Training:
        """The case's training on ``device``. Collective: the process group is there, of real or
        pretended ranks.
        """
        reason = self.unavailable(case)
        if reason is not None:
            raise ValueError(f"{case.name}: {reason}")
        return self.make(case, device)


def asked(case: Case) -> Iterator[tuple[str, str]]:
    """Each option that the case asks for beyond the least, by name and as text."""
    is_int = not isinstance(case.reshard, (bool, type(None)))
    wishes = {
        "fake": (case.fake_ranks, "part in a pretended world"),
        "reshard": (case.reshard is not None, "reshard_after_forward"),
        "reshard_int": (is_int, "reshard_after_forward over some ranks"),
        "strategy": (case.strategy is not None, "sharding strategy"),
        "replicas": (case.replicas > 1, "replicas"),
        "unit": (case.checkpointing == "unit", "checkpointing of blocks"),
        "selective": (case.checkpointing == "selective", "selective checkpointing"),
        "compile": (case.compile, "compiled blocks"),
        "offload": (case.offload, "CPU offload"),
        "masterless": (not case.masters, "parameters in bfloat16 alone"),
        "local": (case.stepping == "local", "step on local shards"),
        "in_backward": (case.stepping == "in_backward", "optimizer in backward"),
        "budget": (case.budget_gib is not None, "memory budget"),
    }
    return ((name, text) for name, (wish, text) in wishes.items() if wish)


def nonsense(case: Case) -> str | None:
    """What no side could do here, or None."""
    shape, is_hf = case.model.removeprefix("hf-"), case.model.startswith("hf-")
    if shape not in SHAPES:
        return f"no shape is called {shape}; they are {', '.join(SHAPES)}"
    if is_hf and importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    ranks, rest = divmod(world(case), case.replicas)
    if rest:
        return f"{world(case)} ranks are not {case.replicas} replicas"
    if not isinstance(case.reshard, (bool, type(None))) and (
        ranks % case.reshard or not 1 < case.reshard < ranks
    ):
        return (
            f"reshard_after_forward={case.reshard} must divide {ranks} ranks and lie between them "
            "and 1"
        )
    return None


def world(case: Case) -> int:
    """Ranks, real or pretended."""
    if case.fake_ranks:
        return case.fake_ranks
    return (
        dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    )
