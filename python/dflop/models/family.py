"""What all families share: the configuration, the whole model (without memory), and the pieces taken from it.

    config.json --> the whole Hugging Face model on the meta device --> encoder, runs of LLM layers --> values

A family's file (`models/families/NAME.py`) says the rest: classes, names, rules, and how its encoder runs.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from dflop.models.adapter import AttentionShape
from dflop.models.backbone import LlmStage, backbone_rules, layer_plan
from dflop.models.encoder import Encoder, EncoderRun, cut_to, numbered
from dflop.models.expert_ranks import ALL_EXPERTS, deal_experts
from dflop.models.layer_kinds import heads_of, keep_none_for_others
from dflop.models.packing import PACKED
from dflop.models.parameters import fill_parameter, materialise
from dflop.models.rules import check_rules, trained_part
from dflop.models.tensor import WHOLE, cut_layer
from dflop.models.towers import backbone_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from dflop.models.adapter import EncoderInput, MediaGrid
    from dflop.models.expert_ranks import ExpertRank
    from dflop.models.media import MediaFile
    from dflop.models.rules import Rule
    from dflop.models.tensor import LayerPlan, TensorRank

_STD = 0.02
"""Standard deviation of random weights where the configuration names none."""
_UNSET = -1


class FamilyAdapter(ABC):
    """`ModelAdapter`, except for the methods that a family's own file adds."""

    family: str
    config_class: Any
    """Class of Hugging Face's configuration."""
    model_class: Any
    """Class of Hugging Face's model, with `.lm_head`, the backbone below `.model` (`towers.BACKBONES`)."""
    encoder_modules: tuple[str, ...]
    """Names, below `.model`, of the modules and parameters of the encoder and its projector."""
    encoder_config: str = "vision_config"
    """Field of the configuration that describes the encoder."""
    encoder_attention: str = "sdpa"
    """Name of the attention function of the encoder's layers."""
    runs_read_inputs: bool = False
    """Whether all runs of the encoder's layers need the inputs; if false, only the first run does."""
    field_prefix: str
    num_encoder_layers: int
    input_shape: tuple[int, ...]
    encoder_tokens_per_tile: int

    def __init__(self, model_dir: Path) -> None:
        """Reads `config.json` of `model_dir`.

        Args:
            model_dir: folder with `config.json` and the processor's files.

        Raises:
            FileNotFoundError: there is no `config.json`.
            ProfileError: the configuration asks for what this family does not do; the message names the
                field.
        """
        self.model_dir = model_dir
        self.config = self.read_config()
        _, self.field_prefix = trained_part(self._content())
        text = self.text
        check_rules(model_dir / "config.json", [*backbone_rules(text), *self.rules()], self.field_prefix)
        self.num_llm_layers: int = text.num_hidden_layers
        self.hidden_size: int = text.hidden_size
        self.vocab_size: int = text.vocab_size
        self.attention = AttentionShape(text.num_attention_heads, *heads_of(text))

    @abstractmethod
    def rules(self) -> list[Rule]:
        """What the configuration must be, in addition to the rules of all backbones."""

    @abstractmethod
    def encode_run(
        self, model: Any, batch: EncoderInput, run: EncoderRun, incoming_RU: torch.Tensor | None
    ) -> torch.Tensor:
        """Runs layers of the encoder; the first run has the modules before them, the last the projector.

        Args:
            model: holds those of `encoder_modules` that the run needs, under their names.
            batch: at least one input; only the first run has `inputs_N`, unless `runs_read_inputs`.
            run: which layers.
            incoming_RU: [R, U], hidden states from the run before; none for the first.

        Returns:
            [R, U] for the next run; features_ED [E, D], medium after medium, from the last.
        """

    def encode(self, model: Any, batch: EncoderInput) -> torch.Tensor:
        """The whole encoder's forward pass.

        Args:
            model: `encoder_modules`, under their names.
            batch: at least one input.

        Returns:
            features_ED: [E, D], medium after medium.
        """
        return self.encode_run(model, batch, self.encoder_run(None), None)

    @property
    def feature_width(self) -> int:
        """Values of a feature; see `ModelAdapter.feature_width`."""
        return self.hidden_size

    @property
    def num_run_layers(self) -> int:
        """How many layers of the encoder a forward runs, by default all; these are dealt out to stages."""
        return self.num_encoder_layers

    def row_width(self, layer: int) -> int:
        """Values of a row that passes to a run beginning with `layer`: by default a hidden state."""
        del layer
        return self.vision.hidden_size

    def num_rows(self, media: Sequence[MediaGrid]) -> int:
        """Rows of media between two runs: their encoder tokens, by default an input each."""
        return sum(grid.num_inputs for grid in media)

    @abstractmethod
    def tower_layers(self, model: Any) -> Any:
        """All layers of the encoder's tower, as Hugging Face's model has them."""

    @abstractmethod
    def before_layers(self, model: Any) -> Sequence[nn.Module]:
        """The modules before the layers, which turn inputs into hidden states."""

    def cut_to_run(self, model: Any, run: EncoderRun) -> None:
        """Removes from the encoder's modules, in place, all that does not belong to a run of its layers.

        Args:
            model: as in `encode_run`, whole.
            run: what to keep.
        """
        cut_to(model, run, self.tower_layers(model), self.before_layers(model))

    def layers_in_order(self, model: Any) -> list[nn.Module]:
        """The encoder's layers that a forward runs, in the order in which it runs them.

        Args:
            model: as in `encode_run`.

        Returns:
            Hugging Face's modules.
        """
        end = self.num_run_layers
        return [layer for number, layer in numbered(self.tower_layers(model)) if number < end]

    def encoder_run(self, layers: range | None) -> EncoderRun:
        """A run of the encoder's layers.

        Args:
            layers: numbers of the layers; None: all.

        Returns:
            The run.

        Raises:
            ValueError: there are no such layers.
        """
        num_layers = self.num_run_layers
        layers = range(num_layers) if layers is None else layers
        if not 0 <= layers.start <= layers.stop <= num_layers or len(layers) != layers.stop - layers.start:
            message = f"layers {layers.start} to {layers.stop} of an encoder of {num_layers}"
            raise ValueError(message)
        return EncoderRun(layers.start, layers.stop, num_layers)

    @abstractmethod
    def encoder_plan(self) -> LayerPlan:
        """How tensor parallelism cuts an encoder layer: its heads and the width of its MLP."""

    def idle_media(self, media: Sequence[MediaGrid]) -> list[MediaGrid]:
        """What makes a forward run all layers, where some media alone would leave layers out.

        Args:
            media: that are read; at least one.

        Returns:
            Small media of the kinds that run the other layers; none where every medium runs all.
        """
        del media
        return []

    def plan_of(self, layer: nn.Module) -> LayerPlan:
        """The plan of one layer, where the encoder has layers of several kinds.

        Args:
            layer: of the encoder.

        Returns:
            The plan of all of them.
        """
        del layer
        return self.encoder_plan()

    def llm_plan(self, kind: str | None = None, is_dense: bool = False) -> LayerPlan:
        """How tensor parallelism cuts a layer of the backbone.

        Args:
            kind: of the layer, where there are several.
            is_dense: whether it has no experts though others have.

        Returns:
            The plan.
        """
        return layer_plan(self.text, kind, is_dense)

    def cut_rules(self) -> list[Rule]:
        """What else the configuration must be so that tensor parallelism can cut the encoder's layers."""
        return []

    def check_cut(self) -> None:
        """Refuses an encoder whose layers cannot be cut.

        Raises:
            ProfileError: the configuration breaks a rule; the message names the field.
        """
        check_rules(self.model_dir / "config.json", self.cut_rules(), self.field_prefix)

    @abstractmethod
    def pixels(
        self, file: MediaFile, kind: str, frame_indices: Sequence[int], grid: MediaGrid | None = None
    ) -> torch.Tensor:
        """What the encoder reads of one medium; see `ModelAdapter.pixels`."""

    @abstractmethod
    def example_media(self, num_tiles: int) -> list[MediaGrid]:
        """Media of a usual kind with `num_tiles` tiles in all; see `ModelAdapter.example_media`."""

    def positions(
        self, input_ids_T: torch.Tensor, feature_mask_T: torch.Tensor, media: Sequence[MediaGrid]
    ) -> torch.Tensor:
        """Positions of one sample; see `ModelAdapter.positions`.

        Args:
            input_ids_T: of the sample.
            feature_mask_T: where features go.
            media: of the sample, in order.

        Returns:
            [T], from 0.
        """
        del feature_mask_T, media
        return torch.arange(input_ids_T.shape[0])

    @property
    def text(self) -> Any:
        """Configuration of the backbone."""
        return self.config.text_config

    @property
    def vision(self) -> Any:
        """Configuration of the encoder."""
        return getattr(self.config, self.encoder_config)

    def read_config(self) -> Any:
        """A new configuration object, since a model that is built writes into its own. Untyped upstream."""
        return self.config_class.from_dict(trained_part(self._content())[0])

    def _content(self) -> dict[str, Any]:
        return json.loads((self.model_dir / "config.json").read_bytes())

    def build_whole(
        self, attention: str = PACKED, encoder_attention: str | None = None
    ) -> tuple[nn.Module, Any]:
        """The whole model on the meta device; only its buffers are real, on the CPU.

        Args:
            attention: name of the backbone's attention function.
            encoder_attention: name of the encoder's attention function; None: the family's own.

        Returns:
            The model, to take pieces from, and the configuration it was built with.
        """
        config = self.read_config()
        with torch.device("meta"):
            whole: Any = self.model_class(config)
        # Layers look their attention function up by this name at each call.
        config.text_config._attn_implementation = attention
        getattr(config, self.encoder_config)._attn_implementation = (
            encoder_attention or self.encoder_attention
        )
        fill_buffers(whole)
        keep_none_for_others(backbone_of(whole).layers)
        whole.tie_weights()
        # As after `from_pretrained`: Qwen2-Audio's class freezes its positions, and loading undoes that.
        whole.requires_grad_(True)
        return whole, config

    def std(self, name: str) -> float:
        """Standard deviation that the parameter of this full name is drawn with."""
        is_tower = name.startswith(f"model.{self.encoder_modules[0]}.")
        return float(getattr(self.vision if is_tower else self.text, "initializer_range", _STD))

    def fill(self, parameter: torch.Tensor, name: str, seed: int, std: float) -> None:
        """Draws a parameter where training starts from random weights.

        Args:
            parameter: filled in place.
            name: full Hugging Face name.
            seed: of the run.
            std: standard deviation of weights.
        """
        fill_parameter(parameter, name, seed, std)

    def build_encoder(
        self,
        device: torch.device,
        dtype: torch.dtype,
        seed: int | None,
        layers: range | None = None,
        *,
        tensor: TensorRank = WHOLE,
    ) -> Encoder:
        """The encoder with its projector, or a run of its layers; see `ModelAdapter.build_encoder`.

        Args:
            device: where its parameters shall live.
            dtype: of its parameters.
            seed: the values depend on it and on the parameters' names alone; none: no values yet.
            layers: layers of a stage, out of `num_run_layers`; None: all.
            tensor: rank of a tensor group whose part of the layers is built. The rest of the encoder is whole
                on each rank.

        Returns:
            `forward(EncoderInput) -> features_ED` [E, D]; of a run `forward(EncoderInput, hidden_RU)`.

        Raises:
            ProfileError: its layers cannot be cut over so many ranks; the message names the field.
            ValueError: there are no such layers.
        """
        whole, _ = self.build_whole()
        encoder = Encoder(whole, self, self.encoder_run(layers))
        if not (encoder.run.is_first and encoder.run.is_last):
            self.cut_to_run(encoder.model, encoder.run)
        if tensor.degree > 1:
            self.check_cut()
            for layer in encoder.layers_in_order():
                cut_layer(layer, self.plan_of(layer), tensor.degree, tensor.rank)
        materialise(encoder, device, dtype, seed, self.std, self.fill)
        return encoder

    def build_llm_stage(
        self,
        first_layer: int,
        num_layers: int,
        device: torch.device,
        dtype: torch.dtype,
        seed: int | None,
        *,
        tensor: TensorRank = WHOLE,
        experts: ExpertRank = ALL_EXPERTS,
    ) -> LlmStage:
        """A run of layers of the backbone; see `ModelAdapter.build_llm_stage`.

        A run of 0 layers is the embedding alone (`first_layer` is 0), or norm and head alone (`first_layer`
        is `num_llm_layers`). In this form the profiler measures them.

        Args:
            first_layer: from 0.
            num_layers: layers of the run.
            device: where its parameters shall live.
            dtype: of its parameters.
            seed: the values depend on it and on the parameters' names alone; none: no values yet.
            tensor: rank of a tensor group whose part of layers and vocabulary is built.
            experts: rank of an expert group whose experts are built.

        Returns:
            `forward(LlmInput, incoming) -> hidden_TD`, or the summed loss from the last stage.

        Raises:
            ValueError: there are no such layers.
            ProfileError: they cannot be cut over so many ranks; the message names the field.
        """
        last = first_layer + num_layers
        if not 0 <= first_layer <= last <= self.num_llm_layers:
            message = f"layers {first_layer} to {last} of a backbone of {self.num_llm_layers}"
            raise ValueError(message)
        whole, _ = self.build_whole()
        # A run of 0 layers has only that end of the backbone at which it stands.
        stage = LlmStage(whole, range(first_layer, last), first_layer == 0, last == self.num_llm_layers)
        if tensor.degree > 1:
            stage.cut(self.llm_plan, tensor)
        deal_experts(stage.layers_in_order(), self.text, experts)
        materialise(stage, device, dtype, seed, self.std, self.fill)
        return stage

    def build_llm_layers(
        self, num_layers: int, device: torch.device, dtype: torch.dtype, seed: int
    ) -> LlmStage:
        """Layers of the backbone without its embedding, norm and head; see `ModelAdapter.build_llm_layers`.

        Args:
            num_layers: at least 1, at most `num_llm_layers`.
            device: where its parameters shall live.
            dtype: of its parameters.
            seed: the values depend on it and on the parameters' names alone.

        Returns:
            `forward(LlmInput, hidden_TD) -> hidden_TD`.
        """
        whole, _ = self.build_whole()
        stage = LlmStage(whole, range(num_layers), is_first=False, is_last=False)
        materialise(stage, device, dtype, seed, self.std, self.fill)
        return stage

    def reference_model(self, seed: int, dtype: torch.dtype = torch.float32) -> Any:
        """Hugging Face's whole model on the CPU, with the parameters of the pieces; tests compare with it.

        Args:
            seed: as for the pieces.
            dtype: of its parameters.

        Returns:
            The model in training mode, with Hugging Face's own attention.
        """
        whole, _ = self.build_whole("sdpa", "sdpa")
        materialise(whole, torch.device("cpu"), dtype, seed, self.std, self.fill)
        return whole


def fill_buffers(whole: Any) -> None:
    """Gives the buffers of a model on the meta device their values, by Hugging Face's own initialisation.

    Args:
        whole: a `PreTrainedModel`; its parameters stay as they are.

    Raises:
        ValueError: a buffer gets no value; the message names it.
    """
    for path, module in whole.named_modules():
        empty = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        for name in empty:
            buffer = module.get_buffer(name)
            module._buffers[name] = torch.full(buffer.shape, _UNSET, dtype=buffer.dtype)
        if not empty:
            continue
        whole._init_weights(module)
        for name in empty:
            buffer = module.get_buffer(name)
            if name == "position_ids":
                # Only constructors of towers make this buffer: it holds the number of each patch.
                buffer.copy_(torch.arange(buffer.shape[-1]))
            elif bool((buffer == _UNSET).all()):
                message = (
                    f"buffer `{path}.{name}` of {type(whole).__name__} has no values before weights are read"
                )
                raise ValueError(message)
