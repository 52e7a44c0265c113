"""Methods besides forward that gather: what ``forward_methods`` names, and whether the model has it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardkit.errors import PlanError, message
from shardkit.plan import ShardingPlan
from shardkit.planning.tree import ModelTree


def forward_methods(tree: ModelTree, given: Iterable[str]) -> tuple[str, ...]:
    """``generate`` where the model has it, then those that the user named, each once.

    Raises:
        PlanError: ``given`` is one string instead of several.
    """
    if isinstance(given, str):
        rule = "It is a list of names"
        raise PlanError(message("forward_methods", f"the string {given!r}", rule, f"Pass forward_methods=[{given!r}]"))
    own = ["generate"] if callable(getattr(tree.modules[0], "generate", None)) else []
    return tuple(dict.fromkeys([*own, *given]))


def method_problems(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    """Why a method that the plan names cannot gather; nothing where all can."""
    units = {id(tree.modules[tree.places[fqn]]) for unit in plan.units for fqn in unit.modules if fqn in tree.places}
    for name in plan.forward_methods:
        fqn, _, method = name.rpartition(".") if isinstance(name, str) else ("", "", name)
        module = tree.modules[tree.places[fqn]] if fqn in tree.places else None
        problem, fix = "", "Correct the name, or leave it out"
        if not isinstance(method, str) or not callable(getattr(module, method, None)):
            problem = f"{name!r} is not a method of the model or of a module in it"
        elif method == "forward":
            problem, fix = f"{name!r} gathers by itself", "Leave it out"
        elif id(module) not in units:
            problem = f"{name!r} is a method of {fqn}, which is not a unit"
            fix = f"Make {fqn} a unit with units=, or name a method of a unit or of the model that calls this one"
        if problem:
            yield message("forward_methods", problem, "Methods of the model and of its units gather parameters", fix)
