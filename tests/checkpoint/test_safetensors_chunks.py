"""Parts of tensors as runs of bytes: against slices of the whole."""

from __future__ import annotations

import math
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardkit.checkpoint import chunks
from shardkit.checkpoint.chunks import inside, opened, raw, read_all, write_all
from shardkit.checkpoint.format import Entry, Located, read_parts


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
