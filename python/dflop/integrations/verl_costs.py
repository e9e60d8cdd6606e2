"""What samples of verl and EasyR1 cost: their own tokens, by the model's configuration alone.

configuration -> the model without values (`meta`) -> cost_of_parameters -> encoder and LLM work of a sample
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from dflop._native import ScheduleError
from dflop.integrations.even_parts import equal_parts, even_parts
from dflop.integrations.parameter_cost import cost_of_parameters
from dflop.integrations.row_costs import media_tokens, warn_of_unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflop.integrations.parameter_cost import ParameterCost

_WHOLE = 2**40
"""Units of work in the samples that are divided together: many enough for each, few enough to be added up."""


@dataclass(frozen=True)
class Counted:
    """Costs of a model's tokens."""

    trained: ParameterCost
    scored: ParameterCost
    """Of a forward alone."""
    media: dict[int, float]
    """Encoder tokens behind each LLM token that stands for a medium."""

    @classmethod
    def of(cls, model_config: Any) -> Counted:
        """Counts them.

        Args:
            model_config: verl's `HFModelConfig`.

        Returns:
            The costs, of a model with verl's adapters where `lora_rank` asks for some. A value model is taken
            to have no head.

        Raises:
            ValueError: transformers knows no such model, or its parameters cannot be counted.
        """
        return cls.of_model(_empty(model_config))

    @classmethod
    def of_model(cls, model: Any) -> Counted:
        """The same of a model.

        Args:
            model: it, with its adapters; its parameters may be without values.

        Returns:
            The costs.

        Raises:
            ValueError: its parameters cannot be counted.
        """
        trained = cost_of_parameters(model)
        warn_of_unknown(model)
        return cls(trained, cost_of_parameters(model, is_trained=False), media_tokens(model, trained))

    def work(self, rows: Any, *, is_trained: bool = True) -> Work:
        """Of some samples.

        Args:
            rows: with `input_ids`, nested, or padded beside an `attention_mask`.
            is_trained: whether gradients are computed.

        Returns:
            The work of each.
        """
        ids = rows["input_ids"]
        if ids.is_nested:
            values, offsets = ids.values(), ids.offsets()
        else:
            mask = rows["attention_mask"] if "attention_mask" in rows.keys() else torch.ones_like(ids)  # noqa: SIM118
            mask = mask.bool()
            values, offsets = ids[mask], torch.nn.functional.pad(mask.sum(dim=1).cumsum(dim=0), (1, 0))
        encoder = torch.zeros(len(offsets) - 1, dtype=torch.float64, device=values.device)
        for token, count in self.media.items():
            before = torch.nn.functional.pad(values.eq(token).cumsum(dim=0), (1, 0))[offsets]
            encoder += count * before.diff()
        # A device is waited for once.
        encoder, tokens = torch.stack([encoder, offsets.diff().double()]).tolist()
        cost = self.trained if is_trained else self.scored
        return Work.of(
            [cost(pair) for pair in zip(encoder, tokens, strict=True)], [int(one) for one in tokens]
        )


@dataclass(frozen=True)
class Work:
    """Of the samples that verl divides, in its order."""

    encoder: list[int]
    llm: list[int]
    tokens: list[int]
    max_tokens: int | None = None
    """Of a microbatch."""

    @classmethod
    def of(cls, costs: Sequence[tuple[float, float]], tokens: list[int]) -> Work:
        """In whole numbers.

        Args:
            costs: encoder and LLM work of each sample.
            tokens: its LLM tokens.

        Returns:
            The same work in units of which all samples together have `2**40`.
        """
        unit = sum(map(sum, costs)) / _WHOLE
        encoder, llm = ([round(cost / unit) for cost in part] for part in zip(*costs, strict=True))
        return cls(encoder, llm, tokens)

    def rows(self, start: int, stop: int) -> Work:
        """Of some in a row.

        Args:
            start: the first.
            stop: the one behind the last.

        Returns:
            Their work, in the same units.
        """
        parts = (part[start:stop] for part in (self.encoder, self.llm, self.tokens))
        return Work(*parts, max_tokens=self.max_tokens)

    def capped(self, max_tokens: int, group_size: int) -> Work:
        """For microbatches.

        Args:
            max_tokens: that none may have more of.
            group_size: samples in a row that stay together.

        Returns:
            The work of each group.
        """
        starts = range(0, len(self.tokens), group_size)
        grouped = [
            [sum(part[start : start + group_size]) for start in starts]
            for part in (self.encoder, self.llm, self.tokens)
        ]
        return replace(self, encoder=grouped[0], llm=grouped[1], tokens=grouped[2], max_tokens=max_tokens)

    def total(self, lengths: torch.Tensor) -> torch.Tensor:
        """What verl orders them by.

        Args:
            lengths: of the samples, as verl has them.

        Returns:
            Their work, int64, encoder and LLM together; of each sample of a group an equal share.

        Raises:
            ValueError: they are other samples.
        """
        share = len(lengths) // len(self.tokens)
        found = lengths.reshape(len(self.tokens), -1).sum(dim=1).tolist() if share else []
        if [int(one) for one in found] != self.tokens:
            message = (
                f"verl divides {len(lengths)} samples of {int(lengths.sum())} tokens, dflop counted "
                f"{len(self.tokens)} of {sum(self.tokens)}: must be the same"
            )
            raise ValueError(message)
        loads = [(encoder + llm) // share for encoder, llm in zip(self.encoder, self.llm, strict=True)]
        return torch.tensor(loads, dtype=torch.int64, device=lengths.device).repeat_interleave(share)

    def parts(self, loads: list[int], num_parts: int, *, equal_size: bool) -> list[list[int]] | None:
        """Lists of even work.

        Args:
            loads: of the samples to divide, as `total` gave them, or of as many of them in a row as verl
                divides at a time.
            num_parts: how many lists.
            equal_size: whether each has as many samples.

        Returns:
            Positions in `loads`; None where no lists of so few tokens were found: verl's own method looks
            for some, and takes more microbatches if it finds none either.
        """
        start = self._start_of(loads)
        encoder, llm = (part[start : start + len(loads)] for part in (self.encoder, self.llm))
        if equal_size:
            return equal_parts(encoder, llm, num_parts)
        tokens = self.tokens[start : start + len(loads)]
        try:
            return even_parts(encoder, llm, num_parts, tokens, self.max_tokens)
        except ScheduleError:
            return None

    def _start_of(self, loads: list[int]) -> int:
        """Where they begin: verl divides its mini-batches one by one if asked to keep them."""
        whole = [encoder + llm for encoder, llm in zip(self.encoder, self.llm, strict=True)]
        if len(loads) == len(whole):
            return 0
        for start in range(0, len(whole) - len(loads) + 1, len(loads)):
            if whole[start : start + len(loads)] == loads:
                return start
        message = f"verl divides {len(loads)} samples, must be among the {len(whole)} that dflop counted"
        raise ValueError(message)


def _empty(model_config: Any) -> Any:
    """The model without values, as verl trains it."""
    transformers: Any = import_module("transformers")
    # transformers writes into it how attention is computed.
    config = deepcopy(model_config.hf_config)
    if model_config.model_type == "value_model":
        kind = transformers.AutoModel
    else:
        kind = import_module("verl.utils.model").get_hf_auto_model_class(hf_config=config)
    with torch.device("meta"):
        # How attention is computed changes no parameter, and flash attention need not be installed for it.
        model = kind.from_config(
            config, attn_implementation="eager", trust_remote_code=model_config.trust_remote_code
        )
        if model_config.lora_rank > 0:
            peft: Any = import_module("peft")
            names = ("target_modules", "target_parameters", "exclude_modules")
            given = {name: _plain(getattr(model_config, name, None)) for name in names}
            given = {name: value for name, value in given.items() if value is not None}
            model = peft.get_peft_model(model, peft.LoraConfig(r=model_config.lora_rank, **given))
    return model


def _plain(value: Any) -> Any:
    """A list of the configuration as a list of Python."""
    return value if value is None or isinstance(value, str) else [str(one) for one in value]
