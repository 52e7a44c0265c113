"""Manifests, directories and their rotation: what a checkpoint is, without its contents."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from shardkit.checkpoint import directory, load_checkpoint, manifest, save_checkpoint
from shardkit.checkpoint.manifest import FileEntry, Manifest
from shardkit.checkpoint.save import check_destination
from shardkit.errors import CheckpointError

# --- Manifest -------------------------------------------------------------------------------------------------------


def write_checkpoint(path: Path, contents: bytes = b"12345678", created: int = 1) -> Path:
    path.mkdir(parents=True)
    (path / "data").write_bytes(contents)
    files = {"data": manifest.entry_of(path / "data", sums={"weight": 2**64 - 1})}
    text = Manifest("safetensors", 4, [{"shape": [4]}], files, created=created).to_bytes()
    (path / manifest.NAME).write_bytes(text)
    return path


def test_a_manifest_comes_back(tmp_path):
    read = manifest.read_manifest(write_checkpoint(tmp_path / "a"))
    assert read.files == {"data": FileEntry(8, 8, 0x9AE0DAAF, {"weight": 2**64 - 1})}
    assert (read.format, read.world_size, read.created, read.torch) == ("safetensors", 4, 1, torch.__version__)


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path):
    file = write_checkpoint(tmp_path / "a") / manifest.NAME
    sound = file.read_bytes()
    for at in range(len(sound)):
        damaged = bytearray(sound)
        damaged[at] ^= 1 << at % 8
        file.write_bytes(damaged)
        if json_or_none(bytes(damaged)) != json_or_none(sound):  # one space for another character is no damage
            assert manifest.created_if_whole(file.parent) is None, f"byte {at}"


def json_or_none(text: bytes) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"[" * 100_000, b'{"digest": "x"}', b"\x80\x04"])
def test_what_is_no_manifest_is_one_error(text, tmp_path):
    (tmp_path / manifest.NAME).write_bytes(text)
    with pytest.raises(CheckpointError, match="is not a manifest"):
        manifest.read_manifest(tmp_path)


def test_missing_and_shortened_files_are_named(tmp_path):
    path = write_checkpoint(tmp_path / "a")
    found = manifest.read_manifest(path)
    (path / "data").write_bytes(b"123")
    with pytest.raises(CheckpointError, match=r"data \(3 bytes instead of 8\)"):
        manifest.check_sizes(path, found)
    (path / "data").unlink()
    with pytest.raises(CheckpointError, match=r"data \(no file instead of 8\)"):
        manifest.check_sizes(path, found)


# --- Directories ----------------------------------------------------------------------------------------------------


def listing(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def write_temporary(path: Path, token: str) -> Path:
    temporary = directory.sibling_path(path, "tmp", token)
    directory.lock_of(path, token).touch()
    temporary.mkdir(parents=True)
    (temporary / "data").write_bytes(b"new")
    return temporary


def test_a_commit_leaves_the_new_checkpoint_alone(tmp_path):
    token = directory.new_token()
    write_temporary(tmp_path / "a", token)
    directory.commit(tmp_path / "a", token)
    assert listing(tmp_path) == ["a"]
    write_temporary(tmp_path / "a", other := directory.new_token())
    (tmp_path / "a" / "old").touch()
    with pytest.raises(OSError, match="not empty"):
        directory.commit(tmp_path / "a", other)
    directory.commit(tmp_path / "a", other, replace=True)
    directory.finish_deletions()
    assert listing(tmp_path) == ["a"]
    assert listing(tmp_path / "a") == ["data"]


def test_killed_between_the_renames_the_old_one_is_found_and_put_back(tmp_path):
    path = write_checkpoint(tmp_path / "a")
    token = directory.new_token()
    write_temporary(path, token)
    os.rename(path, directory.sibling_path(path, "old", token))
    assert manifest.created_if_whole(directory.find(path)) == 1
    directory.clear_stale(tmp_path)
    assert listing(tmp_path) == ["a"]
    assert manifest.created_if_whole(path) == 1


def test_a_failed_rename_puts_the_old_one_back(tmp_path, monkeypatch):
    path = write_checkpoint(tmp_path / "a")
    token = directory.new_token()
    temporary = write_temporary(path, token)

    def rename(source: Path, target: Path) -> None:
        if source == temporary:
            raise OSError("no")
        original(source, target)

    original = os.rename
    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="no"):
        directory.commit(path, token, replace=True)
    assert manifest.created_if_whole(path) == 1


def test_only_what_no_process_holds_is_cleared(tmp_path):
    held, dead = directory.new_token(), directory.new_token()
    write_temporary(tmp_path / "a", held)
    write_temporary(tmp_path / "b", dead)
    (tmp_path / ".other.tmp-mine").mkdir()
    with directory.locked(directory.lock_of(tmp_path / "a", held)):
        directory.clear_stale(tmp_path)
        assert listing(tmp_path) == [f".a.tmp-{held}", f".a.tmp-{held}.lock", ".other.tmp-mine"]
    directory.clear_stale(tmp_path)
    assert listing(tmp_path) == [".other.tmp-mine"]


def test_no_descriptor_is_left_open_where_a_lock_fails(tmp_path, monkeypatch):
    (tmp_path / "lock").touch()
    monkeypatch.setattr(os, "stat", mock.Mock(side_effect=PermissionError))
    before = os.listdir("/dev/fd")
    with pytest.raises(PermissionError), directory.locked(tmp_path / "lock", create=True):
        pass
    assert os.listdir("/dev/fd") == before


def test_where_files_cannot_be_locked_nothing_is_cleared_or_rotated(tmp_path, monkeypatch):
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    write_temporary(tmp_path / "a", directory.new_token())
    steps = [write_checkpoint(tmp_path / f"step-{n}", created=n) for n in range(3)]
    directory.clear_stale(tmp_path)
    directory.rotate(steps[2], keep=1)
    assert len(listing(tmp_path)) == 5


def test_a_missing_checkpoint_is_said_with_what_is_there(tmp_path):
    write_checkpoint(tmp_path / "step-1")
    with pytest.raises(CheckpointError, match=r"step-2 does not exist\. Beside it are step-1"):
        directory.find(tmp_path / "step-2")
    with pytest.raises(CheckpointError, match="is empty or does not exist"):
        directory.find(tmp_path / "no" / "step-2")


# --- Rotation -------------------------------------------------------------------------------------------------------


def test_the_latest_is_the_last_that_was_complete_and_is_whole(tmp_path):
    assert directory.latest_checkpoint(tmp_path / "no") is None
    assert directory.latest_checkpoint(tmp_path) is None
    write_checkpoint(tmp_path / "step-10", created=1)
    newest = write_checkpoint(tmp_path / "step-9", created=3)
    broken = write_checkpoint(tmp_path / "step-11", created=4)
    (broken / "data").write_bytes(b"")
    (tmp_path / "step-12").mkdir()
    write_checkpoint(tmp_path / ".step-13.tmp-0123456789abcdef", created=5)
    assert directory.latest_checkpoint(str(tmp_path)) == newest


def test_rotation_keeps_the_newest_of_the_family_and_everything_else(tmp_path):
    steps = [write_checkpoint(tmp_path / f"step-{n}", created=n) for n in range(5)]
    write_checkpoint(tmp_path / "best", created=0)
    (steps[3] / "data").write_bytes(b"")  # damaged: neither counted nor deleted
    (tmp_path / "step-99").mkdir()
    directory.rotate(steps[4], keep=2)
    assert listing(tmp_path) == ["best", "step-2", "step-3", "step-4", "step-99"]
    for keep in (2, 3, 10):  # there are fewer, and none is deleted
        directory.rotate(steps[4], keep=keep)
        assert len(listing(tmp_path)) == 5


def test_rotation_never_deletes_the_new_one_nor_one_that_is_being_loaded(tmp_path):
    steps = [write_checkpoint(tmp_path / f"step-{n}", created=n) for n in range(3)]
    with directory.locked(steps[1] / manifest.NAME):
        directory.rotate(steps[0], keep=1)  # a clock that went back: steps 1 and 2 look newer
        assert listing(tmp_path) == ["step-0", "step-1", "step-2"]
        directory.rotate(steps[2], keep=1)
        assert listing(tmp_path) == ["step-1", "step-2"]
    directory.rotate(steps[2], keep=1)
    assert listing(tmp_path) == ["step-2"]


def test_rotation_leaves_what_has_other_files_and_links(tmp_path):
    steps = [write_checkpoint(tmp_path / f"step-{n}", created=n) for n in range(4)]
    (steps[0] / "notes.txt").write_text("mine")
    os.rename(steps[1], tmp_path / "archive")
    steps[1].symlink_to(tmp_path / "archive")
    directory.rotate(steps[3], keep=1)
    assert listing(tmp_path) == ["archive", "step-0", "step-1", "step-3"]
    assert listing(steps[0]) == ["data", "manifest.json", "notes.txt"]
    assert listing(steps[1]) == ["data", "manifest.json"]


def test_killed_while_a_checkpoint_is_deleted_the_next_save_goes_on(tmp_path):
    path = write_checkpoint(tmp_path / "step-1")
    (path / "data").unlink()
    os.rename(path, directory.sibling_path(path, "gone", directory.new_token()))
    directory.sibling_path(path, "gone", directory.new_token()).symlink_to(write_checkpoint(tmp_path / "archive"))
    directory.clear_stale(tmp_path)
    assert listing(tmp_path) == ["archive"]
    assert listing(tmp_path / "archive") == ["data", "manifest.json"]


def test_a_pipe_with_the_name_of_a_manifest_hangs_nothing(tmp_path):
    os.mkfifo(tmp_path / manifest.NAME)
    assert manifest.created_if_whole(tmp_path) is None
    with pytest.raises(CheckpointError, match="holds manifest"):
        load_checkpoint(tmp_path, torch.nn.Linear(2, 2))


@pytest.mark.parametrize("keep", [0, -1, 1.5, True])
def test_keep_counts_checkpoints(keep):
    with pytest.raises(CheckpointError, match="keep must be"):
        check_destination(Path("a"), "safetensors", False, keep)


def test_a_model_on_meta_is_told_to_materialize(tmp_path):
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"on the meta device.*shardkit\.materialize\(model\), or"):
        save_checkpoint(tmp_path / "step-1", model)
    assert not list(tmp_path.iterdir())
