"""From a path to tensors: files, indexes, directories, the hub's cache; and what tries to lead elsewhere."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from shardkit.checkpoint import load_checkpoint
from shardkit.checkpoint.format import locate
from shardkit.errors import CheckpointError

ONE = {"a": torch.ones(2)}


def put(path: Path, tensors=ONE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    return path


def index_of(directory: Path, places: object, name: str = "model") -> Path:
    path = directory / f"{name}.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 8}, "weight_map": places}))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        locate(path)
    return str(caught.value)


def test_a_directory_is_looked_through_in_order(tmp_path):
    put(tmp_path / "other.safetensors", {"other": torch.ones(1)})
    assert set(locate(tmp_path)) == {"other"}
    put(tmp_path / "second.safetensors", {"second": torch.ones(1)})
    assert "has other.safetensors, second.safetensors, and not one index" in refusal(tmp_path)
    index_of(tmp_path, {"second": "second.safetensors"}, name="any")
    assert set(locate(tmp_path)) == {"second"}
    index_of(tmp_path, {"other": "other.safetensors"}, name="model")
    assert set(locate(tmp_path)) == {"other"}
    put(tmp_path / "model.safetensors")
    assert set(locate(tmp_path)) == {"a"}
    assert set(locate(str(tmp_path / "any.safetensors.index.json"))) == {"second"}


def test_what_is_not_there(tmp_path):
    assert "nowhere cannot be read: [Errno 2] No such file" in refusal(tmp_path / "nowhere")
    assert "it has no files" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    assert "it has pytorch_model.bin, and not one index" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert "is not a regular file" in refusal(tmp_path / "pipe.safetensors")  # and nobody waits for a writer
    torch.save(ONE, tmp_path / "renamed.safetensors")
    assert "is not a safetensors file" in refusal(tmp_path / "renamed.safetensors")


def test_the_hubs_cache_links_to_its_blobs(tmp_path):
    blob = put(tmp_path / "models--me--it" / "blobs" / "0123abcd")
    snapshot = tmp_path / "models--me--it" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "model-00001-of-00001.safetensors").symlink_to(os.path.relpath(blob, snapshot))
    index_of(snapshot, {"a": "model-00001-of-00001.safetensors"})
    assert set(locate(snapshot)) == {"a"}


@pytest.mark.parametrize("name", ["../secret.safetensors", "sub/../../secret.safetensors", "..", "", ".", "a\0b", "/"])
def test_an_index_names_files_beside_it_only(name, tmp_path):
    put(tmp_path / "secret.safetensors")
    (tmp_path / "model" / "sub").mkdir(parents=True)
    found = refusal(index_of(tmp_path / "model", {"a": name}))
    assert "leads out of the directory" in found or "is not a regular file" in found or "null byte" in found
    assert "leads out" in refusal(index_of(tmp_path / "model", {"a": str(tmp_path / "secret.safetensors")}))


def test_links_out_of_the_directory_are_refused(tmp_path):
    secret = put(tmp_path / "secret.safetensors")
    inside = put(tmp_path / "model" / "real.safetensors")
    for target in (secret, Path("..") / "secret.safetensors"):
        link = tmp_path / "model" / "link.safetensors"
        link.symlink_to(target)
        found = refusal(index_of(tmp_path / "model", {"a": link.name}))
        assert f"'link.safetensors' leads out of the directory, to {secret}" in found
        link.unlink()
    (tmp_path / "model" / "link.safetensors").symlink_to(inside)
    assert set(locate(tmp_path / "model")) == {"a"}
    # What the user names is meant.
    (tmp_path / "mine.safetensors").symlink_to(secret)
    assert set(locate(tmp_path / "mine.safetensors")) == {"a"}
    (tmp_path / "models").symlink_to(tmp_path / "model")
    assert set(locate(tmp_path / "models")) == {"a"}


def test_an_index_and_its_files_must_agree(tmp_path):
    put(tmp_path / "one.safetensors")
    index = index_of(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"})
    assert "lists tensors that the files do not have: b (one.safetensors)" in refusal(index)
    assert "No such file" in refusal(index_of(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}))


@pytest.mark.parametrize(
    "text",
    [
        "", "[", "[]", "{}", "1", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": ["b"]}}',
        '{"weight_map": NaN}', "[" * 100_000, "\ufeff{}",
    ],
)  # fmt: skip
def test_what_is_no_index_is_refused(text, tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    assert refusal(index).startswith(f"{index} cannot be read: ")


@given(st.binary(max_size=60) | st.binary(max_size=40).map(lambda data: len(data).to_bytes(8, "little") + data))
def test_any_bytes_are_a_file_or_one_clear_error(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:  # of a file that is one, that it lacks the tensor
        load_checkpoint(path, torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.zeros(1))}))
    assert str(caught.value).startswith(str(path))


def test_links_in_a_circle_and_names_that_no_system_takes(tmp_path):
    (tmp_path / "round.safetensors").symlink_to("round.safetensors")
    assert "round" in refusal(index_of(tmp_path, {"a": "round.safetensors"}))
    assert "cannot be read" in refusal(index_of(tmp_path, {"a": "x" * 300 + ".safetensors"}))
    assert "cannot be read" in refusal(Path("a\0b"))
