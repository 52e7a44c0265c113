"""Safetensors files written and read by 4 ranks at once: the very bytes that one process writes with the package."""

from __future__ import annotations

import errno
import json
import os
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save
from safetensors_kinds import (
    SHARDED,
    assert_holds,
    dtensor,
    mesh_of,
    same,
    sharded,
    tp_and_fsdp,
    value,
    whole_tensors,
    zeros_like,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from shardkit.checkpoint import read_tensors, write, write_tensors
from shardkit.checkpoint.transfer import Staging, opened
from shardkit.errors import CheckpointError
from shardkit.testing import distributed


def contiguous(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each.resolve_conj().contiguous() for name, each in tensors.items()}


def counted(seen: list[tuple[int, int]]) -> int:
    """Bytes that all ranks report together."""
    assert all(done <= total for done, total in seen)
    own = torch.tensor(seen[-1][0] if seen else 0)
    assert not seen or seen[-1][0] == seen[-1][1]
    dist.all_reduce(own)
    return int(own)


@pytest.mark.parametrize("how", SHARDED)
@distributed(world_size=4, backend="gloo")
def test_the_file_is_the_one_that_one_process_writes(how, tmp_path):
    whole = whole_tensors()
    tensors = sharded(whole, how)
    assert sum(isinstance(each, DTensor) for each in tensors.values()) > 10
    seen: list[tuple[int, int]] = []
    files = write_tensors(tmp_path, tensors, flush=True, progress=lambda *at: seen.append(at))
    expected = save(contiguous(whole), {"format": "pt"})
    assert [(file.name, file.bytes) for file in files] == [("model.safetensors", len(expected))]
    assert (tmp_path / "model.safetensors").read_bytes() == expected
    assert counted(seen) == len(expected) - len(files[0].head), "some bytes were written twice"
    for other in SHARDED:
        into = {name: zeros_like(each) for name, each in sharded(whole, other).items()}
        assert read_tensors(tmp_path, into) == ([], [])
        assert_holds(into, whole)


@distributed(world_size=4, backend="gloo")
def test_strided_shards_of_tensor_parallelism_and_fsdp(tmp_path):
    block, whole = tp_and_fsdp(seed=0)
    tensors = dict(block.named_parameters())
    assert any(hasattr(place, "split_factor") for each in tensors.values() for place in each.placements), "none strided"
    assert {each.device_mesh.ndim for each in tensors.values()} == {1, 2}, "one mesh only"
    seen: list[tuple[int, int]] = []
    write_tensors(tmp_path, tensors, progress=lambda *at: seen.append(at))
    assert (tmp_path / "model.safetensors").read_bytes() == save(whole, {"format": "pt"})
    assert counted(seen) == sum(each.nbytes for each in whole.values()), "replicas on another mesh wrote too"
    other, _ = tp_and_fsdp(seed=1)
    read_tensors(tmp_path / "model.safetensors", dict(other.named_parameters()))
    assert_holds(dict(other.named_parameters()), whole)


@distributed(world_size=4, backend="gloo")
def test_above_a_size_there_are_many_files_and_an_index(tmp_path):
    whole = whole_tensors()
    files = write_tensors(tmp_path, sharded(whole, "fsdp"), name="weights", max_shard_size=9000, metadata={"a": "b"})
    assert len(files) > 3
    assert sorted(os.listdir(tmp_path)) == sorted(file.name for file in files)
    assert all(file.bytes == (tmp_path / file.name).stat().st_size for file in files)
    found = {}
    for file in files[:-1]:
        tensors = load_file(tmp_path / file.name)
        assert set(file.tensors) == set(tensors)
        assert sum(each.nbytes for each in tensors.values()) <= 9000 or len(tensors) == 1
        found |= tensors
    assert all(same(found[name], each) for name, each in whole.items())
    index = json.loads((tmp_path / "weights.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in whole.values())
    into = {name: zeros_like(each) for name, each in sharded(whole, "hsdp").items()}
    read_tensors(tmp_path, into)
    assert_holds(into, whole)


@distributed(world_size=4, backend="gloo")
def test_each_rank_begins_with_a_file_of_its_own(tmp_path):
    tensors = sharded({name: torch.ones(4, 25) for name in "abcd"}, "fsdp")
    order: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "opened", lambda path, flags: order.append(path.name) or opened(path, flags))
        files = write_tensors(tmp_path, tensors, max_shard_size=400)
    own = order[-4:]  # the first rank made them all before
    assert own[0] == files[dist.get_rank()].name
    assert sorted(own) == [file.name for file in files[:-1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float64])
@distributed(world_size=4, backend="gloo")
def test_floats_are_converted_on_the_way(dtype, tmp_path):
    whole = {"w": value((7, 300), torch.float32, 0), "half": value((5,), torch.float16, 1), "ids": torch.arange(9)}
    write_tensors(tmp_path, sharded(whole, "fsdp"), dtype=dtype)
    found = load_file(tmp_path / "model.safetensors")
    assert all(same(found[name], each.to(dtype) if name != "ids" else each) for name, each in whole.items())
    into = {name: zeros_like(each) for name, each in sharded(whole, "hsdp").items()}
    with pytest.raises(CheckpointError, match="2 of a different shape or dtype"):
        read_tensors(tmp_path, into)
    read_tensors(tmp_path, into, cast=True)
    assert_holds(into, {name: each.to(dtype).to(each.dtype) for name, each in whole.items()})


@distributed(world_size=4, backend="gloo")
def test_ties_are_written_once_and_read_by_any_name(tmp_path):
    whole = {"embed": value((7, 2), torch.float32, 0)}
    tensor = sharded(whole, "fsdp")["embed"]
    files = write_tensors(tmp_path, {"embed": tensor, "head": tensor})
    assert list(files[0].tensors) == ["embed"]
    for names in (["head", "embed"], ["embed", "head"]):
        into = zeros_like(tensor)
        assert read_tensors(tmp_path, dict.fromkeys(names, into)) == ([], [])
        assert_holds({"embed": into}, whole)


@distributed(world_size=4, backend="gloo")
def test_no_values_travel_between_ranks(tmp_path):
    tensors = sharded(whole_tensors(), "fsdp")
    with CommDebugMode() as comms:
        write_tensors(tmp_path, tensors)
        read_tensors(tmp_path, {name: zeros_like(each) for name, each in tensors.items()})
    # Three agreements of a flag each, one digest of all names, and two more flags: whatever the number of tensors.
    assert comms.get_total_counts() <= 12, comms.get_comm_counts()


@distributed(world_size=4, backend="gloo")
def test_shards_are_written_from_and_read_to_where_they_lie(tmp_path):
    whole = {"a": value((7, 6), torch.float32, 0), "b": value((5,), torch.bfloat16, 1)}
    tensors = sharded(whole, "fsdp")
    into = {name: zeros_like(each) for name, each in tensors.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Staging, "take", lambda *_: pytest.fail("a copy was made"))
        write_tensors(tmp_path, tensors)
        read_tensors(tmp_path, into)
    assert_holds(into, whole)


@distributed(world_size=4, backend="gloo")
def test_plain_tensors_are_written_by_one_rank_of_the_world(tmp_path):
    seen: list[tuple[int, int]] = []
    whole = contiguous(whole_tensors())
    write_tensors(tmp_path, whole, progress=lambda *at: seen.append(at))
    assert (tmp_path / "model.safetensors").read_bytes() == save(whole, {"format": "pt"})
    assert bool(seen) == (dist.get_rank() == 0)


def test_a_process_alone_writes_and_reads(tmp_path):
    whole = whole_tensors()
    write_tensors(tmp_path, whole)
    assert (tmp_path / "model.safetensors").read_bytes() == save(contiguous(whole), {"format": "pt"})
    into = {name: zeros_like(each) for name, each in whole.items()}
    versions = {name: each._version for name, each in into.items()}
    read_tensors(tmp_path, into)
    assert_holds(into, whole)
    assert all(each._version > versions[name] for name, each in into.items()), "autograd would not notice"


# ---- what fails, fails on all ranks ---------------------------------------------------------------------------


@distributed(world_size=4, backend="gloo")
def test_what_safetensors_has_no_words_for_is_refused_by_name(tmp_path):
    mesh = mesh_of((4,))
    part = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    tensors = {
        "double": torch.ones(2, dtype=torch.complex128),
        "sparse": torch.eye(2).to_sparse(),
        "sum": part,
        "nowhere": torch.empty(2, device="meta"),
        "good": torch.ones(1),
    }
    with pytest.raises(CheckpointError) as caught:
        write_tensors(tmp_path, tensors)
    text = str(caught.value)
    assert "double (torch.complex128), sparse (torch.sparse_coo), sum (Partial" in text
    assert "nowhere (on the meta device" in text
    assert "good" not in text
    assert not os.listdir(tmp_path)


@distributed(world_size=4, backend="gloo")
def test_ranks_that_pass_different_tensors_are_told(tmp_path):
    mesh = mesh_of((4,))
    names = ["a", "b"] if dist.get_rank() != 2 else ["a", "c"]
    tensors = {name: dtensor(torch.ones(4), mesh, [Shard(0)]) for name in names}
    with pytest.raises(CheckpointError, match=r"rank 2 differs from rank 0 in tensors \(b: missing instead of"):
        write_tensors(tmp_path, tensors)
    assert not os.listdir(tmp_path)


@distributed(world_size=4, backend="gloo")
def test_a_file_that_is_there_is_never_overwritten(tmp_path):
    mesh = mesh_of((4,))
    if dist.get_rank() == 0:
        (tmp_path / "model.safetensors").write_text("old")
    with pytest.raises(CheckpointError, match="rank 0: FileExistsError"):
        write_tensors(tmp_path, {"a": dtensor(torch.ones(4), mesh, [Shard(0)])})
    assert (tmp_path / "model.safetensors").read_text() == "old"


@contextmanager
def largest_file(size: int):
    """As a full disk: the system refuses to make a file larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@distributed(world_size=4, backend="gloo")
def test_a_full_disk_is_noticed_before_values_are_written_and_by_all(tmp_path):
    mesh = mesh_of((4,))
    seen: list[tuple[int, int]] = []
    tensors = {"a": dtensor(torch.ones(4, 1000), mesh, [Shard(0)])}
    with largest_file(1000), pytest.raises(CheckpointError, match=r"rank 0: OSError: .*File too large"):
        write_tensors(tmp_path, tensors, progress=lambda *at: seen.append(at))
    assert not seen


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
@distributed(world_size=4, backend="gloo")
def test_a_rank_whose_disk_fails_is_named_by_all(call, tmp_path):
    mesh = mesh_of((4,))
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 2:

            def fail(*_):
                raise OSError(errno.EIO, "Input/output error")

            patch.setattr(os, call, fail)
        with pytest.raises(CheckpointError, match=r"1 of 4 ranks failed:[^$]*- rank 2: OSError: .*Input/output error"):
            write_tensors(tmp_path, {"a": dtensor(torch.ones(8), mesh, [Shard(0)])}, flush=True)


@distributed(world_size=4, backend="gloo")
def test_a_rank_that_sees_other_files_is_named_by_all(tmp_path):
    mesh = mesh_of((4,))
    whole = {"a": torch.ones(8)}
    write_tensors(tmp_path, {"a": dtensor(whole["a"], mesh, [Shard(0)])})
    path = tmp_path if dist.get_rank() != 3 else tmp_path / "elsewhere"
    into = dtensor(torch.zeros(8), mesh, [Shard(0)])
    with pytest.raises(CheckpointError, match=r"elsewhere cannot be read \(No such file or directory"):
        read_tensors(path, {"a": into})
    assert not into.to_local().any()


# ---- hostile files: one clear error on every rank, and nothing changed ----------------------------------------


def corruptions(good: bytes) -> dict[str, bytes]:
    head = int.from_bytes(good[:8], "little")
    text, data = good[8 : 8 + head], good[8 + head :]
    return {
        "empty": b"",
        "cut in the length": good[:5],
        "cut in the header": good[: 8 + head // 2],
        "cut in the values": good[:-1],
        "longer": good + b"\0",
        "absurd length": (1 << 62).to_bytes(8, "little") + good[8:],
        "pickle": b"\x80\x02}q\x00.0000000000",
        "overlap": good[:8] + text.replace(b"[32,64]", b"[16,48]") + data,
        "out of range": good[:8] + text.replace(b"[32,64]", b"[32,96]") + data,
        "hole": good[:8] + text.replace(b"[32,64]", b"[40,72]") + data + bytes(8),
        "other dtype": good[:8] + text.replace(b"F32", b"I32") + data,
        "other shape": good[:8] + text.replace(b"[8]", b"[4]") + data,
        "other name": good[:8] + text.replace(b'"b"', b'"x"') + data,
        "no text": good[:8] + text.replace(b'"b"', b'"\xff"') + data,
    }


@distributed(world_size=4, backend="gloo")
def test_damaged_files_change_nothing(tmp_path):
    mesh = mesh_of((4,))
    good = save({"a": torch.ones(8), "b": torch.ones(8)})
    into = {name: dtensor(torch.zeros(8), mesh, [Shard(0)]) for name in "ab"}
    cases = corruptions(good)
    for name, data in cases.items():
        assert data != good, name
        path = tmp_path / f"{name}.safetensors"
        if dist.get_rank() == 0:
            path.write_bytes(data)
        dist.barrier()
        with pytest.raises(CheckpointError) as caught:
            read_tensors(path, into)
        assert str(caught.value).startswith(str(path)), name
        assert not any(each.to_local().any() for each in into.values()), name
    (path := Path(tmp_path / f"good{dist.get_rank()}.safetensors")).write_bytes(good)
    read_tensors(path, into)
    assert all(each.to_local().all() for each in into.values())


@distributed(world_size=4, backend="gloo")
def test_all_that_does_not_fit_is_listed_at_once(tmp_path):
    mesh = mesh_of((4,))
    write_tensors(tmp_path, {"a": torch.ones(8), "b": torch.ones(8), "more": torch.ones(1), "ids": torch.arange(3)})
    into = {
        "a": dtensor(torch.zeros(9), mesh, [Shard(0)]),
        "b": dtensor(torch.zeros(8), mesh, [Replicate()]),
        "c": torch.zeros(1),
        "ids": torch.zeros(3),
    }
    with pytest.raises(CheckpointError) as caught:
        read_tensors(tmp_path, into, cast=True)
    first, *lines = str(caught.value).splitlines()
    assert first.startswith(
        f"{tmp_path} does not match: 2 of a different shape or dtype, 1 missing, 1 unexpected. Names, shapes and dtypes"
    )
    assert lines == [
        "- of a different shape or dtype: a (shape (8,), the model has (9,))",
        "- of a different shape or dtype: ids (torch.int64, the model has torch.float32)",
        "- missing: c",
        "- unexpected: more",
    ]
    assert not any(each.to_local().any() for each in into.values() if isinstance(each, DTensor))
    del into["a"], into["ids"]
    assert read_tensors(tmp_path, into, strict=False) == (["c"], ["ids", "a", "more"])
    assert into["b"].to_local().all()
