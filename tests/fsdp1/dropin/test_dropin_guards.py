"""torch's own FSDP1 functions on models of the drop-in, what the drop-in announces, and its grad scaler."""

import contextlib
import functools
import inspect
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, StateDictType, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchScaler
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, enable_wrap, wrap

from shardkit import shard_model
from shardkit.errors import ShardkitError
from shardkit.fsdp1 import FullyShardedDataParallel as FSDP
from shardkit.fsdp1 import translate_fsdp1
from shardkit.fsdp1.dropin import announce, guards, roots
from shardkit.fsdp1.sharded_grad_scaler import ShardedGradScaler
from shardkit.testing import distributed, fake_world

REFUSED = (
    *("state_dict_type", "set_state_dict_type", "get_state_dict_type", "summon_full_params", "optim_state_dict"),
    *("full_optim_state_dict", "sharded_optim_state_dict", "optim_state_dict_to_load", "shard_full_optim_state_dict"),
    *("scatter_full_optim_state_dict", "flatten_sharded_optim_state_dict"),
)

# --- torch's functions ----------------------------------------------------------------------------------------------


@pytest.fixture
def guarded():
    """Guards that were put there by a model, whichever test made the first one."""
    guards.uninstall()
    with fake_world(2):
        yield FSDP(nn.Sequential(FSDP(nn.Linear(2, 2)), nn.Linear(2, 2)))
    guards.uninstall()


@pytest.fixture
def recorded(guarded, monkeypatch):
    """The calls that reach the drop-in's functions: name, positional arguments, keywords."""
    calls = []
    for name in guards.GUARDED:
        record = functools.partial(lambda name, *args, **kwargs: calls.append((name, args, kwargs)) or name, name)
        monkeypatch.setattr(FSDP, name, staticmethod(record))
    return calls


OPTIMIZER = torch.optim.SGD([torch.zeros(1)])

# A call of each function, of a model.
CALLS = {
    "state_dict_type": lambda f, m: f(m, StateDictType.FULL_STATE_DICT),
    "set_state_dict_type": lambda f, m: f(m, state_dict_type=StateDictType.FULL_STATE_DICT),
    "get_state_dict_type": lambda f, m: f(m),
    "summon_full_params": lambda f, m: f(m, writeback=False),
    "optim_state_dict": lambda f, m: f(m, None),
    "full_optim_state_dict": lambda f, m: f(m, OPTIMIZER),
    "sharded_optim_state_dict": lambda f, m: f(model=m, optim=OPTIMIZER),
    "optim_state_dict_to_load": lambda f, m: f(m, None, {}),
    "shard_full_optim_state_dict": lambda f, m: f({}, m),
    "scatter_full_optim_state_dict": lambda f, m: f(None, model=m),
    "flatten_sharded_optim_state_dict": lambda f, m: f({}, m, None),
    "rekey_optim_state_dict": lambda f, m: f({}, None, m),
    "fsdp_modules": lambda f, m: f(m),
    "clip_grad_norm_": lambda f, m: f(m, 1.0),
    "no_sync": lambda f, m: f(m),
}


def test_the_functions_are_these():
    assert set(guards.GUARDED) == CALLS.keys()
    statics = {name for name, value in vars(TorchFSDP).items() if isinstance(value, staticmethod) and name[0] != "_"}
    assert set(guards.GUARDED) == statics | {"clip_grad_norm_", "no_sync"}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_the_drop_in_has_it_with_torchs_parameters(name):
    ours, torchs = (inspect.signature(getattr(kind, name)).parameters for kind in (FSDP, TorchFSDP))
    assert list(ours) == list(torchs)
    assert [each.default for each in ours.values()] == [each.default for each in torchs.values()]


@pytest.mark.parametrize("name", sorted(CALLS))
def test_it_acts_on_a_model_of_ours(name, guarded, recorded):
    for model in (guarded, guarded[0]) if name in ("clip_grad_norm_", "no_sync") else (nn.Sequential(guarded),):
        assert CALLS[name](getattr(TorchFSDP, name), model) == name
        called, args, kwargs = recorded.pop()
        assert called == name
        assert any(each is model for each in (*args, *kwargs.values()))


def entered(name, model):
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")  # FSDP1 is deprecated
        called = CALLS[name](getattr(TorchFSDP, name), model)
        stack.enter_context(called if hasattr(called, "__enter__") else contextlib.nullcontext())


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("installed", [False, True])
def test_on_a_model_that_shardkit_sharded_a_static_says_what_to_use(name, installed, guarded):
    """Before there is a drop-in model too, when torch's functions are torch's own."""
    guards.uninstall()
    if installed:
        guards.install(FSDP)
    model = nn.Sequential(shard_model(nn.Linear(2, 2)))
    with pytest.raises(
        ShardkitError,
        match=rf"\.{name}: the model is sharded by .*[Uu]se \w+\(model",
    ):
        entered(name, model)
    assert TorchFSDP.fsdp_modules(model) == []  # which is true, and how programs ask
    assert get_model_state_dict(model).keys() == {"0.weight", "0.bias"}  # torch asks FSDP1 first, and knows FSDP2


def test_on_a_model_of_plain_fully_shard_they_are_torchs(guarded):
    model = fully_shard(nn.Linear(2, 2))
    before = inspect.getattr_static(TorchFSDP, "set_state_dict_type")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert TorchFSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT).state_dict_type is None
    assert before.__func__.__module__ == TorchFSDP.__module__


def test_for_other_models_and_callers_it_is_torchs(guarded):
    plain = nn.Linear(2, 2)
    assert TorchFSDP.fsdp_modules(plain) == []
    assert TorchFSDP.get_state_dict_type(plain) is None
    with pytest.raises(TypeError, match="missing 2 required positional arguments: 'module' and 'state_dict_type'"):
        TorchFSDP.state_dict_type()
    # torch.distributed.checkpoint asks FSDP1 first, and knows FSDP2.
    assert get_model_state_dict(fully_shard(nn.Linear(2, 2))).keys() == {"weight", "bias"}


def test_guards_come_once_with_the_first_model_and_go():
    guards.uninstall()
    before = {name: inspect.getattr_static(TorchFSDP, name) for name in guards.GUARDED}
    signatures = {name: inspect.signature(getattr(TorchFSDP, name)) for name in guards.GUARDED}
    with fake_world(2):
        FSDP(nn.Linear(2, 2))
        first = {name: inspect.getattr_static(TorchFSDP, name) for name in guards.GUARDED}
        FSDP(nn.Linear(2, 2))
    assert all(first[name] is not before[name] for name in before)
    assert all(inspect.getattr_static(TorchFSDP, name) is first[name] for name in first)
    assert {name: inspect.signature(getattr(TorchFSDP, name)) for name in first} == signatures
    guards.uninstall()
    assert all(inspect.getattr_static(TorchFSDP, name) is before[name] for name in before)


# --- What is said ---------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(x))


def model_of_blocks():
    return nn.Sequential(nn.Linear(4, 4), Block(), Block(), nn.Linear(4, 4))


ARGUMENTS = {
    "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
    "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "limit_all_gathers": False,
    "device_id": torch.device("cpu"),
}


def by_policy():
    return FSDP(model_of_blocks(), auto_wrap_policy=ModuleWrapPolicy({Block}), **ARGUMENTS)


def by_hand():
    model = model_of_blocks()
    with enable_wrap(wrapper_cls=FSDP, **ARGUMENTS):
        model[1], model[2] = wrap(model[1]), wrap(model[2])
        return wrap(model)


@pytest.mark.parametrize("wrapped", [by_policy, by_hand])
def test_what_is_said_is_the_plan_and_code_that_gives_the_same(wrapped):
    with fake_world(2):
        model = wrapped()
        roots.begin(model)
        plan = announce.whole_plan(model)
        assert plan == translate_fsdp1(model_of_blocks(), auto_wrap_policy={Block}, **ARGUMENTS).plan
        text, code = announce.announcement(model), "\n".join(announce.replacement(model))
        namespace = {"model": model_of_blocks()}
        exec(code.replace("shard_like_fsdp1", "translate_fsdp1"), namespace)
        assert namespace["model"].plan == plan
    assert str(plan) in text
    assert "- limit_all_gathers=False: noted" in text
    assert "use_orig_params" not in text  # a default
    assert "mapped" not in text
    assert code.splitlines() == [
        "import torch",
        "from shardkit.fsdp1 import MixedPrecision, shard_like_fsdp1",
        f"from {__name__} import Block",
        "",
        "model = shard_like_fsdp1(",
        "    model,",
        '    sharding_strategy="SHARD_GRAD_OP",',
        "    auto_wrap_policy={Block},",
        "    mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),",
        '    device_id=torch.device("cpu"),',
        ")",
    ]


def code_for(model, **arguments):
    with fake_world(2):
        return "\n".join(announce.replacement(FSDP(model, **arguments)))


def test_what_cannot_be_written_is_named():
    assert code_for(nn.Linear(2, 2)).endswith("\nmodel = shard_like_fsdp1(model)")
    model = model_of_blocks()
    assert 'ignored_modules=[model.get_submodule("1.up")]' in code_for(model, ignored_modules=[model[1].up])
    model = model_of_blocks()
    assert 'ignored_states=[model.get_parameter("0.bias")]' in code_for(model, ignored_states=[model[0].bias])
    own = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
    some = CustomPolicy(lambda module: own if isinstance(module, Block) else False)
    code = code_for(model_of_blocks(), auto_wrap_policy=some, param_init_fn=nn.Module.eval)
    assert "auto_wrap_policy = ...  # the program's own, which wraps 1, 2\n" in code
    assert "\nparam_init_fn = ...  # the program's own\n" in code
    assert "    auto_wrap_policy=auto_wrap_policy,\n    param_init_fn=param_init_fn,\n" in code


@pytest.fixture
def unsaid(monkeypatch):
    monkeypatch.setattr(announce, "_shown", False)
    monkeypatch.delenv(announce.QUIET, raising=False)


def test_it_is_said_once_to_stderr(unsaid, capsys):
    with fake_world(2):
        model = FSDP(nn.Sequential(FSDP(nn.Linear(2, 2)), nn.Linear(2, 2)))
        assert capsys.readouterr().err == ""
        roots.begin(model)
        first = capsys.readouterr()
        assert first.out == ""
        assert first.err == f"\n{announce.announcement(model)}\n"
        roots.begin(FSDP(nn.Linear(2, 2)))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("rank", "quiet", "said"), [(0, "0", True), (0, "1", False), (1, "", False)])
def test_it_is_said_by_rank_0_unless_it_is_silenced(unsaid, monkeypatch, capsys, rank, quiet, said):
    monkeypatch.setenv(announce.QUIET, quiet)
    with fake_world(2, rank):
        roots.begin(FSDP(nn.Linear(2, 2)))
    assert bool(capsys.readouterr().err) == said


def test_a_program_does_not_fail_for_what_it_is_told(unsaid, monkeypatch, capsys):
    monkeypatch.setattr(announce, "announcement", lambda root: 1 / 0)
    with fake_world(2):
        roots.begin(FSDP(nn.Linear(2, 2)))
    assert capsys.readouterr().err == ""


# --- The scaler -----------------------------------------------------------------------------------------------------


def test_the_scaler_is_torchs_by_its_arguments_and_its_class():
    assert inspect.signature(ShardedGradScaler) == inspect.signature(TorchScaler)
    scaler = ShardedGradScaler("cpu", 4.0, 0.25, 8.0, 3)
    assert isinstance(scaler, TorchScaler)
    state = {"scale": 4.0, "growth_factor": 8.0, "backoff_factor": 0.25, "growth_interval": 3, "_growth_tracker": 0}
    assert scaler.state_dict() == TorchScaler("cpu", 4.0, 0.25, 8.0, 3).state_dict() == state
    assert ShardedGradScaler(enabled=False).scale(torch.ones(())) == 1


def run_in_fp16(wrap_model, kind):
    """Losses and scales of steps of which some overflow, on one rank only."""
    torch.manual_seed(0)
    model = wrap_model(
        nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)),
        mixed_precision=MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = kind(device="cpu", init_scale=2.0**18, growth_interval=2)
    seen = []
    for step in range(6):
        torch.manual_seed(10 * step + dist.get_rank())
        inputs = torch.randn(4, 8)
        outputs = model(inputs * torch.inf if step == dist.get_rank() == 1 else inputs)
        loss = outputs.float().pow(2).mean()
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append((loss.item(), scaler.get_scale()))
    return seen


@distributed(world_size=2, backend="gloo")
def test_the_scaler_grows_and_backs_off_as_under_fsdp1():
    ours = run_in_fp16(FSDP, ShardedGradScaler)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's FSDP1 says that it is deprecated
        torchs = run_in_fp16(TorchFSDP, TorchScaler)
    assert repr(ours) == repr(torchs)  # nan equals itself
    steps = list(itertools.pairwise(scale for _, scale in ours))
    assert any(after < before for before, after in steps)
    assert any(after > before for before, after in steps)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.plain = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.plain(self.inner(x))


@distributed(world_size=2, backend="gloo")
def test_the_scaler_takes_plain_parameters_beside_sharded_ones():
    model = Mixed()
    model = FSDP(model, ignored_modules=[model.plain])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    before = model.plain.weight.clone()
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    scaler.unscale_(optimizer)
    assert torch.equal(model.plain.bias.grad, torch.tensor([2.0]))
    scaler.step(optimizer)
    assert not torch.equal(model.plain.weight, before)
