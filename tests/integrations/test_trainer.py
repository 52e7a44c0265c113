"""transformers' Trainer, unchanged, on sharded models: the function of docs/integrations.md, flags,
and 4 ranks.
"""

import inspect
from dataclasses import fields

import pytest
import torch
import torch.distributed as dist
from cpu_ranks import on_ranks
from other_trainers import (
    BATCH,
    LR,
    assert_same,
    batch,
    full,
    of_the_page,
    packages,
    plain_loop,
    rows,
    tiny,
    torchrun,
)
from transformers.distributed import DistributedConfig
from transformers.trainer_pt_utils import LabelSmoother

from shardkit import MixedPrecisionPolicy, shard_model, sharded_average, step_on_whole_matrices
from shardkit.checkpoint import save_pretrained
from shardkit.errors import ShardkitError
from shardkit.integrations import keep_sharded

packages("accelerate", "peft", "transformers.trainer", "transformers.models.llama.modeling_llama")

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def checkpointing():
    """The flag's name, which transformers changed."""
    from transformers import TrainingArguments

    names = {field.name for field in fields(TrainingArguments)}
    return (
        "activation_checkpointing"
        if "activation_checkpointing" in names
        else "gradient_checkpointing"
    )


@on_ranks(2, timeout=120)
def test_the_trainer_of_the_page(tmp_path):
    from transformers import LlamaForCausalLM

    train = of_the_page("with_trainer")
    with torchrun():
        trainer = train(model := tiny(), rows(), str(tmp_path))
        plain = plain_loop(4, accumulate=2, decay=0.0)
        steps = [sum(pair) / 2 for pair in zip(plain.losses[::2], plain.losses[1::2], strict=True)]
        assert logged(trainer, "loss") == pytest.approx(steps, abs=2e-6)
        assert logged(trainer, "grad_norm") == pytest.approx(plain.norms, rel=1e-6)
        plain.assert_like(model)
        assert type(trainer.model_wrapped) is type(model)  # nothing around it

        again = train(resumed := tiny(), rows(), str(tmp_path), resume=f"{tmp_path}/checkpoint-2")
        assert_same(full(model), full(resumed))
        assert logged(again, "loss") == logged(trainer, "loss")

        expected = torch.stack(
            [plain.model(**{k: v[None] for k, v in row.items()}).loss for row in rows()]
        ).mean()
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.item(), abs=1e-5)
        assert_same(full(LlamaForCausalLM.from_pretrained(tmp_path)), full(model))
        save_pretrained(model, tmp_path / "streamed")
        assert_same(full(LlamaForCausalLM.from_pretrained(tmp_path / "streamed")), full(model))


def short_run(folder, *, plan=None, optimizer=None, first=None, **options):
    """Three steps of Trainer; returns it and the model."""
    from transformers import Trainer, TrainingArguments

    model = shard_model(tiny(), **(plan or {}))
    common = {
        "per_device_train_batch_size": 2,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
    }
    common |= {
        "max_steps": 3,
        "train_sampling_strategy": "sequential",
        "max_grad_norm": 0.5,
        "save_strategy": "no",
    }
    common |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1}
    args = TrainingArguments(str(folder), **{**common, **options})
    optimizers = (optimizer(model) if optimizer else None, None)
    trainer = Trainer(model, args, train_dataset=rows(), eval_dataset=rows(), optimizers=optimizers)
    keep_sharded(trainer)
    if first:
        first(trainer)
    trainer.train()
    return trainer


def ema(model, made):
    """A callback that averages the weights of each step."""
    from transformers import TrainerCallback

    made.append(sharded_average(model, 0.5))

    class Average(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            made[0].update_parameters(model)

    return Average()


def muon(model):
    matrices = [param for param in model.parameters() if param.ndim == 2]
    return step_on_whole_matrices(torch.optim.Muon(matrices, lr=1e-3))


@on_ranks(2, timeout=120)
def test_flags_of_the_trainer_change_nothing_else(tmp_path):
    with torchrun():
        plain = plain_loop(3, decay=0.0)
        # before any training, too
        reference = short_run(tmp_path, first=lambda trainer: trainer.evaluate())
        plain.assert_like(reference.model)
        averages = []
        short_run(
            tmp_path, first=lambda trainer: trainer.add_callback(ema(trainer.model, averages))
        )
        expected = [
            full(plain_loop(steps, decay=0.0).model)["lm_head.weight"] for steps in (1, 2, 3)
        ]
        mean = (expected[0] / 2 + expected[1] / 2) / 2 + expected[2] / 2
        torch.testing.assert_close(
            full(averages[0])["module.lm_head.weight"], mean, rtol=1e-4, atol=2e-5
        )
        recomputed = short_run(tmp_path, **{checkpointing(): True})
        assert recomputed.model.is_gradient_checkpointing
        assert_same(full(recomputed.model), full(reference.model))
        # bf16=True beside a bf16 plan: the plan casts, and autocast does not cast again.
        by_the_plan = short_run(tmp_path, plan={"mp_policy": BF16})
        asked_too = short_run(tmp_path, plan={"mp_policy": BF16}, bf16=True)
        assert_same(full(asked_too.model), full(by_the_plan.model))
        assert not torch.equal(
            full(asked_too.model)["lm_head.weight"], full(reference.model)["lm_head.weight"]
        )
        smoothed = short_run(tmp_path, label_smoothing_factor=0.1)
        first = batch(rows()[:BATCH])
        loss = LabelSmoother(0.1)(tiny()(**first), first["labels"], shift_labels=True)
        assert logged(smoothed, "loss")[0] == pytest.approx(loss.item(), abs=2e-6)
        best = {
            "load_best_model_at_end": True,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "save_steps": 1,
        }
        best_run = short_run(tmp_path, optimizer=muon, save_strategy="steps", **best)
        losses = logged(best_run, "eval_loss")
        assert best_run.evaluate()["eval_loss"] == min(losses) != losses[0]


@on_ranks(2, timeout=120)
def test_optimizers_step_as_they_can(tmp_path):
    from transformers.optimization import Adafactor

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    def steps_on(run):
        ways = ("steps_on_local_shards", "steps_on_whole_matrices")
        return " ".join(way for way in ways if hasattr(type(run.optimizer.optimizer), way))

    def by_hand(model):
        options = {"scale_parameter": False, "relative_step": False, "weight_decay": 0.0}
        return step_on_whole_matrices(Adafactor(list(model.parameters()), lr=LR, **options))

    with torchrun():
        run = short_run(tmp_path, optim="adafactor")
        assert steps_on(run) == "steps_on_whole_matrices"
        assert_same(full(run.model), full(short_run(tmp_path, optimizer=by_hand).model))
        assert steps_on(short_run(tmp_path)) == "steps_on_local_shards"
        by_group = [
            short_run(tmp_path, optimizer=lambda model, kind=kind: kind(model.parameters(), lr=LR))
            for kind in (Own, torch.optim.SGD)
        ]
        assert [steps_on(run) for run in by_group] == ["", "steps_on_local_shards"]
        assert_same(*(full(run.model) for run in by_group))


@on_ranks(2, timeout=120)
def test_adapters(tmp_path):
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file

    train = of_the_page("with_trainer")

    def build():
        base = tiny()  # seeds the adapters too
        return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))

    with torchrun():
        train(model := build(), rows(), str(tmp_path))
        train(resumed := build(), rows(), str(tmp_path), resume=f"{tmp_path}/checkpoint-2")
    assert_same(full(resumed), full(model))
    saved = load_file(tmp_path / "adapter_model.safetensors")  # the adapters alone, and whole
    trained = {
        name.replace(".default", ""): value
        for name, value in full(model).items()
        if "lora_" in name
    }
    assert_same(saved, trained)
    assert all(value.any() for value in saved.values())


@on_ranks(2, timeout=120)
def test_what_is_refused_is_one_error_on_every_rank(tmp_path):
    def error(**options):
        with pytest.raises(ShardkitError) as raised, torchrun():
            short_run(tmp_path, **options)
        return str(raised.value)

    assert error(bf16=True).startswith(
        "mixed_precision is bf16, and the model computes in torch.float32"
    )
    assert error(fsdp=True).startswith("accelerate is told to shard too")
    # accelerate takes a CPU rank of torchrun for the only process
    if not torch.cuda.is_available():
        assert "trains on 1 processes, and the process group has 2 ranks" in error(use_cpu=False)
    with torchrun():
        from transformers import Trainer, TrainingArguments

        args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
        with pytest.raises(ShardkitError, match="is not sharded"):
            keep_sharded(Trainer(tiny(), args))
        with pytest.raises(ShardkitError, match=r"Llama.* is not sharded"):
            keep_sharded(tiny())
        with pytest.raises(ShardkitError, match="got dict"):
            keep_sharded({})


# transformers' own sharding.


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    }
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, bos_token_id=1, eos_token_id=1, use_cache=False, **sizes)
    )


takes_plans = pytest.mark.skipif(
    "fsdp_plan" not in inspect.signature(DistributedConfig).parameters,
    reason="transformers 5.20 takes no fsdp_plan",
)


@takes_plans
@on_ranks(2, timeout=120)
def test_a_model_that_transformers_has_sharded_resumes(tmp_path):
    from transformers import GPT2LMHeadModel

    train = of_the_page("sharded_by_transformers")
    with torchrun():
        gpt2().save_pretrained(source := str(tmp_path / "gpt2"))
        dist.barrier()
        trainer = train(source, rows(), str(tmp_path))
        again = train(source, rows(), str(tmp_path), resume=f"{tmp_path}/checkpoint-2")
        assert_same(full(trainer.model), full(again.model))
        assert logged(again, "loss") == logged(trainer, "loss")
        assert_same(full(GPT2LMHeadModel.from_pretrained(tmp_path)), full(trainer.model))
