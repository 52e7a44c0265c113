"""Manifests, directories and their rotation: what a checkpoint is, without its contents."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from shardkit.checkpoint import directory, load_checkpoint
from shardkit.checkpoint.directory import FileEntry, Manifest
from shardkit.checkpoint.save import check_destination
from shardkit.errors import CheckpointError

# --- Manifest -------------------------------------------------------------------------------------------------------


def write_checkpoint(path: Path, contents: bytes = b"12345678", created: int = 1) -> Path:
    path.mkdir(parents=True)
    (path / "data").write_bytes(contents)
    size = len(contents)
    files = {"data": FileEntry(size, size, directory.crc32_of(path / "data", size), {"weight": 2**64 - 1})}
    text = Manifest("safetensors", 4, files, created=created).to_bytes()
    (path / directory.NAME).write_bytes(text)
    return path


def test_a_manifest_comes_back(tmp_path):
    read = directory.read_manifest(write_checkpoint(tmp_path / "a"))
    assert read.files == {"data": FileEntry(8, 8, 0x9AE0DAAF, {"weight": 2**64 - 1})}
    assert (read.format, read.world_size, read.created, read.torch) == ("safetensors", 4, 1, torch.__version__)


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path):
    file = write_checkpoint(tmp_path / "a") / directory.NAME
    sound = file.read_bytes()
    for at in range(len(sound)):
        damaged = bytearray(sound)
        damaged[at] ^= 1 << at % 8
        file.write_bytes(damaged)
        if json_or_none(bytes(damaged)) != json_or_none(sound):  # one space for another character is no damage
            assert directory.latest_checkpoint(tmp_path) is None, f"byte {at}"


def json_or_none(text: bytes) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"[" * 100_000, b'{"digest": "x"}', b"\x80\x04"])
def test_what_is_no_manifest_is_one_error(text, tmp_path):
    (tmp_path / directory.NAME).write_bytes(text)
    with pytest.raises(CheckpointError, match="is not a manifest"):
        directory.read_manifest(tmp_path)


# --- Directories ----------------------------------------------------------------------------------------------------


def listing(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def write_temporary(path: Path, token: int = 1) -> Path:
    temporary = directory.sibling_path(path, "tmp", token)
    temporary.mkdir(parents=True)
    (temporary / "data").write_bytes(b"new")
    return temporary


def test_a_commit_leaves_the_new_checkpoint_alone(tmp_path):
    write_temporary(tmp_path / "a", 1)
    directory.commit(tmp_path / "a", 1)
    assert listing(tmp_path) == ["a"]
    write_temporary(tmp_path / "a", 2)
    (tmp_path / "a" / "old").touch()
    with pytest.raises(OSError, match="not empty"):
        directory.commit(tmp_path / "a", 2)
    directory.commit(tmp_path / "a", 2, replace=True)
    directory.finish_deletions()
    assert listing(tmp_path) == ["a"]
    assert listing(tmp_path / "a") == ["data"]


def test_killed_between_the_renames_the_old_one_is_found_and_put_back(tmp_path):
    path = write_checkpoint(tmp_path / "a")
    write_temporary(path)
    os.rename(path, directory.sibling_path(path, "old", 1))
    assert directory.read_manifest(directory.find(path)).created == 1
    directory.clear_stale(path, token=2)
    assert listing(tmp_path) == ["a"]
    assert directory.latest_checkpoint(tmp_path) == path


def test_a_failed_rename_puts_the_old_one_back(tmp_path, monkeypatch):
    path = write_checkpoint(tmp_path / "a")
    temporary = write_temporary(path)

    def rename(source: Path, target: Path) -> None:
        if source == temporary:
            raise OSError("no")
        original(source, target)

    original = os.rename
    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="no"):
        directory.commit(path, 1, replace=True)
    assert directory.latest_checkpoint(tmp_path) == path


def test_leftovers_are_cleared_but_not_what_another_save_may_be_writing(tmp_path, monkeypatch):
    for name in "ab":
        write_temporary(tmp_path / name, 1)
        directory.sibling_path(tmp_path / name, "gone", 2).symlink_to(write_checkpoint(tmp_path / f"archive-{name}"))
    own = write_temporary(tmp_path / "a", 3)
    (tmp_path / ".other.tmp-mine").mkdir()
    archives = ["archive-a", "archive-b"]
    directory.clear_stale(tmp_path / "a", token=3)
    assert listing(tmp_path) == sorted([own.name, f".b.tmp-{1:016x}", ".other.tmp-mine", *archives])
    day_after = directory.time.time() + 100_000
    monkeypatch.setattr(directory.time, "time", lambda: day_after)
    directory.clear_stale(tmp_path / "a", token=3)
    assert listing(tmp_path) == sorted([own.name, ".other.tmp-mine", *archives])
    assert listing(tmp_path / "archive-a") == ["data", "manifest.json"]


def test_a_missing_checkpoint_is_said(tmp_path):
    with pytest.raises(CheckpointError, match=r"step-2 does not exist\. Pass the path of a checkpoint, or latest_"):
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


def test_rotation_never_deletes_the_new_one(tmp_path):
    steps = [write_checkpoint(tmp_path / f"step-{n}", created=n) for n in range(3)]
    directory.rotate(steps[0], keep=1)  # a clock that went back: steps 1 and 2 look newer
    assert listing(tmp_path) == ["step-0", "step-2"]


def test_rotation_leaves_what_has_other_files_and_links(tmp_path):
    steps = [write_checkpoint(tmp_path / f"step-{n}", created=n) for n in range(4)]
    (steps[0] / "notes.txt").write_text("mine")
    os.rename(steps[1], tmp_path / "archive")
    steps[1].symlink_to(tmp_path / "archive")
    directory.rotate(steps[3], keep=1)
    assert listing(tmp_path) == ["archive", "step-0", "step-1", "step-3"]
    assert listing(steps[0]) == ["data", "manifest.json", "notes.txt"]
    assert listing(steps[1]) == ["data", "manifest.json"]


def test_a_pipe_with_the_name_of_a_manifest_hangs_nothing(tmp_path):
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / directory.NAME)
    assert directory.latest_checkpoint(tmp_path) is None
    with pytest.raises(CheckpointError, match="holds manifest"):
        load_checkpoint(tmp_path / "a", torch.nn.Linear(2, 2))


@pytest.mark.parametrize("keep", [0, -1, 1.5, True])
def test_keep_counts_checkpoints(keep):
    with pytest.raises(CheckpointError, match="keep must be"):
        check_destination(Path("a"), "safetensors", False, keep)
