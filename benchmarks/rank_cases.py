"""Engines and cases on several GPUs. To add a case, add an entry to `RANK_CASES`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.cases import Case, EngineSetup

RANK_ENGINES = {
    "ours": EngineSetup("offloadkit", "offloadkit"),
    "ours-compiled": EngineSetup("offloadkit, compiled", "offloadkit", (("compiled", True),)),
    "ours-muon": EngineSetup("offloadkit, Muon", "offloadkit", (("optimizer", "muon"),)),
    "ours-hashed": EngineSetup("offloadkit, deterministic kernels", "hashed"),
    "fsdp2": EngineSetup("FSDP2, HF (bf16 compute and reduce, fp32 master weights)", "fsdp2"),
    "fsdp2-our-compute": EngineSetup("FSDP2, our compute", "fsdp2", (("our_compute", True),)),
    "fsdp2-recomputed": EngineSetup("FSDP2, our compute", "fsdp2", (("our_compute", True), ("recomputed", True))),
    "ddp": EngineSetup("DDP, bf16 weights and AdamW states, at its largest batch", "ddp"),
    "ddp-recomputed": EngineSetup(
        "DDP, bf16 weights and AdamW states, at its largest batch", "ddp", (("recomputed", True),)
    ),
    "zero2-offload": EngineSetup("DeepSpeed ZeRO-2, states in RAM", "zero2", package="deepspeed"),
    "zero2-offload-200m": EngineSetup(
        "DeepSpeed ZeRO-2, states in RAM, buckets of 200 M",
        "zero2",
        (("bucket_elements", 200_000_000),),
        "deepspeed",
    ),
    "zero3-offload-200m": EngineSetup(
        "DeepSpeed ZeRO-3, weights and states in RAM, buckets of 200 M",
        "zero3",
        (("bucket_elements", 200_000_000),),
        "deepspeed",
    ),
    "zero2": EngineSetup("DeepSpeed ZeRO-2", "zero2-on-gpu", package="deepspeed"),
}
"""Engines by their names on the command line, with fields of `Work` as options. DDP is used without master weights, as
usual: fp32 states of a model of 7 G parameters would leave no room for a row in 80 GiB."""


@dataclass(frozen=True)
class RankCase(Case):
    """A case on several GPUs. Sizes are per micro-batch of a rank, VRAM is per GPU, RAM is for all ranks."""

    num_gpus: int = 2
    pcie_only: bool = False
    """Whether NCCL copies through RAM, as on cards without a link or peer access."""
    slow: bool = False
    """Whether steps are so slow that only a few of them run (`ranks.FEW_STEPS`)."""
    traced: bool = False
    """Whether some further steps are traced to find their bounds (`rank_trace`)."""
    limit: float = 150.0
    """Time limit of a turn in seconds; then all its processes are killed."""
    engines: tuple[str, ...] = ("ours",)


_RAM = 235
"""GiB for offloadkit on a host with two GPUs and 256 GiB. A virtual machine may show less until its memory was used
once."""
_RAM_OF_MORE = {4: 470, 8: 515}
"""GiB on hosts with four GPUs and 512 GiB, and with eight and 560 GiB."""


def _ram(num_gpus: int) -> float:
    return _RAM_OF_MORE.get(num_gpus, _RAM)


def _t5(rows: int, vram: float | None, num_gpus: int = 2, model: str = "t5-3b", **more: Any) -> RankCase:
    return RankCase("several GPUs", model, rows, 512, 128, vram=vram, ram=_ram(num_gpus), num_gpus=num_gpus, **more)


def _decoder(rows: int, vram: float | None, num_gpus: int = 2, model: str = "llama-3.1-8b", **more: Any) -> RankCase:
    return RankCase("several GPUs", model, rows, 2048, vram=vram, ram=_ram(num_gpus), num_gpus=num_gpus, **more)


def _llama_7b(accumulation: int, engines: tuple[str, ...], **more: Any) -> RankCase:
    options: dict[str, Any] = {
        "vram": 80,
        "ram": _RAM,
        "for_all": True,
        "accumulation": accumulation,
        "engines": engines,
    }
    return RankCase("several GPUs", "llama-7b", 1, 2048, **options, **more)


_DDP = ("ddp", "ddp-recomputed")
_MUON = ("ours", "ours-muon")

RANK_CASES: dict[str, RankCase] = {
    "t5-3b-1x24": _t5(8, 24, num_gpus=1, traced=True),
    "t5-3b-2x24": _t5(8, 24),
    "t5-3b-2x28": _t5(8, 28),
    "t5-3b-2": _t5(8, None, engines=("fsdp2", "fsdp2-our-compute")),
    "t5-3b-2-deepspeed": _t5(8, None, engines=("zero2-offload", "zero2-offload-200m", "zero3-offload-200m")),
    "llama-8b-1x24": _decoder(4, 24, num_gpus=1, limit=240),
    "llama-8b-2x24": _decoder(4, 24, limit=240),
    "llama-8b-2x80": _decoder(4, 80, limit=180),
    "llama-8b-2": _decoder(4, None, engines=("fsdp2-recomputed",)),
    "t5-3b-4x24": _t5(8, 24, 4, traced=True),
    "t5-3b-1x80": _t5(8, 80, 1),
    "t5-3b-2x80": _t5(8, 80, traced=True),
    "t5-3b-4x80": _t5(8, 80, 4, traced=True),
    "t5-3b-4": _t5(8, None, 4, engines=("fsdp2-our-compute",)),
    "t5-3b-4-deepspeed": _t5(8, None, 4, slow=True, engines=("zero2-offload-200m", "zero3-offload-200m")),
    "llama-8b-4x24": _decoder(4, 24, 4, traced=True, limit=240),
    "llama-8b-1x80": _decoder(4, 80, 1, limit=180),
    "llama-8b-4x80": _decoder(4, 80, 4, traced=True, limit=180),
    "llama-8b-4": _decoder(4, None, 4, engines=("fsdp2-recomputed",)),
    "t5-11b-4x80": _t5(1, 80, 4, model="t5-11b", limit=240),
    "qwen3-32b-4x80": _decoder(4, 80, 4, model="qwen3-32b", slow=True, limit=420),
    "t5-3b-8x24": _t5(8, 24, 8, traced=True),
    "t5-3b-8x80": _t5(8, 80, 8, traced=True),
    "t5-3b-8": _t5(8, None, 8, engines=("fsdp2-our-compute",)),
    "t5-3b-8-deepspeed": _t5(8, None, 8, slow=True, engines=("zero2-offload-200m", "zero3-offload-200m")),
    "llama-8b-8x24": _decoder(4, 24, 8, traced=True, limit=240),
    "llama-8b-8x80": _decoder(4, 80, 8, traced=True, limit=180),
    "llama-8b-8": _decoder(4, None, 8, engines=("fsdp2-recomputed",)),
    "llama-8b-8-deepspeed": _decoder(
        4, None, 8, slow=True, limit=300, engines=("zero2-offload-200m", "zero3-offload-200m")
    ),
    "t5-11b-8x80": _t5(1, 80, 8, model="t5-11b", traced=True, limit=240),
    "qwen3-32b-8x80": _decoder(4, 80, 8, model="qwen3-32b", slow=True, traced=True, limit=420),
    "muon-t5-3b-1x24": _t5(8, 24, 1, engines=_MUON),
    "muon-t5-3b-2x24": _t5(8, 24, engines=_MUON),
    "t5-3b-2x24-strong": _t5(4, 24),
    "llama-8b-2x24-strong": _decoder(2, 24, limit=240),
    "t5-11b-2x24": _t5(1, 24, model="t5-11b", limit=240),
    "t5-11b-2x80": _t5(1, 80, model="t5-11b", limit=240),
    "llama-7b-x1": _llama_7b(1, (*_DDP, "zero2", "ours")),
    "llama-7b-x4": _llama_7b(4, ("zero2", "ours")),
    "llama-7b-x1-pcie": _llama_7b(1, (*_DDP, "zero2", "ours"), pcie_only=True),
    "llama-7b-x4-pcie": _llama_7b(4, ("zero2", "ours"), pcie_only=True),
    "t5-3b-2x24-pcie": _t5(8, 24, pcie_only=True),
    "t5-3b-1x24-hashed": _t5(8, 24, num_gpus=1, accumulation=2, engines=("ours-hashed",)),
    "t5-3b-2x24-hashed": _t5(8, 24, limit=240, engines=("ours-hashed",)),
    "tiny-1": RankCase("try", "t5-tiny", 2, 16, 8, vram=2, num_gpus=1),
    "tiny-1-hashed": RankCase("try", "t5-tiny", 2, 16, 8, vram=2, num_gpus=1, accumulation=2, engines=("ours-hashed",)),
    "tiny-2-hashed": RankCase("try", "t5-tiny", 2, 16, 8, vram=2, engines=("ours-hashed",)),
    "tiny-2": RankCase(
        "try", "t5-tiny", 2, 16, 8, vram=2, accumulation=2, engines=("ours", "fsdp2", "fsdp2-our-compute", *_DDP)
    ),
    "tiny-4": RankCase(
        "try", "llama-tiny", 2, 16, vram=2, num_gpus=4, slow=True, traced=True, engines=("ours", "fsdp2-recomputed")
    ),
    "tiny-8-hashed": RankCase("try", "t5-tiny", 2, 16, 8, vram=6, num_gpus=8, engines=("ours-hashed",)),
    "tiny-1-of-8-hashed": RankCase(
        "try", "t5-tiny", 2, 16, 8, vram=2, num_gpus=1, accumulation=8, engines=("ours-hashed",)
    ),
    "tiny-8": RankCase(
        "try", "llama-tiny", 2, 16, vram=6, num_gpus=8, slow=True, traced=True, engines=("ours", "fsdp2-recomputed")
    ),
    "tiny-llama-2": RankCase("try", "llama-tiny", 2, 16, vram=2, pcie_only=True, engines=("ours", "fsdp2-recomputed")),
    "tiny-2-deepspeed": RankCase(
        "try", "t5-tiny", 2, 16, 8, engines=("zero2", "zero2-offload-200m", "zero3-offload-200m")
    ),
}
"""Names end in GPUs x GiB per GPU, and `ranks.SPARE_BYTES` of each card stay free. "strong": the batch of one GPU,
divided over all; "x4": four micro-batches an update; "hashed": two micro-batches in total, of the same rows, so weights
must be equal."""
