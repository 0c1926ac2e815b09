"""Shows that a refactoring changes no number: tiny models are trained, and everything they end with is hashed.

    python -m benchmarks.same_numbers > new.txt
    cd OLD; PYTHONPATH=OLD python NEW/benchmarks/same_numbers.py > old.txt; diff old.txt new.txt

OLD is a checkout of the commit before, with its C kernel built (`python setup.py build_ext --inplace`). Only
offloadkit's public API is used, so this one file runs against both; which one it imported is said on stderr. Compare
runs of one machine with the same torch and transformers only. States on disk go to the folder for temporary files
(TMPDIR), which must not be in RAM.

Each line is a case and three sha256: of all master weights; of the optimizer's states (moments, their scales,
remainders, steps) by parameter name; of the gradient norm of every step. What is computed (model, dtype, precision,
accumulation, clipping) and where it lives (the placement) are chosen pairwise: any two values that can go together meet
in some case. What is computed runs under several placements, which must give the same three hashes: where they differ,
or a case fails, the names are printed at the end, and the exit status is 1 (differences on a GPU are printed only).
fp16 cases overflow twice on purpose: those steps are skipped, and the loss scale falls.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import offloadkit
from offloadkit import OffloadConfig, OffloadEngine, Placement

hf: Any = transformers  # which loads its classes by name, unseen by mypy
T5 = ("t5-full", "t5-ragged", "t5-dropout", "t5-frozen", "t5-groups")
MODELS = (*T5, "llama-full", "llama-ragged", "bert-classify", "bert-words", "cnn", "mlp", "mlp-wide")
PLACEMENTS_EACH = 3
MOST_STEPS = {"mlp-wide": 8}  # it has nine million parameters
OVERFLOWING_STEPS = (3, 4)
"""Of fp16 cases. The first overflow leaves the loss scale as it is, the second halves it."""


class Numbers(NamedTuple):
    """What a case computes: everything that decides its numbers."""

    model: str
    dtype: str
    precision: str
    accumulation: int
    clip: float | None

    def __str__(self) -> str:
        return f"{self.model}/{self.dtype}/{self.precision}/accumulation={self.accumulation}/clip={self.clip}"


class Where(NamedTuple):
    """A placement's fields, which decide no number."""

    weights: str
    gradients: str
    states: str
    activations: str
    step: str

    def __str__(self) -> str:
        return "-".join(self)


class Case(NamedTuple):
    numbers: Numbers
    where: Where | None  # None: the plan decides

    def __str__(self) -> str:
        return f"{self.numbers}/{self.where or 'plan'}"


# ---- which cases ---------------------------------------------------------------------------------------------------

ALL_NUMBERS = [
    Numbers(*values)
    for values in product(MODELS, ("bf16", "fp16", "fp32"), ("exact", "compact", "tiny"), (1, 3), (None, 0.1, 1.0))
]
_KEPT, _MEMORY = ("keep", "checkpoint", "offload"), ("vram", "ram")
ALL_WHERE: list[Where | None] = [
    None,
    *(Where(*values) for values in product(_MEMORY, _MEMORY, ("ram",), _KEPT, ("cpu", "gpu"))),
    *(Where(*values) for values in product(_MEMORY, _MEMORY, ("disk",), _KEPT, ("cpu",))),
    *(Where("vram", "vram", "vram", kept, "gpu") for kept in _KEPT),
]

Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs(*parts: Numbers | Where | None) -> set[Pair]:
    """Any two (field, value) of these."""
    values: list[tuple[str, Any]] = []
    for part in parts:
        values += part._asdict().items() if part is not None else [("placement", "plan")]
    return set(combinations(values, 2))


def chosen_numbers() -> list[Numbers]:
    """So many of `ALL_NUMBERS` that any two values meet; always the same ones."""
    missing = set[Pair]().union(*map(pairs, ALL_NUMBERS))
    chosen = []
    while missing:
        chosen.append(max(ALL_NUMBERS, key=lambda numbers: len(missing & pairs(numbers))))
        missing -= pairs(chosen[-1])
    return sorted(chosen, key=ALL_NUMBERS.index)


def chosen_cases() -> list[Case]:
    """`PLACEMENTS_EACH` or more of each of `chosen_numbers`, so that any two values meet; always the same ones."""
    every = [Case(*both) for both in product(chosen_numbers(), ALL_WHERE)]
    missing = set[Pair]().union(*(pairs(*case) for case in every))
    uses: Counter[Where | None] = Counter()
    chosen: list[Case] = []

    def choose(candidates: Iterable[Case]) -> None:
        """The one with the most new pairs; of equal ones that whose placement was used least."""
        best = max(candidates, key=lambda case: (len(missing & pairs(*case)), -uses[case.where]))
        chosen.append(best)
        uses[best.where] += 1
        missing.difference_update(pairs(*best))

    for _ in range(PLACEMENTS_EACH):
        for numbers in chosen_numbers():
            choose(case for case in every if case.numbers == numbers and case not in chosen)
    while missing:
        choose(every)
    return sorted(chosen, key=every.index)


# ---- models and batches --------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Blocks with a residual between a first and a last layer; what comes as images is averaged over their places."""

    def __init__(self, first: nn.Module, last: nn.Module, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.blocks = nn.ModuleList(blocks)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        x = self.first(inputs.to(self.first.weight.dtype))
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.last(x.mean((2, 3)) if x.ndim == 4 else x).float(), labels)


def perceptron(*, wide: bool) -> Residual:
    """Its matrices are more than one block of the gradient norm (65,536 elements); the last block of the wide one is
    more than one chunk of the states that pass through VRAM (8,388,608)."""
    return Residual(
        nn.Linear(13, 37),
        nn.Linear(37, 5),
        (
            nn.Sequential(nn.LayerNorm(37), nn.Linear(37, hidden), nn.GELU(), nn.Linear(hidden, 37))
            for hidden in (1999, 1999, 1999, 119_983 if wide else 1999)
        ),
    )


def convolutions() -> Residual:
    """As `perceptron`, of images."""
    blocks = (
        nn.Sequential(nn.Conv2d(11, 11, 3, padding=1, bias=False), nn.GroupNorm(1, 11), nn.ReLU()) for _ in range(4)
    )
    return Residual(nn.Conv2d(3, 11, 3, stride=2), nn.Linear(11, 5), blocks)


def build(name: str) -> nn.Module:
    """The model, with the same random weights each time.

    transformers keeps no keys and values where activations are recomputed, and rounds otherwise then: here never.
    """
    torch.manual_seed(0)
    if name == "cnn":
        return convolutions()
    if name in ("mlp", "mlp-wide"):
        return perceptron(wide=name == "mlp-wide")
    common: dict[str, Any] = {"vocab_size": 97, "use_cache": False, "attn_implementation": "eager"}
    if name in T5:  # its head is tied to its embeddings
        shape = {"d_model": 24, "d_ff": 40, "d_kv": 8, "num_layers": 3, "num_heads": 2, "decoder_start_token_id": 0}
        dropout = 0.1 if name == "t5-dropout" else 0.0
        model = hf.T5ForConditionalGeneration(hf.T5Config(**common, **shape, dropout_rate=dropout))
        if name == "t5-frozen":
            for frozen in ("encoder.block.1.layer.1.DenseReluDense.wi.weight", "decoder.final_layer_norm.weight"):
                model.get_parameter(frozen).requires_grad_(False)
        return model
    common |= {"hidden_size": 16, "intermediate_size": 40, "max_position_embeddings": 48}
    common |= {"num_hidden_layers": 4, "num_attention_heads": 2}
    if name.startswith("llama"):
        tied = name == "llama-ragged"
        return hf.LlamaForCausalLM(hf.LlamaConfig(**common, num_key_value_heads=1, tie_word_embeddings=tied))
    bert = hf.BertConfig(**common, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return hf.BertForMaskedLM(bert) if name == "bert-words" else hf.BertForSequenceClassification(bert)


def param_groups(name: str, model: nn.Module) -> list[dict[str, Any]] | None:
    """Matrices and vectors apart, for the case with groups."""
    if name != "t5-groups":
        return None
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-3}]


def batches(name: str, num: int) -> list[dict[str, Tensor]]:
    """`num` different ones, in RAM, the same each time."""
    generator = torch.Generator().manual_seed(1)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def text(shortest: int, longest: int) -> tuple[Tensor, Tensor]:
        """Token ids of three sequences, padded with 0 behind, and their mask."""
        lengths = whole(shortest, longest + 1, 3)
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        return whole(2, 97, *mask.shape) * mask, mask

    found = []
    for _ in range(num):
        if name in ("cnn", "mlp", "mlp-wide"):
            inputs = torch.randn((4, 3, 9, 9) if name == "cnn" else (4, 13), generator=generator)
            found.append({"inputs": inputs, "labels": whole(0, 5, 4)})
            continue
        ragged = name in ("t5-ragged", "t5-groups", "llama-ragged", "bert-classify")
        ids, mask = text(2 if ragged else 9, 9)
        batch = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100)}
        if name in T5:
            ids, mask_of_labels = text(2 if ragged else 6, 6)
            batch["labels"] = ids.masked_fill(mask_of_labels == 0, -100)
        elif name == "bert-classify":
            batch["labels"] = whole(0, 2, 3)
        found.append(batch | {"attention_mask": mask} if ragged else batch)
    return found


# ---- running -------------------------------------------------------------------------------------------------------


def be_deterministic() -> None:
    """One thread, no choice of algorithms by their speed, no atomic sums."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when torch first uses the GPU
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Else torch fills new memory with NaN on the present stream, while another stream already writes to it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


def sha256(tensors: dict[str, Tensor]) -> str:
    """Of names, dtypes, shapes and bits."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def run(case: Case, device: str, num_steps: int) -> str:
    """Train; the three hashes."""
    numbers, where = case
    num_steps = min(num_steps, MOST_STEPS.get(numbers.model, num_steps))
    options: dict[str, Any] = {
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": numbers.clip,
        "gradient_accumulation": numbers.accumulation,
        "precision": numbers.precision,
        "working_dtype": numbers.dtype,
        "placement": None if where is None else Placement(**where._asdict()),
    }
    model = build(numbers.model)
    groups, norms = param_groups(numbers.model, model), []
    with OffloadEngine(model, OffloadConfig(**options), param_groups=groups, device=device) as engine:
        engine.train()
        torch.manual_seed(2)  # of dropout
        for index, batch in enumerate(batches(numbers.model, num_steps * numbers.accumulation)):
            overflows = numbers.dtype == "fp16" and index // numbers.accumulation in OVERFLOWING_STEPS
            output = engine(**{name: tensor.to(device) for name, tensor in batch.items()})
            loss = output if isinstance(output, Tensor) else output.loss
            engine.backward(loss * 1e6 if overflows else loss)
            if engine.step():
                norm = engine.grad_norm()
                norms.append(math.nan if norm != norm else norm)  # a NaN's own bits say nothing
        masters = engine.master_weights()
        states: dict[str, Tensor] = {
            f"{name}.{key}": torch.as_tensor(value)
            for name, of_parameter in engine.state_dict()["optimizer"].items()
            for key, value in of_parameter.items()
        }
        if not all(bool(master.isfinite().all()) for master in masters.values()):
            raise ArithmeticError("master weights are not finite")
        of_norms = hashlib.sha256(struct.pack(f"<{num_steps}d", *norms)).hexdigest()
        return f"{sha256(masters)} {sha256(states)} {of_norms}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases, print their lines; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="only the cases with this in their name")
    parser.add_argument("--list", action="store_true", help="print the cases' names, run nothing")
    options = parser.parse_args(arguments)
    cases = [case for case in chosen_cases() if options.only in str(case)]
    if not cases:
        parser.error(f"no case has {options.only!r} in its name")
    if options.list:
        print(*cases, sep="\n")
        return 0
    be_deterministic()
    print(f"{offloadkit.__file__}, torch {torch.__version__}, {options.device}", file=sys.stderr)
    began = time.perf_counter()
    failed: list[str] = []
    groups: dict[Numbers, dict[str, list[str]]] = {}
    for case in cases:
        try:
            hashes = run(case, options.device, options.steps)
            groups.setdefault(case.numbers, {}).setdefault(hashes, []).append(str(case))
        except Exception as error:
            hashes = f"{type(error).__name__}: {error}".replace("\n", " ")
            failed.append(str(case))
        print(case, hashes, flush=True)
    different = [by_hashes for by_hashes in groups.values() if len(by_hashes) > 1]
    for by_hashes in different:
        print("different numbers by placement:", *map(" ".join, by_hashes.values()), sep="\n  ", file=sys.stderr)
    for name in failed:
        print("failed:", name, file=sys.stderr)
    print(
        f"{len(cases)} cases of {len({case.numbers for case in cases})} groups, {len(different)} groups differ, "
        f"{len(failed)} cases failed, {time.perf_counter() - began:.0f} s",
        file=sys.stderr,
    )
    return 1 if failed or (different and options.device == "cpu") else 0


if __name__ == "__main__":
    sys.exit(main())
