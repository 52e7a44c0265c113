"""Checkpoints that someone made or changed on purpose: one CheckpointError, nothing run, the model
unchanged.
"""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

from shardkit.checkpoint import convert_checkpoint, load_checkpoint, save_checkpoint
from shardkit.errors import CheckpointError


class Runs:
    """Pickled code, that leaves a mark."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def net():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 4)


def refused(path, match=None):
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=match):
        load_checkpoint(path, model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def dcp_directory(path):
    dcp.save({"model": dict(net().state_dict())}, checkpoint_id=path, no_dist=True)
    return path


def change_metadata(path, change):
    found = pickle.loads((path / ".metadata").read_bytes())
    (path / ".metadata").write_bytes(pickle.dumps(change(found) or found))


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_code_in_the_metadata_of_dcp_never_runs(tmp_path):
    path, mark = dcp_directory(tmp_path / "a"), tmp_path / "mark"
    load_checkpoint(path, net())
    whole = (path / ".metadata").read_bytes()
    for place in (
        lambda found: found.__setattr__("planner_data", Runs(mark)),
        lambda _: Runs(mark),
    ):
        (path / ".metadata").write_bytes(whole)
        change_metadata(path, place)
        refused(path, r"\.metadata has a pickled (os|posix)\.mkdir.*weights_only=False")
        with pytest.raises(CheckpointError, match="weights_only=False"):
            convert_checkpoint(path, tmp_path / "full.pt")
        assert not mark.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_what_is_pickled_beside_tensors_is_not_read(tmp_path):
    tree = {"model": dict(net().state_dict()), "seen": Path("x")}
    dcp.save(tree, checkpoint_id=tmp_path / "a", no_dist=True)
    load_checkpoint(tmp_path / "a", net())
    torch.save({"model": net().state_dict(), "run": Runs(tmp_path / "mark")}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "weights_only=False")
    assert not (tmp_path / "mark").exists()


def cut_off(found):
    for info in found.storage_data.values():
        info.length = 1 << 50


def nowhere(found):
    del found.storage_data[MetadataIndex("model.weight", torch.Size([0, 0]))]


@pytest.mark.filterwarnings("ignore:torch.distributed")
@pytest.mark.parametrize(
    "change",
    [
        cut_off,
        nowhere,
        lambda found: found.__setattr__("planner_data", {"model.weight": 4}),
        lambda _: [1],
    ],
)
def test_metadata_that_does_not_fit_is_one_error(change, tmp_path):
    path = dcp_directory(tmp_path / "a")
    change_metadata(path, change)
    refused(path, r"cannot be read|is damaged|has no file of the name")


@pytest.mark.filterwarnings("ignore:torch.distributed")
@pytest.mark.parametrize("name", ["../b/__0_0.distcp", "/etc/passwd"])
def test_metadata_that_leads_out_of_the_directory_is_refused(name, tmp_path):
    path = dcp_directory(tmp_path / "a")

    def lead_out(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = name
        return metadata

    change_metadata(path, lead_out)
    refused(path, "leads out of the directory")


# ---- manifests -----------------------------------------------------------------------------------


def rewrite(path, change):
    """Change a manifest, and its digest with it."""
    body = json.loads((path / "manifest.json").read_bytes())
    change(body)
    (path / "manifest.json").write_text(json.dumps(body))


def put(*keys, value):
    def change(body):
        for key in keys[:-1]:
            body = body[key]
        body[keys[-1]] = value

    return change


CHANGES = {
    "parent": put("files", "../b", value=[3, 0]),
    "absolute": put("files", "/etc/passwd", value=[3, 0]),
    "entry": put("files", "state.pt", value=7),
    "negative": put("files", "state.pt", value=[-1, 0]),
    "other-sum": put("files", "model.safetensors", value=[224, 1]),
    "version": put("shardkit_checkpoint", value="1"),
    "no-state": lambda body: body["files"].pop("state.pt"),
    "no-model": lambda body: body["files"].pop("model.safetensors"),
    "list": put("files", value=[]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_manifest_that_was_changed_is_one_error(name, tmp_path):
    save_checkpoint(tmp_path / "a", net(), extra={"t": torch.ones(2)})
    load_checkpoint(tmp_path / "a", net())
    rewrite(tmp_path / "a", CHANGES[name])
    refused(tmp_path / "a")


def test_a_file_that_is_a_link_is_not_read(tmp_path):
    save_checkpoint(tmp_path / "a", net())
    os.rename(tmp_path / "a" / "model.safetensors", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", tmp_path / "a" / "model.safetensors")
    refused(tmp_path / "a", r"model\.safetensors is not a file of")
