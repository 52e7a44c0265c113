"""What one of thousands of ranks does: its calls, messages and files do not grow with the number of
ranks.
"""

import os
import sys
from collections import Counter
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import shardkit
from shardkit import clip_grad_norm_, shard_model
from shardkit.checkpoint import directory, load_checkpoint, save, save_checkpoint
from shardkit.checkpoint.byte_ranges import MASK, file_sums
from shardkit.checkpoint.format import MAX_FILE_BYTES, Spec, plan_files
from shardkit.testing import fake_world

HOME = os.path.dirname(shardkit.__file__)


def work_of_one(ranks, path):
    """Return the bytes of rank 0's messages, and how often it enters each function of ours."""
    sent, calls = [], Counter()

    def sends(tensor, *_, **__):
        sent.append(tensor.nbytes)

    def enters(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            calls[frame.f_code.co_filename, frame.f_code.co_name] += 1

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2048, 3000, bias=False), nn.Linear(3000, 2048))
    with (
        fake_world(ranks),
        mock.patch.multiple(dist, all_reduce=sends, all_gather=None, broadcast=None),
    ):
        sys.setprofile(enters)
        try:
            shard_model(model)
            clip_grad_norm_(model, 1.0)
            # the other ranks write nothing
            with mock.patch.object(save, "sum_over_ranks", partial(whole_files, path=path)):
                save_checkpoint(path, model)
            load_checkpoint(path, model, verify=False)
        finally:
            sys.setprofile(None)
    return sent, calls


def whole_files(numbers, groups, path):
    """As if the other ranks had written their parts of the first file."""
    if len(numbers) == 1:
        return numbers
    size = 2048 * 3000 * 4 * 2 + 2048 * 4 + 272
    os.truncate(directory.draft_of(path) / "model.safetensors", size)
    return [size, *numbers[1:]]


def test_neither_calls_nor_messages_of_a_rank_grow_with_ranks(tmp_path):
    few, many = (work_of_one(ranks, tmp_path / str(ranks)) for ranks in (8, 2048))
    assert few[0] == many[0]
    more = many[1] - few[1]  # a few for the plan: 2,048 ranks divide no dim 0
    assert sum(more.values()) < 200, more.most_common(5)


def test_a_section_has_at_most_128_files_of_any_model():
    specs = {f"w{number}": Spec(torch.float32, torch.Size([10**9, 2])) for number in range(1000)}
    assert len(plan_files(path := directory.Path("a"), "model", specs)[0]) <= 128 + 1
    assert len(plan_files(path, "model", specs, MAX_FILE_BYTES)[0]) == 1000 + 1


def test_each_file_is_opened_once_to_write_and_a_share_of_all_bytes_to_verify(tmp_path):
    model, ranks = torch.nn.ParameterList(torch.full((15,), 1.0 + n) for n in range(100)), 50
    with mock.patch.object(os, "open", wraps=os.open) as opened:
        save_checkpoint(tmp_path / "a", model)
        written = [
            call.args[0].name for call in opened.mock_calls if call.args[0].suffix == ".safetensors"
        ]
        file = tmp_path / "a" / "model.safetensors"
        opened.reset_mock()
        sums = [file_sums({file: file.stat().st_size}, rank, ranks) for rank in range(ranks)]
    assert written == ["model.safetensors"]
    assert opened.call_count < 100 + ranks  # not 100 * ranks
    totals = [sum(of_ranks) & MASK for of_ranks in zip(*sums, strict=True)]
    assert totals == file_sums({file: file.stat().st_size}, 0, 1)
