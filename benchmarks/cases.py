"""Models, engines and cases to measure. To add a case, add an entry to `CASES`."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from offloadkit.doors.engines.work import Work
from offloadkit.hf.presets import PRESETS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

GIB = 1 << 30


def _decoder(
    hidden: int, feed_forward: int, layers: int, heads: int, kv_heads: int, vocabulary: int, tied: bool
) -> Any:
    return {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 131_072,
        "pad_token_id": 0,
    }


def _experts(number: int, of_a_token: int, feed_forward: int) -> Any:
    return {
        "model_type": "qwen3_moe",
        "num_experts": number,
        "num_experts_per_tok": of_a_token,
        "moe_intermediate_size": feed_forward,
        "norm_topk_prob": True,
    }


def _text(hidden: int, feed_forward: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 8192,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _whisper(
    hidden: int, feed_forward: int, layers: int, heads: int, vocabulary: int, mel: int, positions: int
) -> dict[str, Any]:
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    sides = {
        f"{side}_{name}": number
        for side in ("encoder", "decoder")
        for name, number in (("layers", layers), ("ffn_dim", feed_forward), ("attention_heads", heads))
    }
    return {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "vocab_size": vocabulary,
        "d_model": hidden,
        "num_mel_bins": mel,
        "max_source_positions": positions,
        "max_target_positions": 448,
        "suppress_tokens": [],
        "begin_suppress_tokens": [],
        "dropout": 0.0,
        **sides,
        **special,
    }


def _qwen_vl(
    text: dict[str, Any], hidden: int, feed_forward: int, layers: int, heads: int, window: int, whole: list[int]
) -> dict[str, Any]:
    """`window`: pixels of a window of the vision tower; `whole`: its layers that attend to the whole image."""
    eighth = text["hidden_size"] // text["num_attention_heads"] // 8
    sections = [2 * eighth - eighth // 2 - eighth // 2, eighth + eighth // 2, eighth + eighth // 2]
    rope = {"rope_type": "default", "mrope_section": sections, "rope_theta": 1e6}
    return {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "text_config": text | {"rope_parameters": rope, "tie_word_embeddings": True},
        "vision_config": {
            "depth": layers,
            "hidden_size": hidden,
            "intermediate_size": feed_forward,
            "num_heads": heads,
            "out_hidden_size": text["hidden_size"],
            "patch_size": 14,
            "window_size": window,
            "fullatt_block_indexes": whole,
        },
        "image_token_id": 5,
        "video_token_id": 6,
        "vision_start_token_id": 7,
        "vision_end_token_id": 8,
        "tie_word_embeddings": True,
    }


def _gemma3(
    text: dict[str, Any], hidden: int, feed_forward: int, layers: int, heads: int, image: int, tokens: int
) -> dict[str, Any]:
    """`image`: pixels of a side; `tokens`: the image's tokens."""
    return {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text | {"sliding_window": 1024, "query_pre_attn_scalar": text["head_dim"]},
        "vision_config": {
            "hidden_size": hidden,
            "intermediate_size": feed_forward,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "image_size": image,
            "patch_size": 14,
            "vision_use_head": False,
        },
        "mm_tokens_per_image": tokens,
        "image_token_id": 5,
        "boi_token_index": 7,
        "eoi_token_index": 8,
    }


def _modernbert(hidden: int, feed_forward: int, layers: int, heads: int, vocabulary: int) -> dict[str, Any]:
    shape = _text(hidden, feed_forward, layers, heads, heads, vocabulary)
    del shape["num_key_value_heads"]
    special = {"cls_token_id": 1, "sep_token_id": 2}
    return {"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"], **shape, **special}


SHAPES: dict[str, dict[str, Any]] = {
    "llama-tiny": _decoder(64, 128, 2, 4, 2, 512, tied=True),
    "qwen2.5-0.5b": _decoder(896, 4864, 24, 14, 2, 151_936, tied=True) | {"model_type": "qwen2"},
    "qwen2.5-1.5b": _decoder(1536, 8960, 28, 12, 2, 151_936, tied=True) | {"model_type": "qwen2"},
    "qwen2.5-3b": _decoder(2048, 11_008, 36, 16, 2, 151_936, tied=True) | {"model_type": "qwen2"},
    "qwen2.5-7b": _decoder(3584, 18_944, 28, 28, 4, 152_064, tied=False) | {"model_type": "qwen2"},
    "llama-3.2-1b": _decoder(2048, 8192, 16, 32, 8, 128_256, tied=True),
    "llama-3.2-3b": _decoder(3072, 8192, 28, 24, 8, 128_256, tied=True),
    "llama-3.1-8b": _decoder(4096, 14_336, 32, 32, 8, 128_256, tied=False),
    "llama-7b": _decoder(4096, 11_008, 32, 32, 32, 32_000, tied=False),
    "llama-2-13b": _decoder(5120, 13_824, 40, 40, 40, 32_000, tied=False),
    "mistral-7b": _decoder(4096, 14_336, 32, 32, 8, 32_000, tied=False) | {"model_type": "mistral"},
    "qwen3-4b": _decoder(2560, 9728, 36, 32, 8, 151_936, tied=True) | {"model_type": "qwen3", "head_dim": 128},
    "qwen3-32b": _decoder(5120, 25_600, 64, 64, 8, 151_936, tied=False) | {"model_type": "qwen3", "head_dim": 128},
    "qwen3-30b-a3b": _decoder(2048, 6144, 48, 32, 4, 151_936, tied=False) | _experts(128, 8, 768) | {"head_dim": 128},
    "qwen3-moe-tiny": _decoder(64, 128, 2, 4, 2, 512, tied=False) | _experts(4, 2, 32),
    "whisper-large": _whisper(1280, 5120, 32, 20, 51_866, 128, 1500),
    "whisper-tiny": _whisper(32, 64, 2, 2, 512, 16, 32),
    "qwen2.5-vl-3b": _qwen_vl(_text(2048, 11_008, 36, 16, 2, 151_936), 1280, 3420, 32, 16, 112, [7, 15, 23, 31]),
    "qwen2.5-vl-tiny": _qwen_vl(_text(32, 64, 2, 2, 1, 512), 32, 64, 2, 2, 56, [1]),
    "gemma3-4b": _gemma3(_text(2560, 10_240, 34, 8, 4, 262_208) | {"head_dim": 256}, 1152, 4304, 27, 16, 896, 256),
    "gemma3-tiny": _gemma3(_text(32, 64, 2, 2, 1, 512) | {"head_dim": 16}, 32, 64, 2, 2, 56, 4),
    "modernbert-large": _modernbert(1024, 2624, 28, 16, 50_368),
    "modernbert-tiny": _modernbert(32, 64, 3, 2, 512),
    "qwen3-moe-6b": _decoder(2048, 6144, 16, 32, 4, 151_936, tied=False) | _experts(64, 8, 768) | {"head_dim": 128},
}
"""Shapes of models other than T5; weights are random."""
HUB_NAMES = {
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B",
    "qwen2.5-3b": "Qwen/Qwen2.5-3B",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "llama-7b": "meta-llama/Llama-2-7b-hf",
    "llama-2-13b": "meta-llama/Llama-2-13b-hf",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
}
"""Names of these models for `offloadkit plan`. T5 models keep their names."""
_T5_TINY = {"vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}


def config_of(model: str) -> PreTrainedConfig:
    """The architecture of a case's model, without dropout."""
    from transformers import AutoConfig

    if model.startswith("t5"):
        preset = PRESETS["t5-small" if model == "t5-tiny" else model].values
        tiny = _T5_TINY if model == "t5-tiny" else {}
        return AutoConfig.for_model("t5", **preset | tiny, dropout_rate=0.0)
    shape = dict(SHAPES[model])
    kind = shape.pop("model_type")
    name = "".join(word.capitalize() for word in kind.split("_"))
    return AutoConfig.for_model(kind, **{"architectures": [f"{name}ForCausalLM"]} | shape)


@dataclass(frozen=True)
class EngineSetup:
    """An engine of `peer_engines.ENGINES`, or a door of `doors.DOORS`, with its options."""

    title: str
    """Name in tables."""
    engine: str
    options: tuple[tuple[str, Any], ...] = ()
    """Fields of `Work`."""
    package: str = ""
    """Package of the peer, whose version is recorded."""

    @property
    def plans(self) -> bool:
        """Whether the budgets of a case apply to this engine."""
        return self.engine in ("offloadkit", "hashed", "lora", "any") or self.is_door

    @property
    def is_door(self) -> bool:
        """Whether the engine is a door of `benchmarks.doors`, which runs a whole training."""
        return self.engine.startswith("offloadkit-")


ENGINES = {
    "hf": EngineSetup("all on the GPU, HF", "baseline"),
    "hf-compiled": EngineSetup("all on the GPU, HF, compiled", "baseline", (("compiled", True),)),
    "ours-on-gpu": EngineSetup("all on the GPU, our compute", "baseline", (("our_compute", True),)),
    "ours-on-gpu-compiled": EngineSetup(
        "all on the GPU, our compute, compiled", "baseline", (("our_compute", True), ("compiled", True))
    ),
    "offloadkit": EngineSetup("offloadkit", "offloadkit"),
    "offloadkit-compiled": EngineSetup("offloadkit, compiled", "offloadkit", (("compiled", True),)),
    "offloadkit-recomputed": EngineSetup("offloadkit", "offloadkit", (("recomputed", True),)),
    "offloadkit-muon": EngineSetup("offloadkit, Muon", "offloadkit", (("optimizer", "muon"),)),
    "offloadkit-lora": EngineSetup("offloadkit, PEFT's LoRA", "lora", package="peft"),
    "peft": EngineSetup("all on the GPU, PEFT's LoRA", "peft", package="peft"),
    "peft-our-compute": EngineSetup(
        "all on the GPU, PEFT's LoRA, our compute", "peft", (("our_compute", True),), package="peft"
    ),
    "any": EngineSetup("offloadkit, a loop over any model", "any"),
    "any-plain": EngineSetup("all on the GPU, HF, any model", "any-plain"),
    "torchao": EngineSetup(
        "torchao, bf16 (no clipping, no master weights, bf16 moments)", "torchao", package="torchao"
    ),
    "torchao-fp32": EngineSetup("torchao, fp32 (no clipping)", "torchao-fp32", package="torchao"),
    "zero2": EngineSetup("DeepSpeed ZeRO-2", "zero2", package="deepspeed"),
    "zero2-50m": EngineSetup(
        "DeepSpeed ZeRO-2, buckets of 50 M", "zero2", (("bucket_elements", 50_000_000),), "deepspeed"
    ),
    "zero2-200m": EngineSetup(
        "DeepSpeed ZeRO-2, buckets of 200 M", "zero2", (("bucket_elements", 200_000_000),), "deepspeed"
    ),
    "zero3": EngineSetup("DeepSpeed ZeRO-3", "zero3", package="deepspeed"),
    "zero3-200m": EngineSetup(
        "DeepSpeed ZeRO-3, buckets of 200 M", "zero3", (("bucket_elements", 200_000_000),), "deepspeed"
    ),
    "roundpipe": EngineSetup("RoundPipe (weights one step old, no clipping)", "roundpipe", package="roundpipe"),
    **{
        f"offloadkit-{door}": EngineSetup(f"offloadkit, {title}", f"offloadkit-{door}")
        for door, title in (
            ("finetune", "`finetune`"),
            ("whole-run", "`finetune` with evaluation and resuming"),
            ("trainer", "`OffloadTrainer`"),
            ("sft", "TRL's SFTTrainer"),
            ("loop", "a loop of one's own"),
            ("deepspeed", "a script for DeepSpeed"),
        )
    },
}
"""Engines by their names on the command line."""

ON_GPU = ("hf", "ours-on-gpu", "ours-on-gpu-compiled")
OURS = ("offloadkit", "offloadkit-compiled")
ZERO2 = ("zero2", "zero2-50m", "zero2-200m")
DOORS = ("offloadkit-finetune", "offloadkit-trainer", "offloadkit-loop")
WHOLE_RUN = ("offloadkit-whole-run",)
MUON = ("offloadkit", "offloadkit-muon")
SUB_MODELS = ("any", "any-plain")
LORA = ("offloadkit-lora", "peft", "peft-our-compute")


@dataclass(frozen=True)
class Case:
    """A piece of work with a budget. Sizes are per micro-batch; budgets are in GiB."""

    claim: str
    """Purpose of the case: "W1" to "W7", "rate", "cheap", "muon", "lora", "any", "long", "largest", "doors", "growth",
    "plan", "fit", "blog" or "try"."""
    model: str
    batch_size: int
    input_length: int
    target_length: int = 0
    accumulation: int = 1
    vram: float | None = None
    """Budget of offloadkit's plan, including CUDA's context; None: all free VRAM."""
    ram: float | None = None
    cores: int = 0
    """Number of cores that the process is bound to; 0: all."""
    precision: Literal["exact", "compact", "tiny"] = "exact"
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    mask: Literal["full", "ragged"] = "full"
    on_disk: bool = False
    """Whether offloadkit may put states on the disk of the folder for temporary files."""
    for_all: bool = False
    """Whether the budgets hold for peers too; otherwise peers have the whole card."""
    engines: tuple[str, ...] = OURS

    def limits(self, setup: EngineSetup) -> dict[str, int | None]:
        """Bytes of VRAM and RAM that the engine may take; None: all that is free."""
        mine = setup.plans or self.for_all
        vram, ram = (self.vram, self.ram) if mine else (None, None)
        return {"vram": vram and int(vram * GIB), "ram": ram and int(ram * GIB)}

    def work(self, setup: EngineSetup, model_folder: str, disk: str) -> Work:
        return Work(
            model=model_folder,
            batch_size=self.batch_size,
            input_length=self.input_length,
            target_length=self.target_length,
            accumulation=self.accumulation,
            precision=self.precision,
            dtype=self.dtype,
            mask=self.mask,
            disk=disk if self.on_disk and setup.plans else None,
            **self.limits(setup),
            **dict(setup.options),
        )

    @property
    def shape(self) -> str:
        """ "8 x (512+128)", or "4 x 8 x 1024" with accumulation."""
        lengths = f"({self.input_length}+{self.target_length})" if self.target_length else str(self.input_length)
        times = f"{self.accumulation} x " if self.accumulation > 1 else ""
        return f"{times}{self.batch_size} x {lengths}"


def _t5(claim: str, model: str, rows: int, vram: float | None, **more: Any) -> Case:
    return Case(claim, model, rows, 512, 128, vram=vram, **more)


def _llama(claim: str, rows: int, tokens: int, vram: float | None, model: str = "llama-3.2-3b", **more: Any) -> Case:
    return Case(claim, model, rows, tokens, vram=vram, **more)


def _drawn(seed: int, number: int) -> dict[str, Case]:
    """Random cases: model, micro-batch, accumulation, precision and budget are drawn."""
    draw, cases = random.Random(seed), {}
    for index in range(number):
        model, budgets = draw.choice([("t5-large", (3, 8)), ("t5-3b", (4, 30)), ("llama-3.2-3b", (8, 40))])
        rows, tokens = draw.choice([1, 2, 4, 8]), draw.choice([128, 256, 512, 1024])
        targets = draw.choice([32, 64, 128, 256]) if model.startswith("t5") else 0
        times, precision = draw.choice([1, 1, 2]), draw.choice(["exact", "exact", "compact", "tiny"])
        budget = float(draw.randint(*budgets))
        cases[f"plan-drawn-{index}"] = Case("plan", model, rows, tokens, targets, times, budget, precision=precision)
    return cases


_T4: dict[str, Any] = {"ram": 12.0, "cores": 2, "dtype": "fp16"}
"""A free notebook's machine, without its limit of 15 GiB of VRAM."""
_PEERS = (*ON_GPU, *OURS, "torchao", *ZERO2)

CASES: dict[str, Case] = {
    "w1": _t5("W1", "t5-3b", 8, 24, engines=_PEERS),
    "w1-ragged": _t5("W1", "t5-3b", 8, 24, mask="ragged", engines=_PEERS),
    "w1-32": _t5("W1", "t5-3b", 32, 24, engines=(*ON_GPU, *OURS)),
    "w1-32-ragged": _t5("W1", "t5-3b", 32, 24, mask="ragged", engines=(*ON_GPU, *OURS)),
    "w2": _t5("W2", "t5-3b", 32, 16, engines=_PEERS),
    "w2-ragged": _t5("W2", "t5-3b", 32, 16, mask="ragged", engines=_PEERS),
    "w3": _t5("W3", "t5-3b", 1, 6, engines=(*ON_GPU, *OURS, "zero3", "zero3-200m")),
    "w4": _t5("W4", "t5-3b", 8, 24, accumulation=4, engines=(*ON_GPU, *OURS, "zero2")),
    "w5": _t5("W5", "t5-3b", 8, 24, cores=2, engines=_PEERS),
    "w6": _llama("W6", 8, 1024, 24, engines=(*_PEERS, "roundpipe")),
    "w6-ragged": _llama("W6", 8, 1024, 24, mask="ragged", engines=(*_PEERS, "roundpipe")),
    "w6-48": _llama("W6", 8, 1024, 48),
    "w7": _llama("W7", 32, 1024, 24, engines=(*_PEERS, "roundpipe")),
    "rate-t5-base": _t5("rate", "t5-base", 8, None, engines=("hf", "offloadkit")),
    "rate-t5-large-8": _t5("rate", "t5-large", 8, 8, engines=("hf", "offloadkit")),
    "rate-llama-8b-24": _llama("rate", 32, 1024, 24, "llama-3.1-8b", engines=("offloadkit",)),
    **{
        f"rate-qwen2.5-{size}": _llama(
            "rate", rows, 1024, vram, model, accumulation=512 // rows, engines=("offloadkit",)
        )
        for size, model, rows, vram in (
            ("0.5b", "qwen2.5-0.5b", 32, None),
            ("1.5b", "qwen2.5-1.5b", 16, None),
            ("3b", "qwen2.5-3b", 8, None),
            ("7b", "qwen2.5-7b", 16, None),
            ("7b-77", "qwen2.5-7b", 16, 77),  # an H100's memory
            ("7b-24", "qwen2.5-7b", 16, 24),
        )
    },
    "cheap-llama-3b-64": _llama("cheap", 32, 1024, 64, engines=("offloadkit", "offloadkit-recomputed")),
    "muon-t5-3b": _t5("muon", "t5-3b", 8, 24, engines=MUON),
    "muon-llama-3b": _llama("muon", 4, 2048, 24, engines=MUON),
    "lora-llama-8b-6": _llama("lora", 4, 1024, 6, "llama-3.1-8b", ram=20, engines=("offloadkit-lora", "peft")),
    "lora-llama-8b-10": _llama("lora", 8, 1024, 10, "llama-3.1-8b", ram=20, engines=("offloadkit-lora",)),
    "lora-llama-8b-24": _llama("lora", 8, 1024, 24, "llama-3.1-8b", ram=20, engines=("offloadkit-lora", "peft")),
    "llama-3b-1x65536-40": _llama("long", 1, 65_536, 40, engines=("offloadkit",)),
    "llama-3b-1x131072-40": _llama("long", 1, 131_072, 40, engines=("offloadkit",)),
    "llama-8b-1x131072-77": _llama("long", 1, 131_072, 77, "llama-3.1-8b", engines=("offloadkit",)),
    "qwen3-moe-6b-1x131072-24": _llama("long", 1, 131_072, 24, "qwen3-moe-6b", engines=("offloadkit",)),
    "lora-llama-8b-1x131072-28": _llama("long", 1, 131_072, 28, "llama-3.1-8b", engines=("offloadkit-lora",)),
    **{
        f"{model}-{rows}x1024-h200": _llama(
            "largest", rows, 1024, 138, model, ram=120, precision="tiny", engines=("offloadkit",)
        )
        for model in ("qwen3-32b", "qwen3-30b-a3b")
        for rows in (1, 2)
    },
    "whisper-large-10": Case("any", "whisper-large", 8, 3000, 128, vram=10, engines=SUB_MODELS),
    "qwen2.5-vl-3b-24": Case("any", "qwen2.5-vl-3b", 4, 1024, vram=24, engines=SUB_MODELS),
    "gemma3-4b-24": Case("any", "gemma3-4b", 4, 1024, vram=24, engines=SUB_MODELS),
    "modernbert-large-4": Case("any", "modernbert-large", 16, 512, vram=4, engines=SUB_MODELS),
    "qwen3-moe-6b-24": Case("any", "qwen3-moe-6b", 4, 1024, vram=24, engines=SUB_MODELS),
    "doors-t5-3b-24": _t5("doors", "t5-3b", 8, 24, engines=DOORS),
    "doors-t5-3b-6": _t5("doors", "t5-3b", 1, 6, engines=DOORS),
    "doors-llama-3b-24": _llama("doors", 8, 1024, 24, engines=(*DOORS, "offloadkit-sft")),
    "doors-qwen3-4b-24": _llama("doors", 4, 2048, 24, "qwen3-4b", engines=DOORS),
    "doors-llama-8b-24": _llama("doors", 4, 2048, 24, "llama-3.1-8b", engines=DOORS),
    "doors-deepspeed-24": _t5("doors", "t5-3b", 8, 24, engines=("offloadkit-loop", "offloadkit-deepspeed", "zero2")),
    "phases-t5-3b-24": _t5("doors", "t5-3b", 8, 24, engines=WHOLE_RUN),
    "phases-t5-3b-6": _t5("doors", "t5-3b", 1, 6, engines=WHOLE_RUN),
    "phases-llama-8b-24": _llama("doors", 4, 2048, 24, "llama-3.1-8b", engines=WHOLE_RUN),
    **{
        f"growth-{model}-{rows * times}": _t5(
            "growth", model, rows, vram, accumulation=times, engines=("hf", "ours-on-gpu", *OURS)
        )
        for model, vram in (("t5-large", 8), ("t5-3b", 24))
        for rows, times in ((2, 1), (8, 1), (32, 1), (32, 4))
    },
    **{
        f"blog-{vram}-{model}": _t5(
            "blog", model, 8, vram, ram=64, for_all=True, engines=("hf", "offloadkit", "zero2", "zero3")
        )
        for vram in (11, 24)
        for model in ("t5-small", "t5-base", "t5-large", "t5-3b", "t5-11b")
    },
    "plan-t5-large-4": _t5("plan", "t5-large", 8, 4),
    "plan-t5-large-24": _t5("plan", "t5-large", 8, 24),
    "plan-t5-large-disk": _t5("plan", "t5-large", 8, 4, ram=6, on_disk=True),
    "plan-t5-3b-3": _t5("plan", "t5-3b", 1, 3),
    "plan-t5-3b-6-compact": _t5("plan", "t5-3b", 1, 6, precision="compact"),
    "plan-t5-3b-130": _t5("plan", "t5-3b", 8, 130),
    "plan-t5-3b-130-large-batch": _t5("plan", "t5-3b", 32, 130),
    "plan-t5-3b-16-accumulated": _t5("plan", "t5-3b", 4, 16, accumulation=4),
    "plan-t5-11b-8-compact": _t5("plan", "t5-11b", 1, 8, precision="compact"),
    "plan-t5-11b-24-compact": _t5("plan", "t5-11b", 1, 24, precision="compact"),
    "plan-llama-8b-10": _llama("plan", 1, 2048, 10, "llama-3.1-8b"),
    "plan-llama-8b-24": _llama("plan", 1, 2048, 24, "llama-3.1-8b"),
    "plan-llama-3b-6": _llama("plan", 8, 1024, 6),
    "plan-t4-t5-large": _t5("plan", "t5-large", 4, 15, **_T4),
    "plan-t4-t5-3b": _t5("plan", "t5-3b", 1, 15, precision="compact", on_disk=True, **_T4),
    **_drawn(seed=1, number=6),
    "fit-t5-base": _t5("fit", "t5-base", 8, 4, ram=16),
    "fit-t5-large": _t5("fit", "t5-large", 8, 6, ram=16),
    "fit-t4-t5-large": _t5("fit", "t5-large", 4, 14.5, ram=11, dtype="fp16"),
    "fit-llama-1b": _llama("fit", 4, 1024, 8, "llama-3.2-1b", ram=32),
    "fit-t5-3b-32": _t5("fit", "t5-3b", 8, 11.5, ram=28, precision="compact"),
    "fit-t5-3b-24": _t5("fit", "t5-3b", 8, 23.5, ram=58),
    "fit-llama-3b-32": _llama("fit", 4, 1024, 11.5, ram=28, precision="compact"),
    "fit-llama-3b-24": _llama("fit", 4, 1024, 23.5, ram=58),
    "fit-mistral-7b": _llama("fit", 1, 2048, 16, "mistral-7b", ram=112),
    "fit-llama-8b-64": _llama("fit", 1, 2048, 23.5, "llama-3.1-8b", ram=58, precision="tiny"),
    "fit-t5-11b": _t5("fit", "t5-11b", 1, 24, ram=112, precision="compact"),
    "fit-llama-13b": _llama("fit", 1, 2048, 24, "llama-2-13b", ram=112, precision="compact"),
    "tiny": Case("try", "t5-tiny", 2, 16, 8, vram=2, engines=("hf", "ours-on-gpu", *OURS, "torchao")),
    "tiny-ragged": Case("try", "t5-tiny", 2, 16, 8, vram=2, mask="ragged", engines=("hf", "ours-on-gpu", "offloadkit")),
    "tiny-doors": Case("try", "t5-tiny", 2, 16, 8, engines=(*DOORS, *WHOLE_RUN)),
    "tiny-llama": Case("try", "llama-tiny", 2, 16, vram=2, engines=("hf", "offloadkit")),
    "tiny-any-whisper": Case("try", "whisper-tiny", 2, 64, 8, vram=2, engines=SUB_MODELS),
    **{
        f"tiny-any-{name}": Case("try", f"{name}-tiny", 2, 64, vram=2, engines=SUB_MODELS)
        for name in ("qwen2.5-vl", "gemma3", "modernbert", "qwen3-moe")
    },
    "tiny-lora": Case("try", "llama-tiny", 2, 16, vram=2, engines=LORA),
    "tiny-long": Case("try", "llama-tiny", 1, 4096, vram=2, engines=("offloadkit",)),
    "tiny-largest": Case("try", "qwen3-moe-tiny", 2, 16, vram=2, precision="tiny", engines=("offloadkit",)),
    "tiny-muon": Case("try", "t5-tiny", 2, 16, 8, vram=2, engines=MUON),
}
