"""Safetensors files written and read by 4 ranks at once: the very bytes that one process writes
with the package.
"""

import os

import pytest
import torch
from cpu_ranks import on_ranks
from safetensors.torch import save
from safetensors_kinds import (
    SHARDED,
    assert_holds,
    mesh_of,
    sharded,
    value,
    whole_tensors,
    write_tensors,
    zeros_like,
)
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.debug import CommDebugMode

from shardkit.checkpoint.byte_ranges import part_of, read_parts
from shardkit.checkpoint.format import find_tensors as locate
from shardkit.errors import CheckpointError


def read(path, into):
    found = locate(path)
    read_parts((found[name], part_of(tensor)) for name, tensor in into.items())


def contiguous(tensors):
    return {name: each.resolve_conj().contiguous() for name, each in tensors.items()}


@pytest.mark.parametrize("how", SHARDED)
@on_ranks(4)
def test_the_file_is_the_one_that_one_process_writes(how, tmp_path):
    whole = whole_tensors()
    tensors = sharded(whole, how)
    assert sum(isinstance(each, DTensor) for each in tensors.values()) > 10
    files = write_tensors(tmp_path, tensors)
    expected = save(contiguous(whole), {"format": "pt"})
    assert [(file.path.name, file.size) for file in files] == [("model.safetensors", len(expected))]
    assert (tmp_path / "model.safetensors").read_bytes() == expected
    for other in SHARDED:
        into = {name: zeros_like(each) for name, each in sharded(whole, other).items()}
        read(tmp_path, into)
        assert_holds(into, whole)


@on_ranks(4)
def test_no_values_travel_between_ranks_and_shards_stay_where_they_lie(tmp_path):
    whole = {"a": value((7, 6), torch.float32, 0), "b": value((5,), torch.bfloat16, 1)}
    tensors = sharded(whole, "fsdp")
    into = {name: zeros_like(each) for name, each in tensors.items()}
    with CommDebugMode() as comms:
        write_tensors(tmp_path, tensors)
        read(tmp_path, into)
    assert comms.get_total_counts() == 1, comms.get_comm_counts()  # counts and sums
    assert_holds(into, whole)


# ---- what fails, fails on all ranks --------------------------------------------------------------


@on_ranks(4)
def test_what_safetensors_has_no_words_for_is_refused_by_name(tmp_path):
    tensors = {
        "double": torch.ones(2, dtype=torch.complex128),
        "sparse": torch.eye(2).to_sparse(),
        "sum": DTensor.from_local(torch.ones(2), mesh_of((4,)), [Partial()], run_check=False),
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
