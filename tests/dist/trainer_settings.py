"""Settings of the trainers of transformers and TRL: plain SGD on CPU ranks, without clipping, each loss logged."""

from __future__ import annotations

import tiny_text

BATCH_SIZE = 3


def trainer_arguments(folder, **changes):
    from transformers import TrainingArguments

    options = {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH_SIZE,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": tiny_text.LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "seed": 3,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "ddp_backend": "gloo",
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**{**options, **changes})


def trl_arguments(kind, folder, ddp_backend="gloo", **changes):
    """The same as one of TRL's configurations has them."""
    given = trainer_arguments(folder, ddp_backend=ddp_backend).to_dict()
    kept = {name: given[name] for name in given if name in kind.__dataclass_fields__}
    for name in ("logging_dir", "hub_token", "push_to_hub_token", "warmup_ratio"):
        kept.pop(name, None)
    if "max_length" in kind.__dataclass_fields__:
        kept["max_length"] = None
    return kind(**{**kept, "bf16": False, "gradient_checkpointing": False, **changes})
