"""Runs of `dflop train` on a tiny model of any family, from files to files, and the plain loop that it must equal."""

from __future__ import annotations

import copy
import json
import random
from types import SimpleNamespace

import torch
from conformance import UNTOLD_NORM, Medium, hugging_face, pretrained, write_model
from conformance_settings import (
    AUDIO_END,
    AUDIO_START,
    IMAGE,
    SETTINGS,
    SOUND,
    VIDEO,
    VISION_END,
    VISION_START,
)
from demo_run import python
from made_up import made_up_profile
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from tiny_families import OF_SOUND
from transformers import Trainer

from dflop._native import Dataset, run_cli
from dflop.checking.check import check
from dflop.data.dataset import sample_from_encoded
from dflop.models import load_adapter
from dflop.models.adapters import add_adapters, is_of_projector
from dflop.models.experts import has_experts, num_experts
from dflop.models.parameters import component_of
from dflop.profiling.artifact import hash_config

SEED, RATE, DECAY = 3, 1e-3, 0.1
LORA = {"lora_rank": 4, "lora_alpha": 6.0}
NUM_TURNS = 2
"""How often each content of `SETTINGS` stands in the data: with other sizes the second time."""
PARTS = {
    "full": {"encoder", "projector", "llm"},
    "projector": {"projector"},
    "frozen-encoder": {"projector", "llm"},
    "frozen-llm": {"encoder", "projector"},
}
_MARKS = {"image": "<image>", "video": "<video>", "audio": "<audio>"}
_TOKENS = {
    "llava_onevision": ("<image>", "<video>"),
    "llava": ("<image>",),
    "llava_next": ("<image>",),
    "idefics3": ("<image>",),
    "gemma3": ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    "gemma4": ("<|image|>", "<|video|>"),
    "lfm2_vl": ("<image>",),
    "lighton_ocr": ("<|image_pad|>",),
    "minicpmv4_6": ("<|image_pad|>",),
    "mistral3": ("[IMG]",),
    "smolvlm": ("<image>", "<video>"),
    "internvl": ("<IMG_CONTEXT>", "<video>"),
    "qwen2_vl": ("<|image_pad|>", "<|video_pad|>"),
    "qwen2_5_vl": ("<|image_pad|>", "<|video_pad|>"),
    "qwen2_5_omni": ("<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>"),
    "qwen3_omni_moe": ("<|image_pad|>", "<|video_pad|>", "<|audio_pad|>"),
    "qwen3_vl": ("<|image_pad|>", "<|video_pad|>"),
    "qwen3_vl_moe": ("<|image_pad|>", "<|video_pad|>"),
    "qwen3_5": ("<|image_pad|>", "<|video_pad|>"),
    "qwen3_5_moe": ("<|image_pad|>", "<|video_pad|>"),
    "glm4v": ("<|image|>", "<|video|>"),
    "glm4v_moe": ("<|image|>", "<|video|>"),
    "glm46v": ("<|image|>", "<|video|>"),
    "glm_ocr": ("<|image|>", "<|video|>"),
    "paddleocr_vl": ("<|IMAGE_PLACEHOLDER|>",),
    "qwen2_audio": ("<|AUDIO|>",),
    "audioflamingo3": ("<sound>",),
    "voxtral": ("[AUDIO]",),
}
"""What the family's text has in the places of features, for ids `IMAGE` and `VIDEO`, or `SOUND`."""
_AROUND = {
    "qwen2_5_omni": {
        VISION_START: "<|vision_bos|>",
        VISION_END: "<|vision_eos|>",
        AUDIO_START: "<|audio_bos|>",
        AUDIO_END: "<|audio_eos|>",
    },
    "qwen3_omni_moe": {
        VISION_START: "<|vision_start|>",
        VISION_END: "<|vision_end|>",
        AUDIO_START: "<|audio_start|>",
        AUDIO_END: "<|audio_end|>",
    },
}
"""Tokens around media, by their ids, where positions depend on them."""
_ADDED = {"idefics3": ("<fake_token_around_image>", "<end_of_utterance>")}
"""Tokens that the family's processor adds where the tokenizer lacks them."""
_TEMPLATE = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\n' -}}"
    "{%- if message.content is string -%}{{- message.content -}}{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'text' -%}{{- part.text -}}{%- else -%}{{- MARKS[part.type] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{- '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def trains(plan, recipe):
    """Has the plan of a file be made for what a recipe trains."""
    read = json.loads(plan.read_text())
    parts = PARTS.get(recipe, {"projector", "llm"})
    read["trained"] = {part: part in parts for part in ("encoder", "projector", "llm")}
    read["trained"]["lora_rank"] = LORA["lora_rank"] if recipe == "lora" else 0
    plan.write_text(json.dumps(read))


def write_tokenizer(folder, family):
    """A byte-level tokenizer without merges, whose feature tokens have the ids of `conformance`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    first = SOUND if family in OF_SOUND else IMAGE
    known = len(special) + len(alphabet)
    named = dict(enumerate(_ADDED.get(family, ()), known)) | dict(enumerate(_TOKENS[family], first))
    named |= (around := _AROUND.get(family, {}))
    filled = [named.get(i, f"<|unused-{i}|>") for i in range(known, max(SOUND, *around, 0) + 1)]
    assert IMAGE + 1 == VIDEO
    names = [*special, *alphabet, *filled]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in (*special, *filled)])
    tokenizer.save(str(folder / "tokenizer.json"))
    marks = {kind: _mark(family, kind) for kind in _MARKS}
    template = "{%- set MARKS = " + json.dumps(marks) + " -%}" + _TEMPLATE
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_processor(folder, adapter):
    """What the processor of some families reads of a file of its own, as published models have it."""
    vision = getattr(adapter.config, "vision_config", None)
    if adapter.family in ("idefics3", "smolvlm"):
        side = vision.image_size // vision.patch_size // adapter.config.scale_factor
        fields = {"image_seq_len": side**2}
    elif adapter.family in ("mistral3", "lighton_ocr"):
        merged = adapter.config.spatial_merge_size
        fields = {"patch_size": vision.patch_size, "spatial_merge_size": merged}
    elif adapter.family == "qwen2_audio":
        # Without it the processor has a template that asks for a helpful assistant.
        template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
        (folder / "chat_template.jinja").write_text(template)
        return
    else:
        return
    (folder / "processor_config.json").write_text(json.dumps(fields))


def _mark(family, kind):
    """What a template writes for a medium: the placeholder of the family."""
    tokens = _TOKENS[family]
    if family == "gemma3":
        # It stands before the features.
        return tokens[1]
    if family in _AROUND:
        start, end = (AUDIO_START, AUDIO_END) if kind == "audio" else (VISION_START, VISION_END)
        token = dict(zip(_MARKS, tokens, strict=True))[kind]
        return _AROUND[family][start] + token + _AROUND[family][end]
    return tokens[-1] if kind == "video" or len(tokens) == 1 else tokens[0]


def correct_routers(model_dir):
    """Gives values that matter to what does not train: correction biases of routers, scales of layers and of features."""
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    fixed = ("e_score_correction_bias", "layer_scalar", "std_bias", "std_scale")
    biases = sorted(name for name in tensors if name.endswith(fixed))
    for index, name in enumerate(biases):
        draw = torch.Generator().manual_seed(index)
        least = -0.5 if name.endswith("bias") else 0.5
        tensors[name] = torch.rand(tensors[name].shape, generator=draw, dtype=torch.float32) + least
    if biases:
        save_file(tensors, path, metadata={"format": "pt"})


class FamilyRun:
    """Data, a pretrained model and profiles of one family, in a folder."""

    def __init__(self, name, folder, batch, num_microbatches):
        torch.set_num_threads(1)
        self.name, self.folder = name, folder
        folder.mkdir(parents=True, exist_ok=True)
        model_dir = write_model(folder, name)
        self.adapter = load_adapter(model_dir)
        write_tokenizer(model_dir, self.adapter.family)
        write_processor(model_dir, self.adapter)
        pretrained(self.adapter, folder / "saved", seed=77)
        for path in (folder / "saved").glob("*.safetensors*"):
            path.rename(model_dir / path.name)
        correct_routers(model_dir)
        self.media = {}
        records = [self._record(turn, key) for turn in range(NUM_TURNS) for key in SETTINGS[name][3]]
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / "data.jsonl").write_text(text)
        self.num_samples = len(records)
        (folder / "mixture.yaml").write_text(
            "datasets:\n  - {json_path: data.jsonl, sampling_strategy: all, media_root: .}\n"
        )
        (folder / "dflop.yaml").write_text(
            f"model: {{dir: {model_dir.name}, dtype: float32}}\n"
            "data: {mixture: mixture.yaml}\n"
            "cluster: {num_ranks: 2, device: cpu}\n"
            f"train: {{global_batch_size: {batch}, num_microbatches: {num_microbatches}, steps: 3, seed: {SEED}, "
            f"learning_rate: {RATE}, weight_decay: {DECAY}, lora_rank: 4, lora_alpha: 6.0}}\n"
        )
        python(["-m", "dflop", "profile", "data"], folder)
        profile = self._model_profile(model_dir)
        (folder / "model_profile.json").write_text(json.dumps(profile))

    def _record(self, turn, key):
        """A conversation; its media are written, and kept for the oracle."""
        name = f"{key} {turn}"
        contents = SETTINGS[self.name][3][key]
        images = sum(content[0] == "image" for content in contents)
        draw = random.Random(name)
        found = [
            Medium(
                self.folder,
                self.adapter,
                _resized(content, turn),
                images > 1,
                1000 * turn + 10 * len(self.media) + k,
            )
            for k, content in enumerate(contents)
        ]
        self.media[name] = found
        record = {"id": name}
        for kind in _MARKS:
            files = [medium.file.name for medium in found if medium.kind == kind]
            if files:
                record[kind] = files
        places = "".join(_MARKS[medium.kind] + "\n" for medium in found)
        words = ["".join(draw.choices("abcdefg ", k=draw.randrange(3, 30))) for _ in range(2)]
        record["conversations"] = [
            {"from": "human", "value": places + "q" + words[0] + "?"},
            {"from": "gpt", "value": "a" + words[1] + "."},
        ]
        return record

    def _model_profile(self, model_dir):
        point = dict.fromkeys(("spread_ns", "activation_bytes", "workspace_bytes"), 0) | {"repeats": 1}
        point |= {"input_ns": 50_000, "weight_ns": 50_000}
        points = [
            point | {"size": n, "forward_ns": 50_000 + 1000 * n, "backward_ns": 100_000 + 2000 * n}
            for n in (1, 8192)
        ]
        extra = [{"size": n, "extra_ns": 1000 * n, "activation_bytes": 0} for n in (1, 8192)]
        module = {"attention": {"points": []}, "num_parameters": 1000, "parameter_bytes": 4000}
        counts = {
            "encoder_embedding": 1, "encoder_layer": 2, "projector": 1, "llm_embedding": 1,
            "llm_layer": self.adapter.num_llm_layers, "llm_head": 1,
        }  # fmt: skip
        modules = {
            name: {
                **module,
                "count": count,
                "linear": {"points": points},
                "recompute": dict.fromkeys(("selective", "full"), extra),
            }
            for name, count in counts.items()
        }
        text = self.adapter.text
        if has_experts(text):
            read = getattr(text, "num_experts_per_tok", None) or text.top_k_experts
            sizes = {"num_parameters": 500, "parameter_bytes": 2000}
            modules["llm_layer"]["experts"] = {"count": num_experts(text), "per_token": read, **sizes}
        profile = made_up_profile(hash_config(model_dir), 4 * self.adapter.hidden_size, modules)
        adapted = copy.deepcopy(modules)
        # Adapters on the layers.
        adapted["llm_layer"] |= {"num_parameters": 1100, "parameter_bytes": 4400}
        variants = [
            {"tensor_parallel_degree": degree, "lora_rank": rank, "has_collectives": True, "modules": own}
            for degree in (1, 2, 4)
            for rank, own in ((0, modules), (4, adapted))
            if (degree, rank) != (1, 0)
        ]
        return {**profile, "family": self.adapter.family, "variants": variants}

    def is_that_of_transformers(self):
        """What `dflop check` says, of weights that are read and of a sample of each kind."""
        arguments = ["dflop", "check", "--config", str(self.folder / "dflop.yaml"), "--samples", "3"]
        status, request = run_cli(arguments)
        assert status == 0
        return check(request["arguments"]) == 0

    def dataset(self):
        """Its samples, as the run reads them."""
        return Dataset(str(self.folder / "dflop.yaml"), str(self.folder / "data_profile.parquet"))


def _resized(content, turn):
    kind, *sizes = content
    if kind == "audio":
        return (kind, sizes[0] + 0.11 * turn if sizes[0] + 0.11 * turn < 1 else sizes[0])
    return (kind, sizes[0] + 9 * turn, sizes[1] + 5 * turn, *sizes[2:])


class PlainLoop:
    """Hugging Face's model in one process: its own `labels=` loss, sample by sample, and PyTorch's AdamW."""

    def __init__(self, run, recipe):
        self.run = run
        self.data = run.dataset()
        self.model = run.adapter.model_class.from_pretrained(
            run.adapter.model_dir, dtype=torch.float32
        ).train()
        if recipe == "lora":
            add_adapters(self.model, LORA["lora_rank"], LORA["lora_alpha"], SEED)
        self.before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(_trains(name, recipe))
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        decays = set(Trainer.get_decay_parameter_names(SimpleNamespace(), self.model))
        decays = {name for name in decays if UNTOLD_NORM.search(name) is None}
        groups = [
            {"params": [p], "weight_decay": DECAY * (name in decays)} for name, p in self.trained.items()
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=RATE)
        self.noise = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in self.trained.items()}

    def sample(self, index):
        """A sample as `loss_of` takes it: dflop's tokens, the files' own media."""
        encoded = self.data.encode(index)
        media = self.run.media[encoded.id]
        assert [m.frame_indices for m in encoded.media] == [m.shape.frame_indices for m in media]
        return SimpleNamespace(
            adapter=self.run.adapter,
            sample=sample_from_encoded(index, encoded, self.run.adapter),
            media=media,
            num_targets=sum(label != -100 for label in encoded.labels),
        )

    def step(self, batch):
        """Trains one global batch; its loss."""
        samples = [self.sample(index) for index in batch]
        total = sum(sample.num_targets for sample in samples)
        loss = 0.0
        for sample in samples:
            part = self.loss(sample) / total
            # Of text alone nothing may train.
            if part.requires_grad:
                part.backward()
            loss += float(part.detach())
        for name, p in self.trained.items():
            # AdamW makes a step of the learning rate of what is nothing but rounding: a key's bias, which a softmax
            # does not see, and numbers far below the others of their tensor.
            g = p.grad
            self.noise[name] |= (g != 0) & (g.abs() < 1e-5 * g.abs().max()) | name.endswith("k_proj.bias")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return loss

    def loss(self, sample):
        """Summed over its label tokens, by the model's own `labels=`, a mean over them."""
        arguments = hugging_face(sample)
        return sample.num_targets * self.model(**arguments, use_cache=False).loss

    def exported(self):
        """The weights as an export has them: adapters merged by peft."""
        for module in self.model.modules():
            if isinstance(module, LoraLayer):
                module.merge()
        named = {name.replace(".base_layer", ""): p.detach() for name, p in self.model.named_parameters()}
        return {name: value for name, value in named.items() if ".lora_" not in name}


def _trains(name, recipe):
    if recipe == "lora":
        return ".lora_" in name or is_of_projector(name)
    return component_of(name) in PARTS[recipe]
