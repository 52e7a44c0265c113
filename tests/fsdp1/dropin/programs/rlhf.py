"""Policy optimization: an actor and a reference, and an optimizer whose state is moved between
phases.

Rank 0 holds the weights and the others begin on meta. Log probabilities are computed without grad.
The rollout receives the weights from sharded state, or the adapters unit by unit.
"""

import functools

import torch
import torch.distributed as dist
from harness import (
    Adapted,
    Decoder,
    class_named,
    generator_of,
    is_trained_leaf,
    parse,
    read_own,
    write_own,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardingStrategy,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.api import ShardedStateDictConfig, StateDictType
from torch.distributed.fsdp.wrap import (
    _or_policy,
    lambda_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

VOCABULARY, PROMPT, RESPONSE = 32, 3, 5


def add_adapters(model):
    model.requires_grad_(False)
    for layer in model.layers:
        layer.up, layer.down = Adapted(layer.up), Adapted(layer.down)
    return model


def init_fn(module):
    if dist.get_rank() != 0:
        module = module.to_empty(device=torch.device("cpu"), recurse=False)
    return module


def get_fsdp_wrap_policy(module, is_lora):
    policies = []
    if is_lora:
        policies.append(functools.partial(lambda_auto_wrap_policy, lambda_fn=is_trained_leaf))
    classes = {class_named(module, name) for name in module._no_split_modules}
    policies.append(functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes))
    return functools.partial(_or_policy, policies=policies)


def build(args, role, mesh):
    torch.manual_seed(3)
    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = Decoder(VOCABULARY, 12)
        model = add_adapters(model) if args.lora else model
    module = FSDP(
        model.to(torch.float32),
        cpu_offload=CPUOffload(offload_params=True) if role == "ref" and args.offload else None,
        param_init_fn=init_fn,
        use_orig_params=False,
        auto_wrap_policy=get_fsdp_wrap_policy(model, args.lora),
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD
        if mesh.ndim == 2
        else ShardingStrategy.FULL_SHARD,
        mixed_precision=MixedPrecision(torch.bfloat16, torch.float32, torch.float32),
        sync_module_states=True,
        device_mesh=mesh,
        forward_prefetch=False,
    )
    FSDP.set_state_dict_type(module, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig())
    return module


@torch.no_grad()
def move_optimizer(optimizer, device):
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state[param]
            for key, value in state.items():
                state[key] = (
                    value.to(device, non_blocking=True)
                    if isinstance(value, torch.Tensor)
                    else value
                )


def log_probs(model, tokens):
    logits = model(input_ids=tokens)
    logits.div_(0.9)
    logits = logits[:, PROMPT - 1 : -1].float()
    return torch.gather(logits.log_softmax(-1), 2, tokens[:, PROMPT:].unsqueeze(2)).squeeze(2)


def without_grad(model, tokens):
    model.eval()
    with torch.no_grad():
        return log_probs(model, tokens)


def weights_for_rollout(model, args):
    """Sums of the full weights by name; of adapters, one unit after another."""
    if not args.lora:
        return {
            name: value.full_tensor().sum().item() for name, value in model.state_dict().items()
        }
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDP) and name.replace("_fsdp_wrapped_module.", "").count(".") == 1:
            with FSDP.summon_full_params(module, writeback=False):
                state = {key: param for key, param in module.named_parameters() if "lora_" in key}
                found.update(
                    {f"{name}.{key}": param.detach().sum().item() for key, param in state.items()}
                )
                module._is_root = False
    assert found
    return found


def update(actor, optimizer, tokens, old, reference, args):
    actor.train()
    ratio = (log_probs(actor, tokens) - old).exp()
    advantage = torch.linspace(-1, 1, len(tokens))[:, None]
    loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    loss = loss + 0.1 * (log_probs(actor, tokens) - reference).square().mean()
    loss.backward()
    norm = actor.clip_grad_norm_(max_norm=args.grad_clip)
    if norm.isfinite():
        optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def checkpoint(actor, optimizer, folder, load):
    """One file a rank."""
    configs = (
        ShardedStateDictConfig(offload_to_cpu=True),
        ShardedOptimStateDictConfig(offload_to_cpu=True),
    )
    with FSDP.state_dict_type(actor, StateDictType.SHARDED_STATE_DICT, *configs):
        if load:
            state = read_own(folder)
            actor.load_state_dict(state["model"])
            optimizer.load_state_dict(
                FSDP.optim_state_dict_to_load(actor, optimizer, state["optimizer"])
            )
        else:
            write_own(
                {"model": actor.state_dict(), "optimizer": FSDP.optim_state_dict(actor, optimizer)},
                folder,
            )


def main(argv=None):
    args = parse(
        argv, steps=2, first=0, lr=0.005, grad_clip=1e9, lora=False, offload=False, hybrid=False,
        save_at=0, out="", resume="",
    )  # fmt: skip
    sizes = (1, dist.get_world_size())[1 - args.hybrid :]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("ddp", "fsdp")[1 - args.hybrid :])
    actor, ref = build(args, "actor", mesh), build(args, "ref", mesh)
    assert actor._fsdp_wrapped_module.embed.num_embeddings == VOCABULARY
    optimizer = torch.optim.AdamW(actor.parameters(), lr=args.lr, weight_decay=0.01)
    if args.resume:
        checkpoint(actor, optimizer, args.resume, load=True)
    losses = []
    for step in range(args.first, args.steps):
        move_optimizer(optimizer, torch.device("cpu"))
        tokens = torch.randint(0, VOCABULARY, (4, PROMPT + RESPONSE), generator=generator_of(step))
        old, reference = (without_grad(each, tokens) for each in (actor, ref))
        losses += [update(actor, optimizer, tokens, old, reference, args) for _ in range(2)]
        losses += weights_for_rollout(actor, args).values()
        if args.out and step + 1 == args.save_at:
            checkpoint(actor, optimizer, args.out, load=False)
    return losses
