"""Parameters held outside of nn.Module's registry follow their module's; what cannot is refused before sharding."""

from __future__ import annotations

import collections
import dataclasses
import functools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from refusals import refused
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardkit import MeshSpec, ShardkitError, apply_plan, init_on_meta, materialize, plan_model, shard_model
from shardkit.reach import held_tensors
from shardkit.testing import distributed, fake_world


class Pair(NamedTuple):
    first: Tensor
    second: int


@dataclasses.dataclass(frozen=True)
class Frozen:
    weight: Tensor


class Slotted:
    __slots__ = ("__weakref__", "weight")


class Hidden(nn.Module):
    """A module with the parameter of another one, that is not registered."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def slotted(weight: Tensor) -> Slotted:
    made = Slotted()
    made.weight = weight
    return made


def closure(weight: Tensor) -> Callable[[], Tensor]:
    return lambda: weight


def default(weight: Tensor) -> Callable[[], Tensor]:
    def read(weight: Tensor = weight) -> Tensor:
        return weight

    return read


# How a module may hold a parameter: what it holds, and how it reads the parameter from that.
FORMS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Tensor]]] = {
    "list": (lambda w: [w], lambda held: held[0]),
    "nested": (lambda w: {"a": [(0, (w,))]}, lambda held: held["a"][0][1][0]),
    "dict": (lambda w: collections.OrderedDict(a=w), lambda held: held["a"]),
    "tuple": (lambda w: (w, w), lambda held: held[1]),
    "named tuple": (lambda w: Pair(w, 1), lambda held: held.first),
    "set": (lambda w: {w}, lambda held: next(iter(held))),
    "frozenset": (lambda w: frozenset({w}), lambda held: next(iter(held))),
    "deque": (lambda w: collections.deque([w]), lambda held: held[0]),
    "frozen dataclass": (Frozen, lambda held: held.weight),
    "namespace": (lambda w: SimpleNamespace(w=w), lambda held: held.w),
    "slots": (slotted, lambda held: held.weight),
    "partial": (lambda w: functools.partial(max, w, default=0), lambda held: held.args[0]),
    "partial keyword": (lambda w: functools.partial(dict, w=w), lambda held: held()["w"]),
    "closure": (closure, lambda held: held()),
    "default": (default, lambda held: held()),
    "hidden module": (Hidden, lambda held: held.weight),
    "hidden module in a list": (lambda w: [Hidden(w)], lambda held: held[0].weight),
}


class Holding(nn.Module):
    """A block that uses one of its parameters only through another place."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        make, self.read = FORMS[form]
        object.__setattr__(self, "held", make(self.a.weight))  # past nn.Module, which would register it

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.relu(F.linear(x, self.read(self.held), self.a.bias)))


def holding(form: str) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.ModuleList([Holding(form), Holding(form)])[0], Holding(form))


def losses(model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.arange(20.0).view(4, 5).sin()
    found = []
    for _ in range(3):
        found.append(model(x).square().mean())
        found[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.detach() for loss in found]


def built(form: str) -> nn.Module:
    torch.manual_seed(0)
    return holding(form)


@pytest.mark.parametrize("on_meta", [False, True])
@distributed(world_size=2)
def test_a_held_parameter_trains(on_meta: bool) -> None:
    for form in FORMS:
        expected = losses(built(form))
        if on_meta:
            with init_on_meta():
                model = built(form)
            materialize(shard_model(model))
        else:
            model = shard_model(built(form))
        assert model[1].read(model[1].held) is model[1].a.weight, form
        assert torch.equal(torch.stack(losses(model)), torch.stack(expected)), form
        assert model[1].read(model[1].held) is model[1].a.weight, form


def test_lists_of_parameters_for_optimizers_are_right() -> None:
    """Of parameters of all units, of which each is the sharded one; an optimizer that is kept is not looked into."""
    model = built("list")
    model.groups = [{"params": [p for p in model.parameters() if p.ndim > 1]}]
    model.optimizer = torch.optim.SGD(model.parameters())
    model.watched = weakref.ref(model[0].weight)
    with fake_world(2):
        shard_model(model)
    assert all(isinstance(param, DTensor) for param in model.groups[0]["params"])
    assert not any(isinstance(param, DTensor) for param in model.optimizer.param_groups[0]["params"])


def test_recurrent_modules_keep_their_own_list() -> None:
    model = nn.Sequential(nn.LSTM(4, 4), nn.Linear(4, 4))
    with fake_world(2):
        shard_model(model)
    assert [id(each) for each in model[0]._flat_weights] == [id(each) for each in model[0].parameters()]


def as_key(model: nn.Module) -> None:
    model[1].names = {model[1].a.weight: "a"}


def as_method(model: nn.Module) -> None:
    model[1].transpose = model[1].a.weight.t


def as_view(model: nn.Module) -> None:
    model[1].flat = [model[1].a.weight.view(-1)]


def as_buffer(model: nn.Module) -> None:
    model[1].register_buffer("copy", model[1].a.weight.detach())


@pytest.mark.parametrize(
    ("hold", "parts"),
    [
        (as_key, ["a key of 1.names: is the parameter 1.a.weight, and cannot be replaced", "an attribute, a list"]),
        (as_method, ["1.transpose.__self__: is the parameter 1.a.weight"]),
        (as_view, ["1.flat[0]: shares the memory of the parameter 1.a.weight", "clone it"]),
        (as_buffer, ["1.copy: shares the memory of the parameter 1.a.weight"]),
    ],
)
def test_what_cannot_follow_is_refused(hold: Callable[[nn.Module], None], parts: list[str]) -> None:
    model = built("list")
    hold(model)
    with fake_world(2), refused(model, *parts):
        shard_model(model)
    with fake_world(2):
        shard_model(model, ignored_params=["1.a.weight"])


def test_spectral_norm_is_not_taken_for_a_view() -> None:
    """Its ``weight`` is ``weight_orig.data`` until the first forward computes it."""
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    with fake_world(2):
        shard_model(model)


class Frozenlike(nn.Module):
    """A teacher that is hidden in a list, so that it is neither trained nor saved."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(4, 4)
        self.teacher = [nn.Linear(4, 4)]

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x) - self.teacher[0](x)


@distributed(world_size=2)
def test_a_hidden_module_is_made_too() -> None:
    torch.manual_seed(0)
    plain = Frozenlike()
    torch.manual_seed(0)
    with init_on_meta():
        model = Frozenlike()
    materialize(shard_model(model))
    for (name, param), expected in zip(model.teacher[0].named_parameters(), plain.teacher[0].parameters(), strict=True):
        assert torch.equal(param, expected), name
    x = torch.ones(2, 4)
    assert torch.equal(model(x), plain(x))


def test_materialize_names_what_would_stay_on_meta() -> None:
    with torch.device("meta"):
        model = Frozenlike()
    with fake_world(2):
        shard_model(model)
        with pytest.raises(ShardkitError, match=r"teacher\[0\]\.weight \(an attribute\).* would stay uninitialized"):
            materialize(model)
    with init_on_meta():
        model = built("list")
    with fake_world(2), pytest.raises(ShardkitError, match=r"1\.held\[0\].*is a parameter that fully_shard has repl"):
        materialize(fully_shard(model))


class Importing(collections.OrderedDict):  # as transformers' tables of models
    def items(self) -> Any:
        raise AssertionError("would import all of them")


class Guarded:
    """As transformers' configurations, which refuse some attributes."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __getattribute__(self, name: str) -> Any:
        if name == "weight":
            raise AssertionError("not without asking")
        return super().__getattribute__(name)


def test_methods_of_what_is_held_are_not_called() -> None:
    model = nn.Linear(2, 2)
    model.table, model.config = Importing(), Guarded(model.bias)
    dict.__setitem__(model.table, "a", model.weight)
    held = held_tensors(model)
    assert [each.name for each in held] == ["table['a']", "config.weight"]
    for each in held:
        assert each.put is not None
        each.put(None)
    assert held_tensors(model) == []


@pytest.mark.parametrize("form", ["tuple", "closure"])
def test_a_plan_for_a_laptop_needs_no_look(form: str) -> None:
    model = built(form)
    plan = plan_model(model, mesh=MeshSpec.sharded(2))
    assert next(each.name for each in held_tensors(model)).startswith("1.held")
    with fake_world(2):
        apply_plan(model, plan)


def test_another_units_parameter_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = built("list")
    model.tied = [model[1].a.weight]
    with fake_world(2):
        shard_model(model)
    assert "tied[0]: holds parameters of another unit" in caplog.text
    assert "1.held" not in caplog.text
