"""The header of a safetensors file, against the format's own package: what it writes, accepts and refuses."""

from __future__ import annotations

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
from safetensors.torch import save

from shardkit.checkpoint import chunks, format
from shardkit.checkpoint.chunks import inside, opened, raw, read_all, write_all
from shardkit.checkpoint.format import (
    DTYPES,
    MAX_HEADER,
    Entry,
    Located,
    Spec,
    build_file,
    lay_out,
    read_header,
    read_parts,
)
from shardkit.errors import CheckpointError

KINDS = st.sampled_from(sorted(DTYPES))
SHAPES = st.lists(st.integers(0, 4), max_size=3)


def ours(data: bytes) -> dict[str, Entry] | str:
    """What the reader makes of a file: its tensors, or the reason why not."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        try:
            return read_header(Path(file.name))
        except ValueError as error:
            return str(error)


def theirs(data: bytes) -> dict[str, tuple[str, list[int], bytes]] | str:
    """The same from the package: dtype, shape and bytes of each tensor."""
    try:
        return {name: (t["dtype"], t["shape"], bytes(t["data"])) for name, t in safetensors.deserialize(data)}
    except safetensors.SafetensorError as error:
        return str(error)


# ---- writing --------------------------------------------------------------------------------------------------


def filled(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    return values.to(dtype)


@given(
    st.dictionaries(
        st.text(max_size=8).filter(lambda name: name != "__metadata__"), st.tuples(KINDS, SHAPES), max_size=6
    )
)
@example({name: (name, [3]) for name in DTYPES})
def test_files_begin_as_the_package_writes_them(kinds):
    tensors = {name: filled(shape, DTYPES[kind]) for name, (kind, shape) in kinds.items()}
    expected = save(tensors, {"format": "pt"})
    file = build_file("a", {name: Spec(t.dtype, t.shape) for name, t in tensors.items()})
    head, entries = file.head, file.tensors
    assert head == expected[: len(head)]
    assert len(head) % 8 == 0
    assert all(entry.start % entry.dtype.itemsize == 0 for entry in entries.values())
    assert ours(expected) == entries


def test_a_header_that_is_too_long_is_refused(monkeypatch):
    assert MAX_HEADER == 100_000_000  # the package's own limit
    monkeypatch.setattr(format, "MAX_HEADER", 104)
    build_file("a", {"x": Spec(torch.float32, torch.Size([1]))})
    with pytest.raises(CheckpointError, match="at most 104 bytes"):
        build_file("a", {"x" * 30: Spec(torch.float32, torch.Size([1]))})


def test_files_are_filled_in_order_and_indexed_as_transformers_does():
    specs = {f"t{number}": Spec(torch.uint8, torch.Size([size])) for number, size in enumerate([4, 4, 9, 1, 0, 7, 2])}
    files = lay_out(specs, "model", 8)
    assert [sorted(file.tensors) for file in files[:-1]] == [["t0", "t1"], ["t2"], ["t3", "t4", "t5"], ["t6"]]
    index = json.loads(files[-1].head)
    assert files[-1].name == "model.safetensors.index.json"
    assert index["metadata"] == {"total_size": 27}
    assert list(index["weight_map"]) == list(specs)
    assert index["weight_map"]["t5"] == "model-00003-of-00004.safetensors"
    assert [file.name for file in lay_out({}, "a", 8)] == ["a.safetensors"]


# ---- reading what anyone wrote --------------------------------------------------------------------------------


def with_header(text: bytes, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + data


ROW_A = b'{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x10\x00", "its header claims 16 of 2 bytes"),
        ((1 << 63).to_bytes(8, "little") + b"{}", "at most 100,000,000 are allowed"),
        ((99_000_000).to_bytes(8, "little") + b"{}", "its header claims 99,000,000 of 10 bytes"),
        (with_header(b'{"\xff":1}'), "utf-8"),
        (with_header(b"[1]"), "not a JSON object"),
        (with_header(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nested too deeply"),
        (with_header(b'{"a":NaN}'), "has no dtype"),
        (
            with_header(b'{"a":' + ROW_A + b',"b":' + ROW_A + b"}", b"12"),
            "each tensor starts where the previous one ends",
        ),
        (with_header(b'{"a":' + ROW_A + b"}", b"123"), "its header describes"),
        (with_header(b'{"a":' + ROW_A.replace(b"0,2", b"1,3") + b"}", b"123"), "starts where the previous one"),
        (with_header(b'{"a":' + ROW_A.replace(b"U8", b"F4") + b"}", b"12"), "has the dtype 'F4'"),
        (with_header(b'{"a":' + ROW_A.replace(b"[2]", b"[-2]") + b"}", b"12"), "both must be lists of sizes"),
        (
            with_header(b'{"a":' + ROW_A.replace(b"[2]", b"[4611686018427387904,4611686018427387904]") + b"}", b"12"),
            "",
        ),
        (with_header(b'{"__metadata__":{"a":1}}'), "does not map names to strings"),
    ],
)
def test_what_is_no_safetensors_file_is_refused_with_its_reason(data, reason):
    assert isinstance(theirs(data), str)
    found = ours(data)
    assert isinstance(found, str), "accepted"
    assert reason in found


# Parts of tensors as runs of bytes: against slices of the whole.


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    box = []
    for size in shape:
        start = draw(st.integers(0, size))
        box.append((start, draw(st.integers(0, size - start))))
    return tuple(box), shape


def cut(whole: torch.Tensor, box) -> torch.Tensor:
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
        patch.setattr(chunks, "STAGE", 80)
        located = Located(path, Entry(torch.float32, torch.Size(shape), 4))
        read_parts([(located, (values, box))])
        read_parts([(located, (strided, box))])
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
