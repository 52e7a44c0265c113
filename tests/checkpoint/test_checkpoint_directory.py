"""Manifests, directories and their rotation: what a checkpoint is, without its contents."""

import json
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch

from shardkit.checkpoint import (
    convert_checkpoint,
    directory,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from shardkit.errors import CheckpointError

# --- Manifest -------------------------------------------------------------------------------------


def write_checkpoint(path, contents=b"12345678", created=1):
    path.mkdir(parents=True)
    (path / "data").write_bytes(contents)
    files = {"data": [len(contents), 2**64 - 1]}
    manifest = {"shardkit_checkpoint": 3, "created": created, "world_size": 4, "files": files}
    (path / directory.MANIFEST).write_text(json.dumps(manifest))
    return path


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b"[" * 100_000, b'{"digest": "x"}', b"\x80\x04"]
)
def test_what_is_no_manifest_is_one_error(text, tmp_path):
    (tmp_path / directory.MANIFEST).write_bytes(text)
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        directory.read_manifest(tmp_path)


def test_no_flipped_bit_of_a_manifest_changes_what_a_load_returns(tmp_path):
    model = torch.nn.Linear(2, 2)
    save_checkpoint(tmp_path / "a", model, extra={"step": 1})
    weight, file = model.weight.clone(), tmp_path / "a" / directory.MANIFEST
    data = file.read_bytes()
    for at in range(0, len(data), 2):
        file.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 7]) + data[at + 1 :])
        try:
            extra = load_checkpoint(tmp_path / "a", model)
        except CheckpointError:
            continue
        assert extra == {"step": 1}
        assert torch.equal(model.weight, weight)


# --- Directories ----------------------------------------------------------------------------------


def listing(path):
    return sorted(os.listdir(path))


def write_temporary(path):
    temporary = directory.draft_of(path)
    temporary.mkdir(parents=True)
    (temporary / "data").write_bytes(b"new")
    return temporary


FILES = {"data": (3, 0)}


def test_a_commit_leaves_the_new_checkpoint_alone(tmp_path):
    for _ in range(2):
        write_temporary(tmp_path / "a")
        directory.commit(tmp_path / "a", FILES, 1)
        directory.clear(tmp_path / "a")
    assert listing(tmp_path) == ["a"]
    assert listing(tmp_path / "a") == ["data", "manifest.json"]


def test_killed_between_the_renames_the_usual_loop_goes_on_from_the_old_one(tmp_path):
    model, path = torch.nn.Linear(2, 2), tmp_path / "last"
    save_checkpoint(path, model, extra={"step": 1})
    os.rename(path, directory.replaced_of(path))
    assert latest_checkpoint(tmp_path) == path
    assert load_checkpoint(path, model) == {"step": 1}
    path.mkdir()  # as by a script that makes its directories first
    assert load_checkpoint(latest_checkpoint(tmp_path), model) == {"step": 1}
    with pytest.raises(CheckpointError, match="exists"):
        save_checkpoint(path, model)
    os.rename(path, directory.replaced_of(path))
    save_checkpoint(path, model, extra={"step": 2}, overwrite=True)
    assert load_checkpoint(path, model) == {"step": 2}
    assert listing(tmp_path) == ["last"]


def test_what_was_replaced_stays_while_something_else_is_in_its_place(tmp_path):
    path = write_checkpoint(tmp_path / "last")
    os.rename(path, directory.replaced_of(path))
    path.mkdir()
    (path / "notes").touch()
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        directory.prepare(path, True)
    assert listing(tmp_path) == [".last.old", "last"]


def test_a_deletion_that_was_killed_leaves_nothing_that_is_taken_for_a_checkpoint(
    tmp_path, monkeypatch
):
    path = write_checkpoint(tmp_path / "last", created=2)
    write_checkpoint(directory.replaced_of(path), created=1)

    def delete_one_file(place, **options):
        if place.is_dir():
            (place / "data").unlink()

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", delete_one_file)
        directory.clear(path)
    assert listing(tmp_path) == [".last.tmp", "last"]
    os.rename(path, tmp_path / "moved")
    assert latest_checkpoint(tmp_path) == tmp_path / "moved"
    directory.prepare(path, False)
    assert listing(tmp_path) == ["moved"]


def test_leftovers_of_killed_saves_are_cleared_before_anything_is_written(tmp_path):
    for name in ("step-1", "step-2", "best"):
        write_temporary(tmp_path / name)
    directory.prepare(tmp_path / "step-2", False)
    assert listing(tmp_path) == [".best.tmp", ".step-1.tmp"]


def test_what_cannot_be_deleted_after_a_commit_is_left_to_the_next_save(tmp_path):
    path = write_checkpoint(tmp_path / "last")
    write_checkpoint(directory.replaced_of(path))
    write_temporary(path)
    with mock.patch.object(shutil, "rmtree"):
        directory.clear(path)
    assert listing(tmp_path) == [".last.old", ".last.tmp", "last"]
    directory.clear(path)
    assert listing(tmp_path) == ["last"]


def test_a_damaged_checkpoint_is_replaced_on_request(tmp_path):
    path, model = write_checkpoint(tmp_path / "a"), torch.nn.Linear(2, 2)
    (path / "data").write_bytes(b"short")
    save_checkpoint(path, model, extra=1, overwrite=True)
    assert load_checkpoint(path, model) == 1
    (path / directory.MANIFEST).write_text("{")
    with pytest.raises(CheckpointError, match="delete it"):
        save_checkpoint(path, model, overwrite=True)


def test_a_directory_that_cannot_be_read_is_no_checkpoint(tmp_path):
    path, list_of = write_checkpoint(tmp_path / "a"), Path.iterdir
    (tmp_path / "lost+found").mkdir()

    def iterdir(place):
        if place.name == "lost+found":
            raise PermissionError(13, "Permission denied")
        return list_of(place)

    with mock.patch.object(Path, "iterdir", iterdir):
        assert latest_checkpoint(tmp_path) == path
        directory.rotate(path, 1)


def test_a_converted_file_is_on_the_disk_before_it_is_renamed(tmp_path):
    save_checkpoint(tmp_path / "a", torch.nn.Linear(2, 2))
    with mock.patch.object(os, "fsync", wraps=os.fsync) as fsync:
        convert_checkpoint(tmp_path / "a", tmp_path / "a.pt")
    assert fsync.call_count == 2  # the file, and the directory


def test_the_latest_may_be_of_another_version_and_its_load_says_so(tmp_path):
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    save_checkpoint(tmp_path / "step-9", other)
    manifest = tmp_path / "step-9" / directory.MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "shardkit_checkpoint": 9}))
    assert latest_checkpoint(tmp_path) == tmp_path / "step-9"
    with pytest.raises(CheckpointError, match=r"has version 9.*model\.safetensors"):
        load_checkpoint(latest_checkpoint(tmp_path), model)
    load_checkpoint(tmp_path / "step-9" / "model.safetensors", model)
    assert torch.equal(model.weight, other.weight)
    save_checkpoint(tmp_path / "step-10", model)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-10"
    save_checkpoint(tmp_path / "step-9", model, overwrite=True, keep=1)
    assert listing(tmp_path) == ["step-9"]
    load_checkpoint(tmp_path / "step-9", model)


def test_a_failed_rename_puts_the_old_one_back(tmp_path, monkeypatch):
    path = write_checkpoint(tmp_path / "a")
    temporary = write_temporary(path)

    def rename(source, target):
        if source == temporary:
            raise OSError("no")
        original(source, target)

    original = os.rename
    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="no"):
        directory.commit(path, FILES, 1)
    assert directory.latest_checkpoint(tmp_path) == path


def test_what_is_not_ours_is_not_replaced(tmp_path):
    path = write_checkpoint(tmp_path / "a")
    (path / "notes").mkdir()
    with pytest.raises(CheckpointError, match="has files that shardkit did not write: notes"):
        directory.prepare(path, True)


def test_a_missing_checkpoint_is_said(tmp_path):
    with pytest.raises(CheckpointError, match=r"step-2 does not exist"):
        directory.find(tmp_path / "no" / "step-2")


# --- Rotation -------------------------------------------------------------------------------------


def test_the_latest_is_the_last_that_was_complete_and_is_whole(tmp_path):
    assert directory.latest_checkpoint(tmp_path / "no") is None
    assert directory.latest_checkpoint(tmp_path) is None
    write_checkpoint(tmp_path / "step-10", created=1)
    newest = write_checkpoint(tmp_path / "step-9", created=3)
    broken = write_checkpoint(tmp_path / "step-11", created=4)
    (broken / "data").write_bytes(b"")
    (tmp_path / "step-12").mkdir()
    write_checkpoint(tmp_path / ".step-13.tmp", created=5)
    assert directory.latest_checkpoint(str(tmp_path)) == newest


def test_rotation_keeps_the_newest_of_the_family_and_everything_else(tmp_path):
    steps = [write_checkpoint(tmp_path / f"step-{n}", created=n) for n in range(5)]
    write_checkpoint(tmp_path / "best", created=0)
    (steps[3] / "data").write_bytes(b"")  # damaged: neither counted nor deleted
    (tmp_path / "step-99").mkdir()
    directory.rotate(steps[4], 2)
    assert listing(tmp_path) == ["best", "step-2", "step-3", "step-4", "step-99"]
    for keep in (2, 3, 10):  # there are fewer, and none is deleted
        directory.rotate(steps[4], keep)
        assert len(listing(tmp_path)) == 5


def test_rotation_never_deletes_the_new_one(tmp_path):
    steps = [write_checkpoint(tmp_path / f"step-{n}", created=n) for n in range(3)]
    directory.rotate(steps[0], 1)  # a clock that went back: steps 1 and 2 look newer
    assert listing(tmp_path) == ["step-0", "step-2"]


def test_rotation_leaves_what_has_other_files_and_links(tmp_path):
    steps = [write_checkpoint(tmp_path / f"step-{n}", created=n) for n in range(4)]
    (steps[0] / "notes.txt").write_text("mine")
    os.rename(steps[1], tmp_path / "archive")
    steps[1].symlink_to(tmp_path / "archive")
    directory.rotate(steps[3], 1)
    assert listing(tmp_path) == ["archive", "step-0", "step-1", "step-3"]
    assert listing(steps[0]) == ["data", "manifest.json", "notes.txt"]
    assert listing(steps[1]) == ["data", "manifest.json"]


def test_a_link_that_is_replaced_twice_leaves_what_it_points_to(tmp_path):
    model, link = torch.nn.Linear(2, 2), tmp_path / "latest"
    save_checkpoint(tmp_path / "step-1", model, extra=1)
    link.symlink_to("step-1")
    for step in (2, 3):
        save_checkpoint(link, model, extra=step, overwrite=True)
    assert load_checkpoint(tmp_path / "step-1", model) == 1
    assert load_checkpoint(link, model) == 3
    assert listing(tmp_path) == ["latest", "step-1"]


def test_a_pipe_with_the_name_of_a_manifest_hangs_nothing(tmp_path):
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / directory.MANIFEST)
    assert directory.latest_checkpoint(tmp_path) is None
    with pytest.raises(CheckpointError, match="files: manifest"):
        load_checkpoint(tmp_path / "a", torch.nn.Linear(2, 2))


@pytest.mark.parametrize("keep", [0, -1, 1.5, True])
def test_keep_counts_checkpoints(keep, tmp_path):
    with pytest.raises(CheckpointError, match="keep must be"):
        save_checkpoint(tmp_path / "a", torch.nn.Linear(2, 2), keep=keep)
