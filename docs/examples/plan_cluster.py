"""Choose how to shard a model on a cluster that this machine is not: no GPU, no process group, no
memory for weights.

python plan_cluster.py --ranks 16 --gpu-memory 80GB --context 4096
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shardkit import MeshSpec, MixedPrecisionPolicy, init_on_meta, plan_model
from shardkit.memory import plan_for_budget

# Llama 3.1 8B
CONFIG = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def main(argv=None, config=CONFIG):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--gpu-memory", default="80GB")
    parser.add_argument(
        "--context", type=int, default=4096, help="tokens of each rank's micro-batch"
    )
    args = parser.parse_args(argv)

    with init_on_meta():
        model = LlamaForCausalLM(LlamaConfig(**config))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    fsdp = plan_model(model, mesh=MeshSpec.sharded(args.ranks), mp_policy=policy)
    print(fsdp)

    nodes = max(1, args.ranks // args.ranks_per_node)
    hybrid = plan_model(
        model, mesh=MeshSpec.hybrid(replicate=nodes, shard=args.ranks // nodes), mp_policy=policy
    )
    print("\nOne replica a node instead:", *fsdp.diff(hybrid).splitlines()[:3], sep="\n  ")

    ids = torch.zeros(1, args.context, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    budget = plan_for_budget(model, args.gpu_memory, fsdp, batch=batch)
    print("\n", budget, sep="")

    print("\nThe same in plain torch ends with:\n")
    print("\n".join(budget.plan.to_python().splitlines()[-9:]))
    return budget


if __name__ == "__main__":
    main()
