"""Checkpoints of tensor subclasses: float8 weights, quantized bases and quantized optimizer state, both formats."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_net import assert_same
from meshes import mesh_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardkit import init_on_meta, materialize
from shardkit.checkpoint import convert_checkpoint, load_checkpoint, load_pretrained, save_checkpoint
from shardkit.errors import CheckpointError
from shardkit.state import sharded_optimizer_state_dict
from shardkit.testing import distributed, fake_world

pytest.importorskip("torchao", reason="tensor subclasses as people have them")

FORMATS = ["safetensors", "dcp"]
WIDTH = {256: 256, 129: 192}
OPTIMIZERS = ["AdamW8bit", "AdamW4bit", "AdamWFp8"]


def build(kind: str, seed: int = 0, mesh: bool = True) -> nn.Module:
    """Linears of 129 rows where shards may be uneven, so that blocks fit one rank and not the other."""
    torch.manual_seed(seed)
    rows = 256 if kind in ("nf4", "int8") else 129
    net = nn.Sequential(nn.Linear(WIDTH[rows], rows), nn.ReLU(), nn.Linear(rows, 512))
    _CONVERT[kind](net)
    if mesh:
        for layer in (net[0], net[2]):
            fully_shard(layer, mesh=mesh_of((2,)))
        fully_shard(net, mesh=mesh_of((2,)))
    return net


def to_float8(net: nn.Module) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(net, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True))


def to_nf4(net: nn.Module) -> None:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    for layer in (net[0], net[2]):
        layer.weight = nn.Parameter(to_nf4(layer.weight.detach(), 64, 256), requires_grad=False)


def to_int8(net: nn.Module) -> None:
    from torchao.prototype.quantized_training.int8 import Int8QuantizedTrainingLinearWeight

    for layer in (net[0], net[2]):
        quantized = Int8QuantizedTrainingLinearWeight.from_float(layer.weight.detach())
        layer.weight = nn.Parameter(quantized, requires_grad=False)


_CONVERT = {"plain": lambda net: None, "float8": to_float8, "nf4": to_nf4, "int8": to_int8}


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def parts(tensor: Tensor) -> dict[str, Any]:
    """Class and inner tensors of what this rank has, copied."""
    tensor = local(tensor)
    if not hasattr(tensor, "__tensor_flatten__"):
        return {"": tensor.clone()}
    names = tensor.__tensor_flatten__()[0]
    return {"class": type(tensor).__name__, **{name: getattr(tensor, name).clone() for name in names}}


def weights(net: nn.Module) -> dict[str, Any]:
    return {name: parts(tensor) for name, tensor in net.state_dict().items()}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", ["float8", "nf4", "int8"])
@distributed(world_size=2, backend="gloo")
def test_weights_come_back_bit_for_bit(kind, format, tmp_path):
    net, other = build(kind), build(kind, seed=1)
    saved = weights(net)
    assert all("class" in saved[name] for name in ("0.weight", "2.weight"))
    fresh = weights(other)["0.weight"]
    assert any(not torch.equal(value, fresh[key]) for key, value in saved["0.weight"].items() if key != "class")
    save_checkpoint(tmp_path / "c", net, format=format)
    kept = dict(other.named_parameters())
    load_checkpoint(tmp_path / "c", other)
    assert_same(weights(other), saved)
    assert all(param is kept[name] for name, param in other.named_parameters())


@distributed(world_size=2, backend="gloo")
def test_float8_weights_are_plain_in_the_file(tmp_path):
    from safetensors.torch import load_file

    net = build("float8")
    save_checkpoint(tmp_path / "c", net)
    found = load_file(tmp_path / "c" / "model.safetensors")
    plain = build("plain")
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in plain.state_dict().items()
    }
    load_checkpoint(tmp_path / "c", plain)
    assert_same({name: {"": w.get("_tensor", w.get(""))} for name, w in weights(net).items()}, weights(plain))
    for dtype in (None, torch.bfloat16):
        other = build("float8", seed=1)
        load_pretrained(other, tmp_path / "c", dtype=dtype)
        assert_same(weights(other), weights(net.to(dtype) if dtype else net))


def make_optimizer(name: str, net: nn.Module) -> Any:
    import torchao.optim

    return getattr(torchao.optim, name)(net.parameters(), lr=1e-2)


def step(net: nn.Module, optimizer: Any, count: int = 1) -> None:
    with torch.compiler.set_stance("force_eager"):  # torchao compiles each update; its values are not the matter here
        for seed in range(count):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(seed)
            net(torch.randn(4, 192, generator=generator)).square().mean().backward()
            optimizer.step()


def state_of(net: nn.Module, optimizer: Any) -> dict[str, Any]:
    state = sharded_optimizer_state_dict(net, optimizer)["state"]
    return {fqn: {key: parts(value) for key, value in entries.items()} for fqn, entries in state.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(world_size=2, backend="gloo")
def test_optimizer_state_comes_back_as_what_it_was(name, tmp_path):
    net = build("plain")
    optimizer = make_optimizer(name, net)
    step(net, optimizer, 2)
    saved = copy.deepcopy(state_of(net, optimizer))
    with pytest.raises(CheckpointError, match=r'quantized optimizer state.*Use format="safetensors"'):
        save_checkpoint(tmp_path / "dcp", net, optimizer, format="dcp")  # where dcp.load would not find it
    assert not (tmp_path / "dcp").exists()
    save_checkpoint(tmp_path / "c", net, optimizer, async_=True).wait()
    step(net, optimizer)
    quantized = [key for key, state in saved["0.weight"].items() if "class" in state]
    assert quantized == ([] if torch.distributed.get_rank() == 0 else ["exp_avg", "exp_avg_sq"])  # 65 and 64 rows
    assert "class" in saved["2.weight"]["exp_avg"]

    fresh = build("plain", seed=1)
    resumed = make_optimizer(name, fresh)
    load_checkpoint(tmp_path / "c", fresh, resumed)
    assert_same(state_of(fresh, resumed), saved)
    step(fresh, resumed)
    assert_same(weights(fresh), weights(net))
    assert_same(state_of(fresh, resumed), state_of(net, optimizer))


@distributed(world_size=2, backend="gloo")
def save_on_2(path):
    net = build("plain")
    optimizer = make_optimizer("AdamW8bit", net)
    step(net, optimizer)
    save_checkpoint(path, net, optimizer)
    state = {"optimizer": sharded_optimizer_state_dict(net, optimizer)}
    dcp.save({"model": net.state_dict(), **state}, checkpoint_id=f"{path}-torch")


@distributed(world_size=2, backend="gloo")
def load_torchs_own(path):
    net = build("plain", seed=1)
    optimizer, before = make_optimizer("AdamW8bit", net), weights(net)
    with pytest.raises(CheckpointError, match=r"stored as OptimState8bit, .* is plain"):
        load_checkpoint(path, net, optimizer)
    assert_same(weights(net), before)
    assert not optimizer.state


def test_what_cannot_be_made_again_is_refused_with_nothing_changed(tmp_path, monkeypatch):
    from shardkit.checkpoint import inner

    monkeypatch.setattr(inner, "turns_into_values", lambda cls: False)
    save_on_2(tmp_path / "c")
    load_torchs_own(f"{tmp_path / 'c'}-torch")
    net = build("plain", seed=1, mesh=False)
    optimizer, before = make_optimizer("AdamW8bit", net), weights(net)
    said = r"optimizer state of 0\.weight, .*2\.weight.*: saved as S\(0\) on 2 ranks, here whole\..*no dequantize\(\)"
    with pytest.raises(CheckpointError, match=said) as caught:
        load_checkpoint(tmp_path / "c", net, optimizer)
    assert str(caught.value).count("saved as") == 1
    assert_same(weights(net), before)
    assert not optimizer.state
    load_checkpoint(tmp_path / "c", net)  # the model alone goes anywhere


def test_alone_and_of_a_class_that_is_not_there(tmp_path):
    net = build("plain", mesh=False)
    optimizer = make_optimizer("AdamW8bit", net)
    step(net, optimizer)
    save_checkpoint(tmp_path / "c", net, optimizer)
    fresh = build("plain", seed=1, mesh=False)
    resumed = make_optimizer("AdamW8bit", fresh)
    load_checkpoint(tmp_path / "c", fresh, resumed)
    assert_same(state_of(fresh, resumed), state_of(net, optimizer))

    convert_checkpoint(tmp_path / "c", tmp_path / "d")
    fresh = build("plain", seed=1, mesh=False)
    resumed = make_optimizer("AdamW8bit", fresh)
    load_checkpoint(tmp_path / "d", fresh, resumed)
    assert_same(state_of(fresh, resumed), state_of(net, optimizer))
    for kind in ("dcp", "full"):
        with pytest.raises(CheckpointError, match=r"quantized state of 2\.weight.*Convert to safetensors"):
            convert_checkpoint(tmp_path / "c", tmp_path / "e", to=kind)
    assert not (tmp_path / "e").exists()

    from shardkit.checkpoint import inner

    with pytest.raises(CheckpointError, match=r"it has state of elsewhere\.Quantised"):
        inner._loaded_class("elsewhere.Quantised")


class Opaque(Tensor):
    """A wrapper that does not say what it wraps."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Opaque:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(func)


@pytest.mark.parametrize("format", FORMATS)
def test_a_class_that_cannot_be_taken_apart_is_refused_before_anything_is_written(format, tmp_path):
    net = nn.Linear(2, 2)
    net.weight = nn.Parameter(Opaque(torch.ones(2, 2)), requires_grad=False)
    with pytest.raises(CheckpointError, match=r"weight \(Opaque\)"):
        save_checkpoint(tmp_path / "c", net, format=format)
    assert not list(tmp_path.iterdir())


@distributed(world_size=2, backend="gloo")
def test_weights_that_are_quantized_on_meta_are_refused_by_name(tmp_path):
    save_checkpoint(tmp_path / "c", build("nf4", mesh=False))
    with torch.device("meta"):
        net = build("nf4")
    for load in (load_pretrained, load_checkpoint):
        with pytest.raises(CheckpointError, match=r"0\.weight.*on meta.*shardkit\.materialize\(model\) (before|first)"):
            load(net, tmp_path / "c") if load is load_pretrained else load(tmp_path / "c", net)
    assert all(param.is_meta for param in net.parameters())


@pytest.mark.filterwarnings("ignore:The argument .device. of Tensor.is_pinned:DeprecationWarning")  # of torchao
@pytest.mark.parametrize("way", ["recorded", "init", "load_pretrained"])
def test_float8_weights_from_meta_stay_what_they_are(way, tmp_path):
    expected = build("float8", mesh=False)
    save_checkpoint(tmp_path / "c", expected)
    torch.manual_seed(0)
    with fake_world(2):
        with init_on_meta() if way == "recorded" else torch.device("meta"):
            net = nn.Sequential(nn.Linear(192, 129), nn.ReLU(), nn.Linear(129, 512))
            to_float8(net)
        for module in (net[0], net[2], net):
            fully_shard(module)
        if way == "load_pretrained":
            load_pretrained(net, tmp_path / "c")
        else:
            materialize(net, init=None if way == "recorded" else reset)
        for name, weight in weights(net).items():
            whole = parts(expected.state_dict()[name])
            assert weight.keys() == whole.keys()
            assert weight.get("class") == whole.get("class")
            for key in weight.keys() - {"class"}:
                assert way == "init" or torch.equal(weight[key], whole[key][: len(weight[key])])


def reset(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.reset_parameters()
