"""The header of a safetensors file, against the format's own package: what it writes, accepts and
refuses.
"""

import json
import math
import os
import tempfile
from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from shardkit.checkpoint import byte_ranges
from shardkit.checkpoint.byte_ranges import open_file as opened
from shardkit.checkpoint.byte_ranges import raw, read_all, read_parts, write_all
from shardkit.checkpoint.format import (
    DTYPES,
    Location,
    Spec,
    find_tensors,
    plan_files,
    read_header,
)
from shardkit.errors import CheckpointError
from shardkit.shards import inside

KINDS = st.sampled_from(sorted(DTYPES))
SHAPES = st.lists(st.integers(0, 4), max_size=3)


def ours(data):
    """What the reader makes of a file: its tensors, or the reason why not."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        try:
            return read_header(Path(file.name))
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"


def theirs(data):
    """The same from the package: dtype, shape and bytes of each tensor."""
    try:
        return {
            name: (t["dtype"], t["shape"], bytes(t["data"]))
            for name, t in safetensors.deserialize(data)
        }
    except safetensors.SafetensorError as error:
        return str(error)


# ---- writing -------------------------------------------------------------------------------------


def filled(shape, dtype):
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    return values.to(dtype)


@given(
    st.dictionaries(
        st.text(max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(KINDS, SHAPES),
        max_size=6,
    )
)
@example({name: (name, [3]) for name in DTYPES})
def test_files_begin_as_the_package_writes_them(kinds):
    tensors = {name: filled(shape, DTYPES[kind]) for name, (kind, shape) in kinds.items()}
    expected = save(tensors, {"format": "pt"})
    specs = {name: Spec(t.dtype, t.shape) for name, t in tensors.items()}
    ((_, head, _),), entries = plan_files(Path("a"), "a", specs)
    assert head == expected[: len(head)]
    assert len(head) % 8 == 0
    assert all(entry.start % entry.dtype.itemsize == 0 for entry in entries.values())
    assert {n: (e.dtype, e.shape, e.start) for n, e in ours(expected).items()} == {
        n: (e.dtype, e.shape, e.start) for n, e in entries.items()
    }


def test_files_are_filled_in_order_and_indexed_as_transformers_does():
    sizes = {"t0": 4, "t1": 4, "t2": 9, "t3": 1, "t4": 0, "t5": 7, "t6": 2}
    specs = {name: Spec(torch.uint8, torch.Size([size])) for name, size in sizes.items()}
    files, locations = plan_files(Path("a"), "model", specs, 8)
    shares = {}
    for name in sizes:
        file = locations[name].file
        shares[file] = shares.get(file, "") + name
    assert list(shares.values()) == ["t0t1", "t2", "t3t4t5", "t6"]
    index = json.loads(files[-1].header)
    assert files[-1].path.name == "model.safetensors.index.json"
    assert index["metadata"] == {"total_size": 27}
    assert list(index["weight_map"]) == list(specs)
    assert index["weight_map"]["t5"] == "model-00003-of-00004.safetensors"
    assert [file.path.name for file in plan_files(Path("a"), "a", {}, 8)[0]] == ["a.safetensors"]


# ---- reading what anyone wrote -------------------------------------------------------------------


def with_header(text, data=b""):
    return len(text).to_bytes(8, "little") + text + data


ROW_A = b'{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x10\x00", "its header claims 16 of 2 bytes"),
        ((1 << 63).to_bytes(8, "little") + b"{}", "its header claims"),
        ((99_000_000).to_bytes(8, "little") + b"{}", "its header claims 99,000,000 of 10 bytes"),
        (with_header(b'{"\xff":1}'), "utf-8"),
        (with_header(b"[1]"), "not a JSON object"),
        (with_header(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "recursion"),
        (with_header(b'{"a":NaN}'), "not subscriptable"),
        (
            with_header(b'{"a":' + ROW_A + b',"b":' + ROW_A + b"}", b"12"),
            "b of 2 bytes lies at [0, 2]",
        ),
        (with_header(b'{"a":' + ROW_A + b"}", b"123"), "its header describes"),
        (with_header(b'{"a":' + ROW_A.replace(b"0,2", b"1,3") + b"}", b"123"), "lies at [1, 3]"),
        (with_header(b'{"a":' + ROW_A.replace(b"U8", b"F4") + b"}", b"12"), "KeyError: 'F4'"),
        (with_header(b'{"a":' + ROW_A.replace(b"[2]", b"[-2]") + b"}", b"12"), "lies at"),
        (
            with_header(
                b'{"a":'
                + ROW_A.replace(b"[2]", b"[4611686018427387904,4611686018427387904]")
                + b"}",
                b"12",
            ),
            "",
        ),
    ],
)
def test_what_is_no_safetensors_file_is_refused_with_its_reason(data, reason):
    assert isinstance(theirs(data), str)
    found = ours(data)
    assert isinstance(found, str), "accepted"
    assert reason in found


# Parts of tensors as runs of bytes: against slices of the whole.


@st.composite
def boxes(draw):
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    box = []
    for size in shape:
        start = draw(st.integers(0, size))
        box.append((start, draw(st.integers(0, size - start))))
    return tuple(box), shape


def cut(whole, box):
    return inside(whole, tuple((0, size) for size in whole.shape), box)


@given(drawn=boxes(), kind=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_any_part_of_a_file_is_read(tmp_path_factory, drawn, kind):
    box, shape = drawn
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    path = tmp_path_factory.getbasetemp() / "part"
    path.write_bytes(b"head" + bytes(raw(whole)))
    expected = cut(whole, box)
    values = torch.full(expected.shape, -1, dtype=kind)
    strided = torch.full((*expected.shape, 2), -1, dtype=kind)[..., 0]
    small = pytest.MonkeyPatch()
    with small.context() as patch:
        patch.setattr(byte_ranges, "STAGE", 80)
        entry = Location(torch.float32, torch.Size(shape), path, 4)
        read_parts([(entry, (values, box))])
        read_parts([(entry, (strided, box))])
    assert torch.equal(values, expected.to(kind))
    assert torch.equal(strided, expected.to(kind))


def test_a_short_write_and_a_short_read_go_on(tmp_path, monkeypatch):
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:3], at))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:2]], at))
    data = bytes(range(100))
    with opened(tmp_path / "file", os.O_RDWR | os.O_CREAT) as descriptor:
        write_all(descriptor, memoryview(data), 5)
        back = bytearray(100)
        read_all(descriptor, memoryview(back), 5)
        assert back == data
        with pytest.raises(OSError, match="the file ends at byte 105, 1 too early"):
            read_all(descriptor, memoryview(bytearray(101)), 5)


# From a path to tensors: files, indexes, the hub's cache, and what tries to lead elsewhere.


ONE = {"a": torch.ones(2)}


def put(path, tensors=ONE):
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    return path


def index_of(directory, places, name="model"):
    path = directory / f"{name}.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 8}, "weight_map": places}))
    return path


def refusal(path):
    with pytest.raises(CheckpointError) as caught:
        find_tensors(path)
    return str(caught.value)


def test_a_directory_is_looked_through_in_order(tmp_path):
    put(tmp_path / "other.safetensors", {"other": torch.ones(1)})
    assert set(find_tensors(tmp_path)) == {"other"}
    put(tmp_path / "second.safetensors", {"second": torch.ones(1)})
    assert "it has other.safetensors, second.safetensors" in refusal(tmp_path)
    index_of(tmp_path, {"second": "second.safetensors"}, name="any")
    assert set(find_tensors(tmp_path)) == {"second"}
    index_of(tmp_path, {"other": "other.safetensors"}, name="model")
    assert set(find_tensors(tmp_path)) == {"other"}
    put(tmp_path / "model.safetensors")
    assert set(find_tensors(tmp_path)) == {"a"}
    assert set(find_tensors(Path(tmp_path / "any.safetensors.index.json"))) == {"second"}


def test_what_is_not_there(tmp_path):
    text = refusal(tmp_path / "nowhere")
    assert "nowhere is not a file" in text
    assert "Pass a safetensors file, a *.safetensors.index.json" in text
    assert "it has no files" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    assert "it has pytorch_model.bin" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe.safetensors")
    # and nobody waits for a writer
    assert "is not a file" in refusal(tmp_path / "pipe.safetensors")
    torch.save(ONE, tmp_path / "renamed.safetensors")
    assert "its header claims" in refusal(tmp_path / "renamed.safetensors")


def test_the_hubs_cache_links_to_its_blobs(tmp_path):
    blob = put(tmp_path / "models--me--it" / "blobs" / "0123abcd")
    snapshot = tmp_path / "models--me--it" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "model-00001-of-00001.safetensors").symlink_to(os.path.relpath(blob, snapshot))
    index_of(snapshot, {"a": "model-00001-of-00001.safetensors"})
    assert set(find_tensors(snapshot)) == {"a"}


def test_an_index_names_files_beside_it_only(tmp_path):
    secret = put(tmp_path / "secret.safetensors")
    (tmp_path / "model" / "sub").mkdir(parents=True)
    for name in ("../secret.safetensors", "sub/../../secret.safetensors", "..", ".", str(secret)):
        assert "leads out of the directory" in refusal(index_of(tmp_path / "model", {"a": name}))


def test_links_out_of_the_directory_are_refused(tmp_path):
    secret = put(tmp_path / "secret.safetensors")
    link = tmp_path / "model" / "link.safetensors"
    link.parent.mkdir()
    link.symlink_to(secret)
    index = index_of(link.parent, {"a": link.name})
    assert f"'link.safetensors' leads out of the directory, to {secret}" in refusal(index)
    link.unlink()
    link.symlink_to(put(tmp_path / "model" / "real.safetensors"))
    assert set(find_tensors(tmp_path / "model")) == {"a"}
    # What the user names is meant.
    (tmp_path / "mine.safetensors").symlink_to(secret)
    assert set(find_tensors(tmp_path / "mine.safetensors")) == {"a"}
    (tmp_path / "models").symlink_to(tmp_path / "model")
    assert set(find_tensors(tmp_path / "models")) == {"a"}


def test_an_index_and_its_files_must_agree(tmp_path):
    put(tmp_path / "one.safetensors")
    index = index_of(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"})
    assert "(KeyError: 'b')" in refusal(index)
    assert "is not a file" in refusal(
        index_of(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    )


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
    assert refusal(index).startswith(f"{index} cannot be read (")
