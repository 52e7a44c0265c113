# ruff: noqa
"""A callback and arguments of transformers' Trainer, and accelerate's plugin."""

from contextlib import nullcontext

from accelerate import Accelerator
from accelerate import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FullyShardedDataParallel  # audit: mapped import
from transformers import Trainer, TrainerCallback, TrainingArguments


class GenerateCallback(TrainerCallback):
    def on_evaluate(self, args, state, control, model=None, **kwargs):
        gathered = (
            FullyShardedDataParallel.summon_full_params(model) if args.fsdp else nullcontext()
        )  # audit: mapped summon_full_params
        with gathered:
            model.generate(self.prompts)

    def on_save(self, args, state, control, model=None, **kwargs):
        if isinstance(model, (FullyShardedDataParallel, Wrapper)):  # audit: mapped FullyShardedDataParallel
            inner = model.module  # audit: mapped likely module
            print(model._fsdp_wrapped_module)  # audit: mapped likely _fsdp_wrapped_module
        inner = getattr(model, "_fsdp_wrapped_module", model)  # audit: noted _fsdp_wrapped_module
        names = [
            name.replace("_fsdp_wrapped_module.", "") for name, _ in inner.named_parameters()
        ]  # audit: noted _fsdp_wrapped_module
        model.module.save_pretrained(args.output_dir)  # audit: mapped likely module


class ClippingTrainer(Trainer):
    def training_step(self, model, inputs):
        loss = super().training_step(model, inputs)
        self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)
        self.model_wrapped.clip_grad_norm_(1.0)  # audit: mapped likely clip_grad_norm_
        return loss


arguments = TrainingArguments(
    "out", fsdp="full_shard auto_wrap", fsdp_config={"limit_all_gathers": True}
)  # audit: noted configuration
plain = TrainingArguments("out", fsdp="")
settings = dict(fsdp="hybrid_shard", learning_rate=1e-4)  # audit: noted configuration
plugin = FullyShardedDataParallelPlugin(
    sharding_strategy="FULL_SHARD"
)  # audit: noted accelerate.FullyShardedDataParallelPlugin
accelerator = Accelerator(fsdp_plugin=plugin)
model = accelerator.prepare(build())
with accelerator.no_sync(model):
    pass
