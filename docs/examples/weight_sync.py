"""Send a LoRA model, merged, to a running vLLM or SGLang, while the trainer keeps its adapters.

    torchrun --nproc-per-node 3 weight_sync.py

The last rank stands for the engine; ``Sglang`` and ``Vllm`` have the signatures of the engines' own
calls and only forward them to it. The names of a bucket travel with the request, so the engine
knows no order, and the next bucket waits until the engine has loaded this one: collectives of the
trainer and of the engine never interleave.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM

from shardkit import full_params, shard_model
from shardkit.checkpoint import named_full_tensors

ask = ThreadPoolExecutor(1)


def merged_tensors(model, adapter="default"):
    """Yield (name, full tensor) of the base with LoRA merged. Collective; nothing is changed.

    A rank holds one bucket of weights and one layer's adapters. Not for DoRA or embeddings.
    """
    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)
    }
    for name, tensor in named_full_tensors(model):
        if ".lora_" in name:
            continue
        if name.endswith(".base_layer.weight"):
            layer = layers[name.removesuffix(".base_layer.weight")]
            with full_params(layer.lora_A), full_params(layer.lora_B):
                tensor += layer.get_delta_weight(adapter)
        yield name.removeprefix("base_model.model.").replace(".base_layer.", "."), tensor


def send(tensors, update, group, limit=1 << 30):
    """Broadcast tensors from rank 0 to the engine in buckets of ``limit`` bytes. Collective over the
    trainer's ranks, which all iterate.

    ``update(names, dtypes, shapes)`` asks the engine to receive a bucket, and returns when it has
    loaded it.
    """

    def put(bucket):
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.values()]
        shapes = [list(tensor.shape) for tensor in bucket.values()]
        loaded = ask.submit(update, list(bucket), dtypes, shapes)
        for tensor in bucket.values():
            dist.broadcast(tensor, src=0, group=group)
        loaded.result()  # raises what the engine raised

    bucket, size = {}, 0
    for name, tensor in tensors:
        if dist.get_rank() != 0:
            continue
        if bucket and size + tensor.nbytes > limit:
            put(bucket)
            bucket, size = {}, 0
        bucket[name], size = tensor.contiguous(), size + tensor.nbytes
    if bucket:
        put(bucket)


def send_to_sglang(tensors, engine, group, limit=1 << 30):
    """``engine``: ``sglang.Engine`` or a client of its HTTP routes; ``group`` is what its
    ``init_weights_update_group`` joined, with the trainer as rank 0.
    """

    def update(names, dtypes, shapes):
        engine.update_weights_from_distributed(names, dtypes, shapes, flush_cache=False)

    send(tensors, update, group, limit)
    if dist.get_rank() == 0:
        engine.flush_cache()


def send_to_vllm(tensors, client, group, limit=1 << 30):
    """``client``: with vLLM's four calls of a weight transfer; for its NCCL backend, unpacked, call
    ``broadcast`` of its communicator in place of ``dist.broadcast``.
    """

    def update(names, dtypes, shapes):
        client.update_weights({"names": names, "dtype_names": dtypes, "shapes": shapes})

    if dist.get_rank() == 0:
        client.start_weight_update()
    send(tensors, update, group, limit)
    if dist.get_rank() == 0:
        client.finish_weight_update()


class Sglang:
    """The signatures of ``sglang.Engine``; what it is told goes to the engine's rank."""

    def __init__(self, control):
        self.control = control

    def tell(self, *request):
        dist.broadcast_object_list([request], src=0, group=self.control)
        dist.barrier(self.control)  # the engine has loaded it

    def update_weights_from_distributed(
        self,
        names,
        dtypes,
        shapes,
        group_name="weight_update_group",
        flush_cache=True,
        load_format=None,
    ):
        self.tell("receive", names, dtypes, shapes)

    def flush_cache(self):
        self.tell("end")


class Vllm(Sglang):
    """The signatures of vLLM's ``VLLMWeightSyncClient``."""

    def start_weight_update(self):
        self.tell("receive", [], [], [])

    def update_weights(self, update_info):
        self.tell("receive", *(update_info[key] for key in ("names", "dtype_names", "shapes")))

    def finish_weight_update(self):
        self.tell("end")


def serve(control, weights):
    """The engine's rank: receive what is asked for until the end, and return it by name."""
    loaded = {}
    while True:
        dist.broadcast_object_list(request := [None], src=0, group=control)
        if request[0][0] == "end":
            dist.barrier(control)
            return loaded
        for name, dtype, shape in zip(*request[0][1:], strict=True):
            loaded[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.broadcast(loaded[name], src=0, group=weights)
        dist.barrier(control)


def main(argv=None):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, engine = dist.get_rank(), dist.get_world_size() - 1
    control, weights = dist.new_group([0, engine]), dist.new_group([0, engine])
    mesh = DeviceMesh("cpu", list(range(engine)), mesh_dim_names=("dp_shard",))  # made by all ranks

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, use_cache=False)
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(LlamaForCausalLM(config), lora)
    if rank == engine:
        expected = model.merge_and_unload().state_dict()
        equal = []
        for _ in range(2):
            received = serve(control, weights)
            equal.append(
                received.keys() == expected.keys()
                and all(torch.equal(value, expected[name]) for name, value in received.items())
            )
        assert equal == [True, True]
    else:
        shard_model(model, mesh=mesh)
        send_to_sglang(merged_tensors(model), Sglang(control), weights, limit=1 << 14)
        send_to_vllm(merged_tensors(model), Vllm(control), weights, limit=1 << 14)
        x = torch.randint(64, (2, 8))
        model(input_ids=x, labels=x).loss.backward()  # the adapters still train
    dist.barrier()
    return []


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
