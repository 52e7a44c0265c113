"""Checkpoints of tensor subclasses: float8 weights and quantized optimizer state, as their values; others refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from checkpoint_net import assert_same
from meshes import mesh_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardkit import init_on_meta, materialize
from shardkit.checkpoint import load_checkpoint, load_pretrained, save_checkpoint
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
@distributed(world_size=2, backend="gloo")
def test_float8_weights_come_back_bit_for_bit(format, tmp_path):
    net, other = build("float8"), build("float8", seed=1)
    saved = weights(net)
    assert all("class" in saved[name] for name in ("0.weight", "2.weight"))
    save_checkpoint(tmp_path / "c", net, format=format)
    kept = dict(other.named_parameters())
    load_checkpoint(tmp_path / "c", other)
    assert_same(weights(other), saved)
    assert all(param is kept[name] for name, param in other.named_parameters())


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@distributed(world_size=2, backend="gloo")
def test_quantized_weights_are_refused_by_name_and_what_trains_is_saved(kind, tmp_path):
    net = build(kind)
    with pytest.raises(CheckpointError, match=r"of a subclass: 0\.weight \(\w+\), 2\.weight.*trainable_only=True"):
        save_checkpoint(tmp_path / "c", net)
    assert not (tmp_path / "c").exists()
    save_checkpoint(tmp_path / "c", net, trainable_only=True)
    other = build(kind, seed=1)
    load_checkpoint(tmp_path / "c", other)
    assert_same(local(other[0].bias), local(net[0].bias))
    save_checkpoint(tmp_path / "plain", nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 512)))
    with pytest.raises(CheckpointError, match=r"of a subclass: 0\.weight"):
        load_checkpoint(tmp_path / "plain", other)


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


def values_of(net: nn.Module, optimizer: Any) -> dict[str, Any]:
    """The optimizer's state on this rank, as values."""
    state = sharded_optimizer_state_dict(net, optimizer)["state"]
    return {
        fqn: {
            key: each.dequantize() if hasattr(each := local(value), "dequantize") else each for key, value in e.items()
        }
        for fqn, e in state.items()
    }


@pytest.mark.parametrize(("name", "format"), [(name, "safetensors") for name in OPTIMIZERS] + [(OPTIMIZERS[0], "dcp")])
@distributed(world_size=2, backend="gloo")
def test_quantized_optimizer_state_is_saved_as_its_values(name, format, tmp_path):
    net = build("plain")
    optimizer = make_optimizer(name, net)
    step(net, optimizer, 2)
    saved, classes = copy.deepcopy(values_of(net, optimizer)), state_of(net, optimizer)
    quantized = [key for key, state in classes["0.weight"].items() if "class" in state]
    assert quantized == ([] if torch.distributed.get_rank() == 0 else ["exp_avg", "exp_avg_sq"])  # 65 and 64 rows
    assert "class" in classes["2.weight"]["exp_avg"]
    save_checkpoint(tmp_path / "c", net, optimizer, format=format, async_=True).wait()

    other = build("plain", seed=1)  # AdamW takes the values
    plain = torch.optim.AdamW(other.parameters())
    load_checkpoint(tmp_path / "c", other, plain)
    assert_same(values_of(other, plain), saved)
    for steps in (0, 1):  # an optimizer that has stepped keeps its memory
        fresh = build("plain", seed=1)
        resumed = make_optimizer(name, fresh)
        step(fresh, resumed, steps)
        load_checkpoint(tmp_path / "c", fresh, resumed)
        again = state_of(fresh, resumed)
        for fqn, entries in classes.items():
            assert {k: v.get("class") for k, v in again[fqn].items()} == {k: v.get("class") for k, v in entries.items()}
        for fqn, entries in sharded_optimizer_state_dict(fresh, resumed)["state"].items():
            for key, value in entries.items():  # one rounding: what the class itself makes of the values
                got = parts(value)
                local(value).copy_(saved[fqn][key])
                assert_same(got, parts(value))
        assert_same(weights(fresh), weights(net))
        step(fresh, resumed)


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
