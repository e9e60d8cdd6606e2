"""TRL's trainers on balanced batches in one process, beside TRL itself with the step as one batch."""

from __future__ import annotations

import copy

import datasets
import pytest
import tiny_text
import torch
from test_own_losses import check_equal, of
from torch.utils.data import DataLoader
from trainer_settings import BATCH_SIZE, trl_arguments
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from dflop.integrations.transformers import balance

SAMPLES = tiny_text.Samples(12)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, tiny_text.VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")


def takes_no_number():
    """A model as Qwen2.5-VL and Qwen3-VL say they are."""
    model = tiny_text.make_model()
    model.accepts_loss_kwargs = False
    return model


def with_experts():
    torch.manual_seed(0)
    small = copy.deepcopy(tiny_text.make_model().config.to_dict())
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {name: small[name] for name in names}
    sizes |= {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_key_value_heads=1))


def tuned(folder, model, **changes):
    """TRL's trainer of supervised fine-tuning."""
    given = trl_arguments(
        SFTConfig, folder, num_train_epochs=1, learning_rate=0.1, ddp_backend=None, **changes
    )
    rows = datasets.Dataset.from_list(SAMPLES.rows)
    return SFTTrainer(model, args=given, train_dataset=rows, processing_class=tokenizer())


def whole(trainer):
    trainer.args.gradient_accumulation_steps = 1
    steps = tiny_text.global_batches(SAMPLES, BATCH_SIZE, 2, 1, seed=3)
    loader = DataLoader(trainer.train_dataset, batch_sampler=steps, collate_fn=trainer.data_collator)
    trainer.get_train_dataloader = lambda: loader
    return trainer


@pytest.mark.parametrize("make", [takes_no_number, tiny_text.make_model])
@pytest.mark.parametrize(
    "changes", [{}, {"loss_type": "dft"}, {"label_smoothing_factor": 0.3}], ids=["nll", "dft", "smoothed"]
)
def test_the_loss_of_supervised_fine_tuning_stays(make, changes, tmp_path):
    """With one forward a microbatch; smoothing has two, as TRL has."""
    trainer = balance(tuned(tmp_path, make(), **changes), SAMPLES.costs)
    calls = []
    trainer.model.register_forward_hook(lambda model, *_: calls.append(torch.is_grad_enabled()))
    found = of(trainer)
    expected = whole(tuned(tmp_path, make(), **changes))
    check_equal(found, of(expected))
    assert calls.count(True) == 4
    assert changes.get("label_smoothing_factor") or len(calls) == 4
    logged = [
        [entry["num_tokens"] for entry in one.state.log_history if "num_tokens" in entry]
        for one in (trainer, expected)
    ]
    assert logged[0] == logged[1]


def preferring(folder, model, **changes):
    given = trl_arguments(DPOConfig, folder, num_train_epochs=1, ddp_backend=None, **changes)
    rows = [{"prompt": "w3 w4", "chosen": f" w{i}", "rejected": f" w{i} w{i + 1}"} for i in range(5, 17)]
    dataset = datasets.Dataset.from_list(rows)
    return DPOTrainer(
        model, copy.deepcopy(model), args=given, train_dataset=dataset, processing_class=tokenizer()
    )


@pytest.mark.parametrize("make", [tuned, preferring])
def test_the_loss_of_a_router_is_told_of(make, tmp_path, recwarn):
    """TRL adds it where the coefficient is not zero, whatever the configuration of the model says."""
    told = "`router_aux_loss_coef` is 0.5: the router's loss is a mean over a microbatch"
    with pytest.warns(UserWarning, match=told):
        balance(make(tmp_path, with_experts(), router_aux_loss_coef=0.5), SAMPLES.costs)
    recwarn.clear()
    balance(make(tmp_path, with_experts(), router_aux_loss_coef=0.0), SAMPLES.costs)
    assert not [one for one in recwarn if "router" in str(one.message)]
