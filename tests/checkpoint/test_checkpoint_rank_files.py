"""Files that each rank wrote with torch.save load into any world: verl's layout, FSDP1's sharded
and local state.
"""

import shutil
import warnings

import pytest
import torch
import torch.distributed as dist
from cpu_ranks import on_ranks
from meshes import mesh_of
from test_checkpoint_fsdp1 import build, train, trained_plain, wrapped
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from trees import assert_same

from shardkit.__main__ import main
from shardkit.checkpoint import convert_checkpoint, load_checkpoint
from shardkit.errors import CheckpointError
from shardkit.state import full_optimizer_state_dict, full_state_dict


@on_ranks(2)
def write(folder):
    """As verl's checkpoint manager, of FSDP2 and FSDP1; FSDP1's optimizer also by name; and local
    state.
    """
    warnings.simplefilter("ignore", FutureWarning)
    model = build()
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh_of((2,)))
    optimizer = train(model)
    verl(folder / "fsdp2", model.state_dict(), optimizer.state_dict())
    for use_orig_params in (True, False):
        model, tag = wrapped(0, use_orig_params), f"fsdp1-{use_orig_params}"
        optimizer = train(model)
        sharded = ShardedStateDictConfig(), ShardedOptimStateDictConfig()
        with FullyShardedDataParallel.state_dict_type(
            model, StateDictType.SHARDED_STATE_DICT, *sharded
        ):
            verl(folder / tag, model.state_dict(), optimizer.state_dict())
            by_name = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            verl(folder / f"{tag}-by-name", model.state_dict(), by_name)
        with FullyShardedDataParallel.state_dict_type(
            model, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig()
        ):
            save(
                model.state_dict(),
                folder / f"local-{use_orig_params}" / f"checkpoint_rank{dist.get_rank()}.pt",
            )
    dist.barrier()


def verl(folder, model, optimizer):
    suffix = f"world_size_2_rank_{dist.get_rank()}.pt"
    save(model, folder / f"model_{suffix}")
    save(optimizer, folder / f"optim_{suffix}")
    save(
        {"lr_scheduler": None, "rng": {"cpu": torch.get_rng_state()}},
        folder / f"extra_state_{suffix}",
    )


def save(tree, file):
    file.parent.mkdir(exist_ok=True)
    torch.save(tree, file)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rank-files")
    write(folder)
    return folder


ALL = ["fsdp2", "fsdp1-True-by-name", "fsdp1-False-by-name"]


def check(path, with_optimizer=True):
    """What is loaded into a plain model is what training without sharding gives."""
    expected, model = trained_plain(), build(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    load_checkpoint(path, model, optimizer if with_optimizer else None)
    assert_same(dict(full_state_dict(model)), dict(expected["model"]))
    if with_optimizer:
        assert_same(
            full_optimizer_state_dict(model, optimizer)["state"], expected["optimizer"]["state"]
        )


@pytest.mark.parametrize("kind", ["fsdp1-True", "fsdp1-False", "local-True", "local-False"])
def test_a_model_alone(kind, written):
    check(written / kind, with_optimizer=False)


@on_ranks(4)
def loads_on_a_two_dimensional_mesh(folder):
    expected = trained_plain()
    model = build(seed=1)
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh_of((2, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for kind in (*ALL, "local-True", "local-False"):
        for parameter in model.parameters():
            parameter.detach().zero_()
        load_checkpoint(folder / kind, model, optimizer if kind in ALL else None)
        got = full_state_dict(model), full_optimizer_state_dict(model, optimizer)
        if dist.get_rank() == 0:
            assert_same(dict(got[0]), dict(expected["model"]))
            assert_same(got[1]["state"], expected["optimizer"]["state"])


def test_another_world_and_mesh(written):
    loads_on_a_two_dimensional_mesh(written)


def test_converts(written, tmp_path, capsys):
    assert main(["convert", str(written / "fsdp1-True-by-name"), str(tmp_path / "c.pt")]) == 0
    check(tmp_path / "c.pt")
    # One file stands for its set: the model without the optimizer, whose numbers only a model
    # explains.
    convert_checkpoint(written / "fsdp2" / "model_world_size_2_rank_1.pt", tmp_path / "model.pt")
    check(tmp_path / "model.pt", with_optimizer=False)


def test_what_only_the_model_knows_is_said(written, tmp_path):
    for kind in ("local-True", "local-False"):
        with pytest.raises(
            CheckpointError, match=r"LOCAL_STATE_DICT.*Load it with load_checkpoint"
        ):
            convert_checkpoint(written / kind, tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match=r"differs between ranks.*optimizer of FSDP1 by name"):
        convert_checkpoint(written / "fsdp1-True", tmp_path / "c.pt")
    model = build()
    with pytest.raises(CheckpointError, match=r"differs between ranks.*optimizer of FSDP1 by name"):
        load_checkpoint(written / "fsdp1-False", model, torch.optim.AdamW(model.parameters()))
    model.head = torch.nn.Linear(6, 5)
    with pytest.raises(
        CheckpointError, match=r"head\.weight, head\.bias has 21 elements in the files, and 35 here"
    ):
        load_checkpoint(written / "local-False", model)
    assert not list(tmp_path.iterdir())


def test_a_set_that_is_not_whole(written, tmp_path):
    shutil.copytree(written / "fsdp2", tmp_path / "c")
    for rank, said in ((0, r"the files of ranks 0 are missing"), (1, "is not filled")):
        lost = tmp_path / "c" / f"model_world_size_2_rank_{rank}.pt"
        lost.rename(tmp_path / "lost")
        with pytest.raises(CheckpointError, match=said):
            load_checkpoint(tmp_path / "c", build())
        (tmp_path / "lost").rename(lost)
    shutil.copy(written / "fsdp1-True" / "model_world_size_2_rank_0.pt", tmp_path / "alone.pt")
    with pytest.raises(CheckpointError, match=r"is not filled.*Pass the directory"):
        load_checkpoint(tmp_path / "alone.pt", build())
