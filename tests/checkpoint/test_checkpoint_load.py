"""load_checkpoint in one process and on two ranks: kinds of optimizers, files
of others, checksums.
"""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cpu_ranks import on_ranks
from meshes import mesh_of
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from trees import assert_same

from shardkit.checkpoint import byte_ranges, convert_checkpoint, load_checkpoint, save_checkpoint
from shardkit.errors import CheckpointError
from shardkit.state import full_optimizer_state_dict


def net(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).to(dtype)


def step(model, *optimizers):
    data = torch.randn(4, 5, generator=torch.Generator().manual_seed(3))
    model(data.to(next(model.parameters()).dtype)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step(lambda: torch.tensor(0.0))  # which LBFGS needs
        optimizer.zero_grad()


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
    "amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True),
    "adagrad": lambda params: torch.optim.Adagrad(params),  # has state before its first step
    "tensor-lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_every_kind_of_optimizer_goes_on(name, tmp_path):
    def build(seed):
        model = fully_shard(net(seed), mesh=mesh_of((2,)))
        return model, OPTIMIZERS[name](model.parameters())

    model, optimizer = build(0)
    step(model, optimizer)
    save_checkpoint(tmp_path / "a", model, optimizer)
    resumed, other = build(1)
    load_checkpoint(tmp_path / "a", resumed, other)
    step(model, optimizer)
    step(resumed, other)
    assert_same(dict(resumed.state_dict()), dict(model.state_dict()))
    assert_same(
        full_optimizer_state_dict(resumed, other), full_optimizer_state_dict(model, optimizer)
    )


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS])
def test_state_of_other_shapes_and_nested_state_goes_on(kind, tmp_path):
    model = net()
    optimizer = kind(model.parameters())
    step(model, optimizer)
    save_checkpoint(tmp_path / "a", model, optimizer)
    other = kind(model.parameters())
    load_checkpoint(tmp_path / "a", model, other)
    assert optimizer.state
    assert_same(
        full_optimizer_state_dict(model, other), full_optimizer_state_dict(model, optimizer)
    )


def test_moments_of_another_dtype_than_their_parameters_stay_so(tmp_path):
    model = net(dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    for entries in optimizer.state.values():
        entries["exp_avg"] = entries["exp_avg"].float() / 3  # no bfloat16 number
    save_checkpoint(tmp_path / "a", model, optimizer)
    other = torch.optim.AdamW(model.parameters())
    load_checkpoint(tmp_path / "a", model, other)
    assert_same(
        full_optimizer_state_dict(model, other), full_optimizer_state_dict(model, optimizer)
    )


def test_several_optimizers_are_one_state(tmp_path):
    def build():
        model = net()
        return model, [
            torch.optim.SGD(model[0].parameters(), 0.1, 0.9),
            torch.optim.AdamW(model[2].parameters()),
        ]

    model, optimizers = build()
    step(model, *optimizers)
    save_checkpoint(tmp_path / "a", model, iter(optimizers))
    other, fresh = build()
    load_checkpoint(tmp_path / "a", other, iter(fresh))
    assert_same(
        full_optimizer_state_dict(other, fresh), full_optimizer_state_dict(model, optimizers)
    )


def test_an_optimizer_that_has_stepped_keeps_its_memory(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    save_checkpoint(tmp_path / "a", model, optimizer)
    moments = [entries["exp_avg"].data_ptr() for entries in optimizer.state.values()]
    step(model, optimizer)
    load_checkpoint(tmp_path / "a", model, optimizer)
    assert [entries["exp_avg"].data_ptr() for entries in optimizer.state.values()] == moments
    assert all(int(entries["step"]) == 1 for entries in optimizer.state.values())


# --- Files of others ------------------------------------------------------------------------------


def test_safetensors_of_others_load_into_the_model(tmp_path):
    model = net()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    for seed, path in enumerate([tmp_path, tmp_path / "model.safetensors"], 1):
        other = net(seed)
        assert load_checkpoint(path, other) is None
        assert_same({**other.state_dict()}, {**model.state_dict()})
    with pytest.raises(CheckpointError, match="has no optimizer"):
        load_checkpoint(tmp_path, other, torch.optim.SGD(other.parameters()))


def test_dtypes_are_converted_only_when_asked(tmp_path):
    save_checkpoint(tmp_path / "a", net())
    half = net(dtype=torch.bfloat16)
    with pytest.raises(
        CheckpointError, match=r"0\.weight \(torch\.float32, the model has torch\.bfloat16\)"
    ):
        load_checkpoint(tmp_path / "a", half)
    load_checkpoint(tmp_path / "a", half, cast=True)
    assert torch.equal(half[0].weight, net()[0].weight.bfloat16())


def test_a_model_on_meta_is_refused(tmp_path):
    save_checkpoint(tmp_path / "a", net())
    with torch.device("meta"):
        model = net()
    with pytest.raises(CheckpointError, match=r"0\.weight, .* on meta"):
        load_checkpoint(tmp_path / "a", model)
    with pytest.raises(
        CheckpointError, match=r"on the meta device.*shardkit\.materialize\(model\), or"
    ):
        save_checkpoint(tmp_path / "b", model)
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("shape", [(33, 21), (3, 5, 7), (1, 400)])
@pytest.mark.parametrize("columns", [False, True])
def test_checksums_of_what_is_written_in_many_blocks(shape, columns, tmp_path, monkeypatch):
    """They are taken block by block while writing, and wrap around; loading reads the bytes in
    other blocks.
    """
    monkeypatch.setattr(byte_ranges, "STAGE", 100)
    model = nn.ParameterDict()
    for name, dtype in {"a": torch.float32, "b": torch.bfloat16}.items():
        value = -torch.rand(shape).to(dtype)
        if columns:  # not as files have it, so that blocks go through memory
            value = value.transpose(0, -1).contiguous().transpose(0, -1)
        model[name] = nn.Parameter(value)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    save_checkpoint(tmp_path / "a", model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    load_checkpoint(tmp_path / "a", model)
    assert_same(dict(model.state_dict()), saved)
    file = tmp_path / "a" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"damaged: checksums differ in model\.safetensors"):
        load_checkpoint(tmp_path / "a", model)
    assert_same(dict(model.state_dict()), saved)


# Extra state, and learning rates that are tensors.


class Remembering(nn.Module):
    def __init__(self, memory):
        super().__init__()
        self.l, self.memory = nn.Linear(2, 2), memory

    def get_extra_state(self):
        return self.memory

    def set_extra_state(self, state):
        self.memory = state


def inside(memory):
    return nn.ModuleDict({"inner": Remembering(memory)})


@pytest.mark.parametrize(
    ("key_map", "build"),
    [(lambda name: f"inner.{name}", inside), ([("^", "inner.")], inside), (None, Remembering)],
)
def test_extra_state_goes_where_its_name_is_mapped_to(key_map, build, tmp_path):
    save_checkpoint(tmp_path / "a", Remembering(3))
    model = build(0)
    load_checkpoint(tmp_path / "a", model, key_map=key_map)
    assert [m.memory for m in model.modules() if isinstance(m, Remembering)] == [3]


@pytest.mark.filterwarnings("ignore:torch.distributed")
@pytest.mark.parametrize("kind", ["shardkit", "dcp", "full", "nested"])
@pytest.mark.parametrize(
    "memory", [{"scale": torch.arange(3.0), "steps": [1, 2], "in": {"count": 4}}, torch.arange(3.0)]
)
def test_extra_state_of_any_kind_comes_back_from_any_kind_of_checkpoint(memory, kind, tmp_path):
    model, path = inside(memory), tmp_path / "a"
    if kind == "shardkit":
        save_checkpoint(path, model)
    elif kind == "dcp":
        dcp.save({"model": model.state_dict()}, checkpoint_id=path, no_dist=True)
    else:
        path = tmp_path / "a.pt"
        torch.save(model.state_dict() if kind == "full" else {"model": model.state_dict()}, path)
    convert_checkpoint(path, tmp_path / "converted.pt")
    for source in (path, tmp_path / "converted.pt"):
        fresh = inside(None if isinstance(memory, dict) else torch.ones(1))
        load_checkpoint(source, fresh)
        assert_same(fresh["inner"].memory, memory)
        assert torch.equal(fresh["inner"].l.weight, model["inner"].l.weight)


def test_a_tensor_learning_rate_comes_back_from_a_file_of_torch_save(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
    step(model, optimizer)
    save_checkpoint(tmp_path / "own", model, optimizer)
    convert_checkpoint(tmp_path / "own", tmp_path / "full.pt")
    convert_checkpoint(tmp_path / "full.pt", tmp_path / "dcp")
    for name in ("dcp", "full.pt"):
        other = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
        load_checkpoint(tmp_path / name, model, other)
        assert_same(
            full_optimizer_state_dict(model, other), full_optimizer_state_dict(model, optimizer)
        )


@on_ranks(2)
def test_tied_values_that_differ_in_one_ranks_part_change_nothing_on_any(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[0].weight = model[1].weight
    fully_shard(model, mesh=mesh_of((2,)))
    before = model[0].weight.to_local().clone()
    saved = {"0.weight": torch.ones(4, 4), "1.weight": torch.ones(4, 4)}
    saved["1.weight"][3] = 2  # which rank 1 has
    torch.save(saved, tmp_path / f"{torch.distributed.get_rank()}.pt")
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match="one tied tensor"):
        load_checkpoint(tmp_path / "0.pt", model)
    assert torch.equal(model[0].weight.to_local(), before)


def test_state_of_a_module_with_a_slash_in_its_name_comes_back(tmp_path):
    states = []
    for _ in range(2):
        model = nn.ModuleDict({"image/left": nn.Linear(2, 1)})
        states.append((model, torch.optim.AdamW(model.parameters())))
    model, optimizer = states[0]
    model["image/left"](torch.ones(2)).backward()
    optimizer.step()
    save_checkpoint(tmp_path / "a", model, optimizer)
    load_checkpoint(tmp_path / "a", *states[1])
    assert_same(states[1][1].state_dict(), optimizer.state_dict())
