"""The header of a safetensors file, against the format's own package: what it writes, accepts and refuses."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from shardkit.checkpoint import format
from shardkit.checkpoint.format import (
    DTYPES,
    MAX_HEADER,
    NAMES,
    Entry,
    Spec,
    build_file,
    lay_out,
    read_header,
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


# Where this reader is stricter than the package.
STRICTER = ("has the dtype",)


def assert_agree(data: bytes) -> None:
    """Both refuse a file, or both see the same in it; what only this reader refuses, it refuses for a known reason."""
    mine, other = ours(data), theirs(data)
    if isinstance(mine, str):
        assert isinstance(other, str) or any(reason in mine for reason in STRICTER), (mine, other)
        return
    assert isinstance(other, dict), (mine, other)
    seen = {
        name: (NAMES[entry.dtype], list(entry.shape), data[entry.start : entry.start + entry.bytes])
        for name, entry in mine.items()
    }
    assert seen == other


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

NUMBERS = st.one_of(
    st.integers(0, 24),
    st.sampled_from([-1, 1 << 31, 1 << 62, 1 << 63, 1 << 64, 1 << 200, 1.0, 1e300, True, None, "4", [], {}]),
)
ROW = st.fixed_dictionaries(
    {"dtype": KINDS | st.sampled_from(["F4", "F8_E8M0", "f32", "", 1, None])},
    optional={
        "shape": st.lists(NUMBERS, max_size=3) | NUMBERS,
        "data_offsets": st.lists(NUMBERS, min_size=1, max_size=3) | st.tuples(NUMBERS, NUMBERS),
        "more": st.just([[1]]),
    },
)
META = (
    st.none() | st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2) | st.just({"a": 1}) | st.just([])
)


@st.composite
def tidy_headers(draw: st.DrawFn) -> dict[str, object]:
    """Rows that mostly follow each other without gaps."""
    table: dict[str, object] = {}
    end = 0
    for number, (kind, shape) in enumerate(draw(st.lists(st.tuples(KINDS, SHAPES), max_size=4))):
        start = end + draw(st.sampled_from([0, 0, 0, 0, 0, 0, 1, -1]))
        end = start + torch.Size(shape).numel() * DTYPES[kind].itemsize + draw(st.sampled_from([0, 0, 0, 0, 0, 0, 1]))
        table[f"t{number}"] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    return table


@given(
    st.dictionaries(st.text(max_size=4), ROW | NUMBERS, max_size=3) | tidy_headers(),
    st.none() | META.map(lambda meta: {"__metadata__": meta}),
    st.sampled_from(["", " ", "\n  ", "x", "{}"]),
    st.integers(-1, 1),
)
@settings(max_examples=300)
@example({"a": {"dtype": "F32", "shape": [1 << 62, 1 << 62, 4], "data_offsets": [0, 0]}}, None, "", 0)
@example({"a": {"dtype": "F32", "shape": [1 << 62, 0], "data_offsets": [0, 0]}}, None, "", 0)
def test_a_header_of_any_table_is_refused_where_the_package_refuses(table, meta, behind, extra):
    text = json.dumps({**(meta or {}), **table}).encode() + behind.encode()
    offsets = [row.get("data_offsets") for row in table.values() if isinstance(row, dict)]
    ends = [pair[-1] for pair in offsets if isinstance(pair, (list, tuple)) and pair and type(pair[-1]) is int]
    size = max([end for end in ends if 0 <= end < 1000], default=0)
    assert_agree(len(text).to_bytes(8, "little") + text + bytes(max(0, size + extra)))


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
        (with_header(b'{"__metadata__":{"a":1}}'), "does not map names to strings"),
    ],
)
def test_what_is_no_safetensors_file_is_refused_with_its_reason(data, reason):
    assert isinstance(theirs(data), str)
    found = ours(data)
    assert isinstance(found, str), "accepted"
    assert reason in found
