"""TRL's trainers that generate, as far as their settings are looked at; how they train: tests/dist/test_generations.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dflop.integrations.generations import balance_generations, is_generating
from dflop.integrations.transformers import balance

pytest.importorskip("trl")


def grpo(**options):
    """A trainer as far as its settings are looked at."""
    from trl import GRPOTrainer

    given = {"steps_per_generation": 2, "gradient_accumulation_steps": 2}
    of_args = {name: options.pop(name, value) for name, value in given.items()}
    trainer = object.__new__(options.pop("kind", GRPOTrainer))
    trainer.args = SimpleNamespace(**of_args)
    alone = dict.fromkeys(("get_tp_size", "get_cp_size", "get_sp_size"), lambda: 1)
    vars(trainer).update({"loss_type": "dapo", **alone, **options})
    return trainer


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"loss_type": "new"}, "`loss_type` is `new`, must be one of `dapo`, `cispo`, `vespo`, `grpo`"),
        ({"get_cp_size": lambda: 2}, "2 ranks read the same samples"),
        ({"tools": [print], "_is_vlm": True}, "it has `tools`, which may return pictures"),
        (
            {"loss_type": "bnpo"},
            "`loss_type` is `bnpo`, and it divides by the tokens of a microbatch: take `dapo`",
        ),
        (
            {"top_entropy_quantile": 0.2},
            "`top_entropy_quantile` is 0.2, a quantile over the tokens of a micro",
        ),
        ({"_entropy_bonus_enabled": True}, "the entropy bonus is a mean over the tokens of a microbatch"),
        (
            {"aux_loss_enabled": True, "router_aux_loss_coef": 0.1},
            "of a router's loss that is a mean over a microbatch: set it to 0.0",
        ),
        (
            {"steps_per_generation": 3},
            "`steps_per_generation` is 3 and `gradient_accumulation_steps` is 2: one",
        ),
    ],
)
def test_generations_whose_parts_depend_on_their_microbatch_are_refused(options, reason):
    with pytest.raises(ValueError, match=f"a `GRPOTrainer`, .*{reason}"):
        balance_generations(grpo(**options))


def test_a_trainer_with_generations_of_its_own_is_refused():
    from trl import GRPOTrainer

    class Own(GRPOTrainer):
        def _prepare_inputs(self, inputs):
            return inputs

    with pytest.raises(
        ValueError, match=r"a `Own`, .* its `_prepare_inputs` is not TRL's own \(1.16 was tried\)"
    ):
        balance_generations(grpo(kind=Own))


def test_costs_of_generations_are_not_given():
    trainer = grpo()
    trainer.args = SimpleNamespace(
        **vars(trainer.args),
        world_size=1,
        n_gpu=0,
        label_smoothing_factor=0.0,
        average_tokens_across_devices=True,
    )
    trainer.train_dataset = [1]
    assert is_generating(trainer)
    for options in ({"costs": [(1, 1)]}, {"model_dir": "there"}, {"max_tokens": 9}):
        (name,) = options
        with pytest.raises(ValueError, match=f"`{name}` is given, and the trainer generates its samples"):
            balance(trainer, **options)
