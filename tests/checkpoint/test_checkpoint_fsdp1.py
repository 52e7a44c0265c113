"""Checkpoints that FSDP1 wrote load into FSDP2, and FSDP1 loads what shardkit exports."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_net import is_first
from cpu_ranks import on_ranks
from meshes import mesh_of
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from trees import assert_same

from shardkit.__main__ import main
from shardkit.checkpoint import convert_checkpoint, load_checkpoint, save_checkpoint
from shardkit.errors import CheckpointError
from shardkit.state import full_optimizer_state_dict, full_state_dict
from shardkit.state.optimizer import renamed_state

IDS = torch.tensor([[0, 1, 2, 3, 4], [6, 5, 4, 3, 2]])


class Plain(nn.Module):
    """Uneven on 2, 3 and 4 ranks, with a persistent buffer. No ties and no frozen parameters: FSDP1
    flattens them.
    """

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(x) * self.scale


def build(seed=0):
    torch.manual_seed(seed)
    return Plain()


def train(model, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run(model, optimizer, steps)
    return optimizer


def run(model, optimizer, steps):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(IDS).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained_plain():
    """What training without any sharding gives: of two ranks with one batch, the mean gradient is
    exactly that.
    """
    model = build()
    optimizer = train(model)
    return {
        "model": full_state_dict(model),
        "optimizer": full_optimizer_state_dict(model, optimizer),
    }


def wrapped(seed, use_orig_params):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return FSDP(
            build(seed),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            use_orig_params=use_orig_params,
            device_id=torch.device("cpu"),
        )


@on_ranks(2)
def save_fsdp1(folder, use_orig_params):
    """SHARDED as a DCP directory, FULL as one file, with the optimizer by FQN, and by number."""
    warnings.simplefilter("ignore", FutureWarning)
    model = wrapped(0, use_orig_params)
    optimizer = train(model)
    FSDP.set_state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(),
        ShardedOptimStateDictConfig(),
    )
    sharded = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
    dcp.save(sharded, checkpoint_id=folder / "sharded")
    dcp.save(sharded["model"], checkpoint_id=folder / "model-only")
    # offload_to_cpu=True is wrong on CPU ranks: torch's .cpu() does not copy there, and both
    # moments share one buffer.
    FSDP.set_state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=False),
        FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False),
    )
    full, by_name = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    if is_first():
        names = [name for name, _ in build().named_parameters()]
        by_number = renamed_state(by_name, names.index)
        torch.save({"model": full, "optimizer": by_name}, folder / "full.pt")
        torch.save({"state_dict": full, "optim": by_number}, folder / "numbered.pt")
        torch.save(full, folder / "model.bin")
        torch.save(by_number, folder / "optimizer.bin")
    dist.barrier()


@on_ranks(4)
def load_into_fsdp2(paths, shape, seed=1):
    expected = trained_plain()
    model = build(seed)
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh_of(shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for path, with_optimizer in paths:
        assert load_checkpoint(path, model, optimizer if with_optimizer else None) is None
    got = {
        "model": full_state_dict(model),
        "optimizer": full_optimizer_state_dict(model, optimizer),
    }
    if is_first():
        assert_same(dict(got["model"]), dict(expected["model"]))
        assert_same(got["optimizer"]["state"], expected["optimizer"]["state"])
        assert_same(got["optimizer"]["param_groups"], expected["optimizer"]["param_groups"])


@pytest.fixture(scope="module", params=[True, False], ids=["use_orig_params", "flat"])
def written(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp1")
    save_fsdp1(folder, request.param)
    return folder


def test_every_kind_loads_into_fsdp2(written):
    load_into_fsdp2([(written / "sharded", True)], (4,))
    load_into_fsdp2([(written / "sharded", True)], (2, 2))
    load_into_fsdp2([(written / "full.pt", True)], (4,))
    load_into_fsdp2([(written / "numbered.pt", True)], (2, 2))
    load_into_fsdp2([(written / "model-only", False), (written / "optimizer.bin", True)], (4,))
    load_into_fsdp2([(written / "model.bin", False), (written / "optimizer.bin", True)], (2, 2))


def test_convert_takes_every_kind_to_every_other(written, tmp_path, capsys):
    expected = trained_plain()
    for name in ("sharded", "full.pt"):
        for place in ("b", "c.pt"):
            target = tmp_path / name / place
            target.parent.mkdir(exist_ok=True)
            assert main(["convert", str(written / name), str(target)]) == 0
            assert f"-> {target}" in capsys.readouterr().out
            model = build(seed=1)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
            load_checkpoint(target, model, optimizer)
            assert_same(dict(full_state_dict(model)), dict(expected["model"]))
            assert_same(
                full_optimizer_state_dict(model, optimizer)["state"], expected["optimizer"]["state"]
            )
        again = tmp_path / name / "again.pt"
        convert_checkpoint(tmp_path / name / "b", again)
        assert_same(torch.load(again)["optimizer"]["state"], expected["optimizer"]["state"])
        names = sorted(path.name for path in (tmp_path / name).iterdir())
        assert names == ["again.pt", "b", "c.pt"]


def test_convert_refuses_what_it_cannot_do(written, tmp_path, capsys):
    (tmp_path / "there.pt").touch()
    for arguments, said in [
        (["convert", str(written / "nothing"), str(tmp_path / "a.pt")], "does not exist"),
        (["convert", str(written / "sharded"), str(tmp_path / "there.pt")], "there.pt exists"),
    ]:
        assert main(arguments) == 1
        assert said in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["there.pt"]


@on_ranks(2)
def load_exported_into_fsdp1(file, losses, use_orig_params):
    warnings.simplefilter("ignore", FutureWarning)
    model = wrapped(1, use_orig_params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    found = torch.load(file, weights_only=True, mmap=True)
    FSDP.set_state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=False),
        FullOptimStateDictConfig(offload_to_cpu=False),
    )
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, found["optimizer"]))
    assert run(model, optimizer, 3) == losses


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp1_goes_on_from_what_is_exported(use_orig_params, tmp_path):
    model = build()
    optimizer = train(model)
    save_checkpoint(tmp_path / "a", model, optimizer)
    convert_checkpoint(tmp_path / "a", tmp_path / "full.pt")
    losses = run(model, optimizer, 3)
    assert losses[0] > losses[2]
    load_exported_into_fsdp1(tmp_path / "full.pt", losses, use_orig_params)


# --- Files that are not what they seem ------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (torch.ones(2), "a.pt cannot be read"),
        ({"epoch": 3}, r"missing: embed\.weight"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_one_error(content, said, tmp_path):
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(tmp_path / "a.pt", build())


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "files: none"),
        ({"notes.txt": b""}, r"files: notes\.txt\)\. A checkpoint has manifest\.json"),
        (
            {"model.pt": b"", "optimizer.pt": b""},
            r"files: model\.pt, optimizer\.pt.* one file with a full model",
        ),
        ({".metadata": b"no pickle"}, "cannot be read .UnpicklingError"),
        ({"model.safetensors": b"PK\x03\x04" * 9}, "its header claims"),
    ],
)
def test_what_is_not_recognized_is_said_with_what_was_seen(files, said, tmp_path):
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(tmp_path, build())
