"""What a review found in deletions, loads and conversions of checkpoints."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from trees import assert_same

from shardkit.checkpoint import convert_checkpoint, load_checkpoint, save_checkpoint


class Counting(nn.Module):
    def __init__(self, count: int, name: str) -> None:
        super().__init__()
        self.count = count
        setattr(self, name, nn.Linear(2, 2))

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


def inside(count: int) -> nn.Module:
    return nn.ModuleDict({"inner": Counting(count, "l")})


@pytest.mark.parametrize(
    ("key_map", "build"),
    [(lambda name: f"inner.{name}", inside), ([("^", "inner.")], inside), (None, lambda count: Counting(count, "l"))],
)
def test_extra_state_goes_where_its_name_is_mapped_to(key_map, build, tmp_path):
    save_checkpoint(tmp_path / "a", Counting(3, "l"))
    model = build(0)
    load_checkpoint(tmp_path / "a", model, key_map=key_map)
    assert [m.count for m in model.modules() if isinstance(m, Counting)] == [3]


def test_extra_state_of_a_part_goes_before_that_of_the_whole(tmp_path):
    whole = Counting(3, "l")
    whole.inner = Counting(4, "l")
    save_checkpoint(tmp_path / "a", whole)
    part = Counting(0, "l")
    inner = "inner."
    load_checkpoint(tmp_path / "a", part, key_map=lambda n: n.removeprefix(inner) if n.startswith(inner) else None)
    assert part.count == 4


class Remembering(nn.Module):
    def __init__(self, memory: object) -> None:
        super().__init__()
        self.l, self.memory = nn.Linear(2, 2), memory

    def get_extra_state(self) -> object:
        return self.memory

    def set_extra_state(self, state: object) -> None:
        self.memory = state


@pytest.mark.parametrize("kind", ["shardkit", "dcp", "full", "nested"])
@pytest.mark.parametrize(
    "memory", [{"scale": torch.arange(3.0), "steps": [1, 2], "inner": {"count": 4}}, torch.arange(3.0), {}]
)
def test_extra_state_of_any_kind_comes_back_from_any_kind_of_checkpoint(memory, kind, tmp_path):
    model = nn.ModuleDict({"part": Remembering(memory)})
    path = tmp_path / "a"
    if kind == "dcp" and isinstance(memory, dict) and not memory:
        pytest.skip("torch's DCP does not save empty dicts")
    if kind == "shardkit":
        save_checkpoint(path, model)
    elif kind == "dcp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    else:
        path = tmp_path / "a.pt"
        torch.save(model.state_dict() if kind == "full" else {"model": model.state_dict()}, path)
    convert_checkpoint(path, tmp_path / "converted")
    for each in (path, tmp_path / "converted"):
        fresh = nn.ModuleDict({"part": Remembering(None if isinstance(memory, dict) else torch.ones(1))})
        load_checkpoint(each, fresh)
        got = fresh["part"].memory
        assert_same(got, memory)
        assert torch.equal(fresh["part"].l.weight, model["part"].l.weight)


def test_a_tensor_learning_rate_comes_back_from_a_file_of_torch_save(tmp_path):
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        return model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))

    model, optimizer = build()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "own", model, optimizer)
    convert_checkpoint(tmp_path / "own", tmp_path / "full.pt")
    convert_checkpoint(tmp_path / "full.pt", tmp_path / "dcp", to="dcp")
    convert_checkpoint(tmp_path / "full.pt", tmp_path / "again")
    for name in ("dcp", "again"):
        other, resumed = build()
        resumed.param_groups[0]["lr"] = torch.tensor(0.5)
        load_checkpoint(tmp_path / name, other, resumed)
        assert torch.equal(resumed.param_groups[0]["lr"], torch.tensor(0.01)), name
        assert torch.equal(resumed.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"]), name
