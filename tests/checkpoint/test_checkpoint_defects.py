"""What a review found in deletions, loads and conversions of checkpoints."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from shardkit.checkpoint import convert_checkpoint, directory, load_checkpoint, manifest, save_checkpoint
from shardkit.errors import CheckpointError


def linked_away(path: Path, link: Path) -> Path:
    """A checkpoint in an archive, with a link to it."""
    archived = path.parent / "archive" / "step-1"
    save_checkpoint(path, nn.Linear(2, 2))
    archived.parent.mkdir()
    shutil.move(path, archived)
    link.symlink_to(archived)
    return archived


def test_rotation_deletes_nothing_through_a_link(tmp_path):
    link = tmp_path / "step-1"
    archived = linked_away(link, link)
    before = sorted(os.listdir(archived))
    save_checkpoint(tmp_path / "step-2", nn.Linear(2, 2), keep=1)
    directory.finish_deletions()
    assert sorted(os.listdir(archived)) == before
    assert link.is_symlink()


def test_a_link_left_by_a_killed_rotation_goes_alone(tmp_path):
    link = directory.sibling_path(tmp_path / "step-1", "gone", directory.new_token())
    archived = linked_away(tmp_path / "step-1", link)
    before = sorted(os.listdir(archived))
    directory.clear_stale(tmp_path)
    assert sorted(os.listdir(archived)) == before
    assert sorted(os.listdir(tmp_path)) == ["archive"]


def test_a_manifest_that_cannot_be_read_fails_no_rotation(tmp_path, monkeypatch):
    def refuse(path: Path) -> set[str]:
        if ".gone-" in path.name:
            raise CheckpointError("somebody else deleted it")
        return written_files(path)

    written_files = manifest.written_files
    save_checkpoint(tmp_path / "step-1", nn.Linear(2, 2))
    monkeypatch.setattr(manifest, "written_files", refuse)
    save_checkpoint(tmp_path / "step-2", nn.Linear(2, 2), keep=1)
    directory.finish_deletions()
    assert directory.latest_checkpoint(tmp_path) == tmp_path / "step-2"


def test_what_is_partly_deleted_stays_hidden_until_the_rest_goes(tmp_path, monkeypatch):
    def refuse(file: Path) -> None:
        if file.suffix != ".safetensors":
            unlink(file)

    unlink = directory._unlink
    save_checkpoint(tmp_path / "step-1", nn.Linear(2, 2))
    (tmp_path / "step-1" / "notes.txt").write_text("mine")
    with monkeypatch.context() as patched:
        patched.setattr(directory, "_unlink", refuse)
        save_checkpoint(tmp_path / "step-2", nn.Linear(2, 2), keep=1)
        directory.finish_deletions()
    assert not (tmp_path / "step-1").exists()
    directory.clear_stale(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2"]
    assert sorted(os.listdir(tmp_path / "step-1")) == ["manifest.json", "notes.txt"]


def test_a_rotated_directory_with_other_files_is_saved_to_again(tmp_path):
    model = nn.Linear(2, 2)
    save_checkpoint(tmp_path / "step-1", model)
    (tmp_path / "step-1" / "notes.txt").write_text("mine")
    (tmp_path / "step-1" / "plots").mkdir()
    save_checkpoint(tmp_path / "step-2", model, keep=1)
    directory.finish_deletions()
    assert not (tmp_path / "step-1" / "model.safetensors").exists()
    assert directory.latest_checkpoint(tmp_path) == tmp_path / "step-2"
    with pytest.raises(CheckpointError, match=r"model\.safetensors \(no file"):
        load_checkpoint(tmp_path / "step-1", model)
    save_checkpoint(tmp_path / "step-1", model, extra=3)
    assert load_checkpoint(tmp_path / "step-1", model) == 3
    assert (tmp_path / "step-1" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "step-1" / "plots").is_dir()
    with pytest.raises(CheckpointError, match="exists"):
        save_checkpoint(tmp_path / "step-1", model)


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


def test_extra_state_that_a_key_map_knows_nothing_of_keeps_its_name(tmp_path):
    save_checkpoint(tmp_path / "a", Counting(3, "l"))
    model = Counting(0, "l")
    load_checkpoint(tmp_path / "a", model, key_map=lambda name: name if "l." in name else None)
    assert model.count == 3


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
        assert str(got) == str(memory)
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
