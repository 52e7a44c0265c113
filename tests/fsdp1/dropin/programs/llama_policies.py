"""What llama_finetune.py imports: precision policies, wrapping policies and checkpoint handlers of
its own.
"""

import functools

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import is_trained_leaf
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, StateDictType
from torch.distributed.fsdp.fully_sharded_data_parallel import CPUOffload
from torch.distributed.fsdp.wrap import (
    _or_policy,
    lambda_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

PRECISION = {
    "none": None,
    "bf16": MixedPrecision(
        torch.bfloat16, torch.bfloat16, torch.bfloat16, cast_forward_inputs=True
    ),
    "mixed": MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16
    ),
}
OFFLOAD = CPUOffload(offload_params=True)


def get_llama_wrapper():
    """Decoder layers are units."""
    return functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}
    )


def fsdp_auto_wrap_policy(*transformer_layers):
    """Layers are units, and every leaf that trains is one of its own: frozen and trained ones never
    share a unit.
    """
    lambda_policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=is_trained_leaf)
    transformer_policy = functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls=set(transformer_layers)
    )
    return functools.partial(_or_policy, policies=[lambda_policy, transformer_policy])


def save_model_and_optimizer_sharded(model, directory, optimizer=None):
    """A directory of torch.distributed.checkpoint, each rank its shards."""
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state_dict = {"model": model.state_dict()}
        if optimizer is not None:
            state_dict["optim"] = FSDP.optim_state_dict(model, optimizer)
        dcp.save(
            state_dict,
            storage_writer=dcp.FileSystemWriter(directory),
            planner=dcp.DefaultSavePlanner(),
        )
    dist.barrier()


def load_model_sharded(model, directory):
    """Read what save_model_and_optimizer_sharded wrote, into a wrapped model."""
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        checkpoint = {"model": model.state_dict()}
        dcp.load(state_dict=checkpoint, storage_reader=dcp.FileSystemReader(directory))
        model.load_state_dict(checkpoint["model"])


def load_optimizer_sharded(model, optimizer, directory):
    """The optimizer's part of the same directory."""
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.zeros_like(param)
            rate, group["lr"] = group["lr"], 0.0
        optimizer.step()  # makes the state that is then overwritten
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = rate
        state = {"optim": FSDP.optim_state_dict(model, optimizer)}
        dcp.load(state_dict=state, storage_reader=dcp.FileSystemReader(directory))
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optim"]))
