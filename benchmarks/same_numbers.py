"""Shows that a refactoring changes no number: tiny models are trained, and everything they end with is hashed.

    cd OLD; PYTHONPATH=OLD python NEW/benchmarks/same_numbers.py --device cpu > old.txt
    cd NEW; PYTHONPATH=NEW python NEW/benchmarks/same_numbers.py --device cpu --compare old.txt > new.txt

OLD is a checkout of the commit before, with its C kernel built (`python setup.py build_ext --inplace`). The script is
always NEW's: it uses public names of offloadkit only. Stderr says which package was imported. Compare runs of one
machine with the same torch and transformers only. `--compare` prints the lines that differ to stderr; the exit status
is then 1. With `--only`, only the cases that ran are compared. States on disk go to the folder for temporary files
(TMPDIR), which must not be in RAM.

Every line is `case what: hash`, the hash 16 hex digits of a sha256. The cases:

- `loop/...`: the bare loop. The numbers (model, dtype, precision, accumulation, clipping) and the placements are
  chosen pairwise: any two values that can go together meet in some case. fp16 cases overflow twice on
  purpose: those steps are skipped, and the loss scale falls.
- `resume/...`: a loop, and a script for DeepSpeed, that save in mid-epoch and resume under another placement.
- `trainer/...`, `finetune/...`: whole runs with evaluations, and the same run stopped in mid-epoch and resumed. LoRA
  is skipped, and the line says so, where peft is not installed.
- `2-ranks/...`: all of these on two ranks: gloo on the CPU, NCCL on GPUs.
- `plan/...`: plans of large models for cards by their data sheets and an assumed processor. Seconds are rounded to six
  digits, bytes are exact.

A checkpoint has a line for each array in it; what the files say of the run that wrote them is left out. All placements
of one loop must give the same hashes, and so must a resumed run and the uninterrupted run. If they do not, or a case
fails, the names are printed at the end, and the exit status is 1 (on a GPU such differences are printed only).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import combinations, product
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
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
"""The updates of fp16 cases that overflow. The first overflow keeps the loss scale, the second halves it."""
LIMIT = 180.0
"""Timeout of a case in seconds."""
Lines = dict[str, str]
"""Hashes by name: "losses", "weights", ..."""


class Numbers(NamedTuple):
    """Everything that decides a case's numbers."""

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
    """All pairs of (field, value) in these parts."""
    values: list[tuple[str, Any]] = []
    for part in parts:
        values += part._asdict().items() if part is not None else [("placement", "plan")]
    return set(combinations(values, 2))


def chosen_numbers() -> list[Numbers]:
    """A fixed sample of `ALL_NUMBERS` that contains every pair of values."""
    missing = set[Pair]().union(*map(pairs, ALL_NUMBERS))
    chosen = []
    while missing:
        chosen.append(max(ALL_NUMBERS, key=lambda numbers: len(missing & pairs(numbers))))
        missing -= pairs(chosen[-1])
    return sorted(chosen, key=ALL_NUMBERS.index)


def chosen_cases() -> list[Case]:
    """A fixed sample with every pair of values, and at least `PLACEMENTS_EACH` cases for each of `chosen_numbers`."""
    every = [Case(*both) for both in product(chosen_numbers(), ALL_WHERE)]
    missing = set[Pair]().union(*(pairs(*case) for case in every))
    uses: Counter[Where | None] = Counter()
    chosen: list[Case] = []

    def choose(candidates: Iterable[Case]) -> None:
        """Choose the case with the most new pairs, then with the least used placement."""
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
    """Like `perceptron`, for images."""
    blocks = (
        nn.Sequential(nn.Conv2d(11, 11, 3, padding=1, bias=False), nn.GroupNorm(1, 11), nn.ReLU()) for _ in range(4)
    )
    return Residual(nn.Conv2d(3, 11, 3, stride=2), nn.Linear(11, 5), blocks)


def build(name: str, vocabulary: int = 97) -> nn.Module:
    """The model, with the same random weights each time.

    transformers keeps no keys and values while activations are recomputed, which changes the rounding: never here.
    """
    torch.manual_seed(0)
    if name == "cnn":
        return convolutions()
    if name in ("mlp", "mlp-wide"):
        return perceptron(wide=name == "mlp-wide")
    common: dict[str, Any] = {"vocab_size": vocabulary, "use_cache": False, "attn_implementation": "eager"}
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
    """`num` different batches in RAM, the same each time."""
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


# ---- hashing -------------------------------------------------------------------------------------------------------


def be_deterministic() -> None:
    """One thread, no choice of algorithms by their speed, no atomic sums."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when torch first uses the GPU
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Otherwise torch would fill new memory with NaN on the present stream while another stream already writes to it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


def sha256(tensors: dict[str, Tensor]) -> str:
    """The hash covers names, dtypes, shapes and bits."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def digest(value: Any) -> str:
    """The sha256 of numbers, texts, lists and dicts. All NaNs have the same hash."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def arrays_of(checkpoint: Path) -> Lines:
    """A line for each array in the weights and states of a checkpoint. The files' metadata names the run: left out."""
    lines: Lines = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                array = file.get_tensor(name)
                said = f"checkpoint {path.name} {name} {array.dtype} {tuple(array.shape)}"
                lines[said] = sha256({name: array})
    if not lines:
        raise FileNotFoundError(f"no arrays in {checkpoint}")
    return lines


def plan_of(engine_plan: Any, where: Where | None, device: str) -> Lines:
    """The parts of an engine's plan that do not depend on measured rates; on a GPU only for a given placement."""
    if where is None and device != "cpu":
        return {}
    plan = engine_plan.to_dict()
    names = ["num_parameters", "num_trainable_parameters", "layers", "checkpoint_bytes", "communicated_bytes"]
    names += ["bytes", "phases"] if device == "cpu" else []  # on a GPU these hold measured bytes of CUDA's context
    return {"plan": digest({name: plan[name] for name in names})}


def checked(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights, or an error if they are not finite."""
    if not all(bool(each.isfinite().all()) for each in weights.values()):
        raise ArithmeticError("weights are not finite")
    return weights


# ---- loops ---------------------------------------------------------------------------------------------------------


class Loop:
    """An engine, or DeepSpeed's engine over it, in a loop over micro-batches dealt to the ranks."""

    def __init__(self, case: Case, device: str, folder: Path, num_steps: int, *, deepspeed: bool = False) -> None:
        self.numbers, self.where = case
        self.device, self.folder, self.is_deepspeed = device, folder, deepspeed
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.losses: list[float] = []
        self.norms: list[float | None] = []
        num_steps = min(num_steps, MOST_STEPS.get(self.numbers.model, num_steps))
        every = batches(self.numbers.model, num_steps * self.numbers.accumulation * self.size)
        self.batches = every[self.rank :: self.size]

    def make(self, where: Where | None, exchange: str = "step") -> Any:
        """A new engine."""
        numbers, model = self.numbers, build(self.numbers.model)
        if self.is_deepspeed:
            settings = {
                "train_micro_batch_size_per_gpu": 3,
                "gradient_accumulation_steps": numbers.accumulation,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}},
                "gradient_clipping": numbers.clip or 0.0,
                **({"bf16": {"enabled": True}} if numbers.dtype == "bf16" else {}),
            }
            parameters = [each for each in model.parameters() if each.requires_grad]
            return offloadkit.initialize(model=model, model_parameters=parameters, config=settings)[0]
        options: dict[str, Any] = {
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "max_grad_norm": numbers.clip,
            "gradient_accumulation": numbers.accumulation,
            "precision": numbers.precision,
            "working_dtype": numbers.dtype,
            "placement": placed(where),
            "exchange": exchange,
        }
        groups = param_groups(numbers.model, model)
        return OffloadEngine(model, OffloadConfig(**options), param_groups=groups, device=self.device)

    def train(self, engine: Any, begin: int, end: int) -> None:
        """Take the micro-batches from `begin` to `end`."""
        for index in range(begin, end):
            overflows = self.numbers.dtype == "fp16" and index // self.numbers.accumulation in OVERFLOWING_STEPS
            output = engine(**{name: tensor.to(self.device) for name, tensor in self.batches[index].items()})
            loss = output if isinstance(output, Tensor) else output.loss
            self.losses.append(loss.item())
            engine.backward(loss * 1e6 if overflows else loss)
            if engine.step() and not self.is_deepspeed:
                self.norms.append(engine.grad_norm())

    def lines(self, engine: Any) -> Lines:
        """Hashes of the final numbers."""
        lines = {"losses": digest(self.losses)}
        if self.is_deepspeed:
            engine.destroy()
            return lines | {"weights": sha256(checked(dict(engine.module.named_parameters())))}
        states: dict[str, Tensor] = {
            f"{name}.{key}": torch.as_tensor(value)
            for name, of_parameter in engine.state_dict()["optimizer"].items()
            for key, value in of_parameter.items()
        }
        lines |= {"weights": sha256(checked(engine.master_weights())), "states": sha256(states)}
        return lines | {"norms": digest(self.norms)} | plan_of(engine.plan, self.where, self.device)


def placed(where: Where | None) -> Placement | None:
    """The placement, for a config."""
    return None if where is None else Placement(**where._asdict())


def run_loop(case: Case, device: str, folder: Path, num_steps: int, exchange: str = "step") -> Lines:
    """Train in a bare loop."""
    loop = Loop(case, device, folder, num_steps)
    with loop.make(case.where, exchange) as engine:
        engine.train()
        torch.manual_seed(2 + loop.rank)  # of dropout
        loop.train(engine, 0, len(loop.batches))
        return loop.lines(engine)


def run_resumed(case: Case, device: str, folder: Path, num_steps: int, then: Where | None, deepspeed: bool) -> Lines:
    """Train, save after half of the updates, and resume in a new engine with the placement `then`."""
    whole, begun = (Loop(case, device, folder, num_steps, deepspeed=deepspeed) for _ in range(2))
    engine = whole.make(case.where)
    torch.manual_seed(2 + whole.rank)
    engine.train()
    whole.train(engine, 0, len(whole.batches))
    lines = whole.lines(engine)
    None if deepspeed else engine.close()

    half = num_steps // 2 * case.numbers.accumulation
    engine = begun.make(case.where)
    torch.manual_seed(2 + begun.rank)
    engine.train()
    begun.train(engine, 0, half)
    if deepspeed:
        engine.save_checkpoint(folder / "saved", tag="half", client_state={"next": half})
        engine.destroy()
    else:
        engine.save_checkpoint(folder / "saved" / "half", position=half)
        engine.close()
    arrays = arrays_of(folder / "saved" / "half")

    torch.manual_seed(99)
    engine = begun.make(then)
    engine.train()
    if deepspeed:
        begin = engine.load_checkpoint(folder / "saved")[1]["next"]
    else:
        begin = engine.load_checkpoint(folder / "saved" / "half")
    begun.train(engine, begin, len(begun.batches))
    resumed = {f"resumed {what}": value for what, value in begun.lines(engine).items() if what != "plan"}
    None if deepspeed else engine.close()
    return lines | resumed | arrays


# ---- Trainer and finetune ------------------------------------------------------------------------------------------


class Door(NamedTuple):
    """A run of the Trainer or of `finetune`."""

    model: str
    dtype: str
    precision: str
    accumulation: int
    clip: float
    where: Where | None
    optimizer: str = "adamw"

    def __str__(self) -> str:
        numbers = Numbers(self.model, self.dtype, self.precision, self.accumulation, self.clip)
        return f"{numbers}/{self.optimizer}/{self.where or 'plan'}"


_ALL_LEFT = Where("ram", "ram", "disk", "offload", "cpu")
_STREAMED = Where("ram", "vram", "ram", "checkpoint", "gpu")
_RESIDENT = Where("vram", "vram", "vram", "keep", "gpu")
_IN_RAM = Where("vram", "ram", "ram", "keep", "cpu")
TRAINED = [
    Door("t5-ragged", "fp32", "exact", 1, 1.0, None),
    Door("t5-dropout", "bf16", "exact", 2, 0.1, _STREAMED),
    Door("t5-frozen", "bf16", "tiny", 1, 1.0, _IN_RAM),
    Door("llama-ragged", "bf16", "compact", 2, 0.1, _ALL_LEFT),
    Door("llama-full", "fp16", "exact", 1, 1.0, _STREAMED),
    Door("llama-full", "bf16", "exact", 2, 1.0, _IN_RAM, "lion"),
    Door("bert-classify", "fp32", "tiny", 2, 0.1, _RESIDENT),
    Door("llama-lora", "bf16", "exact", 1, 1.0, _STREAMED),
    Door("t5-lora", "fp32", "compact", 2, 0.1, _IN_RAM),
]
FINETUNED = [
    Door("t5-full", "fp32", "exact", 1, 1.0, None),
    Door("t5-dropout", "bf16", "compact", 2, 0.1, _ALL_LEFT),
    Door("llama-full", "bf16", "exact", 2, 1.0, _STREAMED),
    Door("llama-ragged", "fp16", "tiny", 1, 0.1, _IN_RAM),
    Door("bert-classify", "fp32", "exact", 2, 1.0, _RESIDENT),
]
_UPDATES, _STOP = 6, 3
"""Updates in all and before the checkpoint, which is in mid-epoch for each accumulation and number of ranks."""
_ROWS = 20


def build_door(name: str, vocabulary: int) -> Any:
    """The model, with LoRA's factors if its name says so."""
    if not name.endswith("-lora"):
        return build(name, vocabulary)
    peft: Any = importlib.import_module("peft")
    is_t5 = name.startswith("t5")
    torch.manual_seed(3)
    targets = ["q", "v"] if is_t5 else ["q_proj", "v_proj"]
    task = "SEQ_2_SEQ_LM" if is_t5 else "CAUSAL_LM"
    lora = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=targets, task_type=task)
    return peft.get_peft_model(build("t5-full" if is_t5 else "llama-full", vocabulary), lora)


def rows_of(name: str, num: int, seed: int) -> list[dict[str, Tensor]]:
    """Rows for a Trainer, padded with 0 behind; with masks where the model's rows are ragged."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for at in range(num):
        ids = torch.randint(2, 97, (9,), generator=generator)
        row = {"input_ids": ids, "labels": ids.clone()}
        if name.startswith("t5"):
            row["labels"] = torch.randint(2, 97, (6,), generator=generator)
        if name in ("t5-ragged", "llama-ragged", "bert-classify"):
            length = 2 + at * 5 % 8
            row["attention_mask"] = (torch.arange(9) < length).long()
            row["input_ids"] = ids * row["attention_mask"]
            row["labels"][max(2, length - 3) :] = -100
        if name == "bert-classify":
            row["labels"] = torch.tensor(at * 3 % 2)
        rows.append(row)
    return rows


def texts_of(name: str, num: int, begin: int = 0) -> list[dict[str, Any]]:
    """Rows for `finetune`, of several lengths."""
    words = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "user", "hello", "good", "bad"]
    texts = [" ".join(words[(at * k + 1) % 14] for k in range(1, 2 + at * 5 % 7)) for at in range(begin, begin + num)]
    if name.startswith("bert"):
        return [{"text": text, "label": "long" if len(text) > 12 else "short"} for text in texts]
    return [{"input": text, "target": " ".join(text.split()[:3][::-1])} for text in texts]


class Stops(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Stops a run after `_STOP` updates: as the Trainer's own stop, or as an interrupt of the last rank."""

    def __init__(self, *, interrupts: bool) -> None:
        self._interrupts = interrupts

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop."""
        if state.global_step != _STOP:
            return
        if not self._interrupts:
            control.should_training_stop = True
        elif int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1:
            signal.raise_signal(signal.SIGINT)


def logged(history: Iterable[dict[str, Any]]) -> str:
    """Hash of a Trainer's logs without times."""
    numbers = ("loss", "grad_norm", "learning_rate", "eval_loss", "step", "epoch")
    steps = [entry for entry in history if "loss" in entry or "eval_loss" in entry]  # the last one sums up the run
    return digest([{name: entry[name] for name in numbers if name in entry} for entry in steps])


def arguments_of(door: Door, device: str) -> dict[str, Any]:
    """Training arguments that the Trainer and `finetune` share."""
    return {
        "use_cpu": device == "cpu",
        "max_steps": _UPDATES,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": door.clip,
        "gradient_accumulation_steps": door.accumulation,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": _STOP,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "disable_tqdm": True,
        "report_to": [],
        "seed": 5,
    }


def run_trainer(door: Door, device: str, folder: Path) -> Lines:
    """Train whole; then stop, and resume in a new Trainer."""
    options = arguments_of(door, device) | {"bf16": door.dtype == "bf16"}
    offload = OffloadConfig(
        precision=door.precision,  # type: ignore[arg-type]
        working_dtype=door.dtype,  # type: ignore[arg-type]
        placement=placed(door.where),
        optimizer=door.optimizer,
    )
    if door.optimizer == "lion":
        options["optim"] = "lion_32bit"

    class Mixed(offloadkit.OffloadTrainerMixin, transformers.Trainer):  # type: ignore[misc, unused-ignore]
        pass

    def trained(output: Path, *, stops: bool = False, resume: bool = False) -> tuple[str, str, Lines]:
        """(losses, weights, the plan's line)"""
        trainer: Any = Mixed(
            model=build_door(door.model, 97),
            args=transformers.TrainingArguments(str(output), **options),
            train_dataset=rows_of(door.model, _ROWS, 1),
            eval_dataset=rows_of(door.model, 5, 2),
            offload=offload,
            callbacks=[Stops(interrupts=False)] if stops else [],
        )
        with closing(trainer):
            trainer.train(resume_from_checkpoint=resume)
            plan = plan_of(trainer.engine.plan, door.where, device)
            trainer.engine.synchronize()
            masters = sha256(checked(trainer.engine.master_weights()))
            return logged(trainer.state.log_history), masters, plan

    losses, weights, plan = trained(folder / "whole")
    trained(folder / "stopped", stops=True)
    arrays = arrays_of(folder / "stopped" / f"checkpoint-{_STOP}")
    resumed_losses, resumed_weights, _ = trained(folder / "stopped", resume=True)
    resumed = {"resumed losses": resumed_losses, "resumed weights": resumed_weights}
    return {"losses": losses, "weights": weights} | plan | resumed | arrays


def run_finetune(door: Door, device: str, folder: Path) -> Lines:
    """As `run_trainer`; an interrupt stops it."""
    options = arguments_of(door, device)
    offload = OffloadConfig(working_dtype=door.dtype, placement=placed(door.where))  # type: ignore[arg-type]

    def tuned(output: Path, **more: Any) -> Any:
        return offloadkit.finetune(
            build_door(door.model, 384),
            texts_of(door.model, _ROWS),
            eval_dataset=texts_of(door.model, 5, begin=_ROWS),
            tokenizer="byte",
            output_dir=output,
            precision=door.precision,  # type: ignore[arg-type]
            offload=offload,
            monitor=False,
            **(options | more),
        )

    def lines(result: Any) -> Lines:
        metrics = {name: value for name, value in result.metrics.items() if name != "train_seconds"}
        return {
            "losses": logged(result.history),
            "weights": sha256(checked(dict(result.model.named_parameters()))),
            "metrics": digest([metrics, list(map(repr, result.samples))]),
        }

    whole = tuned(folder / "whole")
    plan = plan_of(whole.plan, door.where, device)
    tuned(folder / "stopped", callbacks=[Stops(interrupts=True)])
    arrays = arrays_of(folder / "stopped" / f"checkpoint-{_STOP}")
    resumed = lines(tuned(folder / "stopped", resume=True))
    return lines(whole) | plan | {f"resumed {what}": value for what, value in resumed.items()} | arrays


# ---- plans ---------------------------------------------------------------------------------------------------------

_T5_3B, _LLAMA_3B = ("t5-3b", 4, 512), ("llama-3.2-3b", 2, 1024)
PLANS: dict[str, tuple[tuple[str, int, int], dict[str, Any]]] = {
    "t5-3b/24GiB": (_T5_3B, {"vram": "22GiB", "ram": "64GiB", "gpu": "RTX 4090"}),
    "t5-3b/8GiB": (_T5_3B, {"vram": "8GiB", "ram": "64GiB", "gpu": "RTX 4090"}),
    "t5-3b/8GiB/compact": (_T5_3B, {"vram": "8GiB", "ram": "64GiB", "gpu": "RTX 4090", "precision": "compact"}),
    "t5-3b/too-small": (_T5_3B, {"vram": "2GiB", "ram": "8GiB", "gpu": "RTX 4090"}),
    "t5-3b/2-ranks": (_T5_3B, {"vram": "12GiB", "ram": "96GiB", "gpu": "A100", "num_gpus": 2}),
    "t5-large/T4": (("t5-large", 4, 512), {"vram": "14GiB", "ram": "12GiB", "gpu": "T4", "gradient_accumulation": 4}),
    "llama-3.2-3b/24GiB": (_LLAMA_3B, {"vram": "22GiB", "ram": "64GiB", "gpu": "RTX 3090"}),
    "llama-3.2-3b/8-ranks": (
        _LLAMA_3B,
        {"vram": "24GiB", "ram": "400GiB", "gpu": "H100", "num_gpus": 8, "gradient_accumulation": 2},
    ),
    "llama-3.1-8b/tiny": (
        ("llama-3.1-8b", 1, 2048),
        {"vram": "22GiB", "ram": "64GiB", "gpu": "RTX 4090", "precision": "tiny"},
    ),
}


@contextmanager
def nothing_measured() -> Iterator[None]:
    """Hide the measured rates of this machine."""
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            yield
        finally:
            os.environ.pop("XDG_CACHE_HOME")
            os.environ |= {} if before is None else {"XDG_CACHE_HOME": before}


def run_plan(name: str, device: str, folder: Path) -> Lines:
    """A plan for a fixed machine. Only the numbers in its sentences are hashed, so they may be reworded."""
    (model, rows, length), options = PLANS[name]
    with nothing_measured():
        plan = offloadkit.plan(model, batch_size=rows, max_input_length=length, **options)
        found, explained = plan.to_dict(), plan.explain()
    seconds = [found["step_seconds"], found["exposed_seconds"], found["slowdown"], *found["busy_seconds"].values()]
    sizes = ("fits", "num_parameters", "bytes", "missing_bytes", "phases", "checkpoint_bytes", "checkpoint_peak_bytes")
    missing = {tier: number for tier, number in found["missing_bytes"].items() if tier != "disk"}
    numbers = sorted(set(re.findall(r"\d[\d.,]*\d|\d", explained)))
    return {
        "placements": digest(found["layers"]),
        "bytes": digest({size: found[size] for size in sizes} | {"missing_bytes": missing}),
        "communicated": digest([found["communicated_bytes"], found["num_tokens"]]),
        "seconds": digest([None if each is None else f"{each:.6g}" for each in seconds]),
        "explained": digest(numbers),
    }


# ---- running -------------------------------------------------------------------------------------------------------


class Task(NamedTuple):
    """A case, as a process runs it."""

    name: str
    ranks: int
    run: Callable[..., Lines]
    arguments: dict[str, Any]
    group: Any = None
    """Cases of one group end with the same hashes, except for plans."""
    needs: str = ""
    """A package that the case needs, or it is skipped."""


def all_tasks(num_steps: int) -> list[Task]:
    """All cases in the order of the output."""
    tasks = [Task(f"plan/{name}", 1, run_plan, {"name": name}) for name in PLANS]
    tasks += [
        Task(f"loop/{case}", 1, run_loop, {"case": case, "num_steps": num_steps}, (1, case.numbers))
        for case in chosen_cases()
    ]
    for ranks in (1, 2):
        before = f"{ranks}-ranks/" if ranks > 1 else ""
        if ranks > 1:
            used: set[Numbers] = set()
            for case in chosen_cases():
                for exchange in ("step",) if case.numbers.accumulation == 1 else ("step", "micro_batch"):
                    is_first = case.numbers not in used
                    if is_first or (case.where is not None and case.where.weights == "ram" and exchange == "step"):
                        arguments = {"case": case, "num_steps": 6, "exchange": exchange}
                        name = f"{before}loop/{case}/{exchange}"
                        tasks.append(Task(name, ranks, run_loop, arguments, (ranks, case.numbers, exchange)))
                used.add(case.numbers)
        for door, numbers, where, then in (
            ("loop", Numbers("t5-dropout", "bf16", "compact", 2, 0.1), _IN_RAM, _STREAMED),
            ("loop", Numbers("llama-ragged", "fp16", "exact", 1, 1.0), _ALL_LEFT, _RESIDENT),
            ("loop", Numbers("t5-groups", "fp32", "tiny", 2, None), _RESIDENT, _ALL_LEFT),
            ("deepspeed", Numbers("t5-frozen", "bf16", "exact", 2, 0.1), None, None),
        ):
            arguments = {"case": Case(numbers, where), "num_steps": 8, "then": then, "deepspeed": door == "deepspeed"}
            tasks.append(Task(f"{before}resume/{door}/{Case(numbers, where)}", ranks, run_resumed, arguments))
        for run, name, doors in ((run_trainer, "trainer", TRAINED), (run_finetune, "finetune", FINETUNED)):
            for each in doors:
                needs = "peft" if each.model.endswith("-lora") else ""
                tasks.append(Task(f"{before}{name}/{each}", ranks, run, {"door": each}, needs=needs))
    return tasks


def serve(rank: int, size: int, device: str, tasks: Connection) -> None:
    """Run tasks in this process, a rank of `size`, until None comes."""
    be_deterministic()
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    own = device
    if device == "cuda":
        number = rank % torch.cuda.device_count()
        if size > torch.cuda.device_count():  # NCCL takes two ranks on one GPU, if they say that they are on two hosts
            os.environ |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo"}
        torch.cuda.set_device(number)
        own = f"cuda:{number}"
    if size > 1:
        local = torch.cuda.current_device() if device == "cuda" else rank
        who = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ |= {name: str(value) for name, value in {**who, "MASTER_ADDR": "127.0.0.1"}.items()}
    while (task := tasks.recv()) is not None:
        run, arguments, store = task
        try:
            if size > 1:
                backend = "nccl" if device == "cuda" else "gloo"
                dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
            tasks.send(run(device=own, **arguments))
            if size > 1:
                dist.destroy_process_group()
        except Exception as error:
            tasks.send(f"{type(error).__name__}: {error}".replace("\n", " "))
            raise


class Processes:
    """Teams of processes: each runs one task at a time, all its processes together."""

    def __init__(self, num_teams: int, size: int, device: str) -> None:
        self._size, self._device = size, device
        self._teams = [self._start() for _ in range(num_teams)]

    def _start(self) -> list[tuple[Any, Connection]]:
        context, team = multiprocessing.get_context("spawn"), []
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, self._size, self._device, theirs), daemon=True)
            process.start()
            theirs.close()
            team.append((process, ours))
        return team

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Lines | str]]:
        """Yield each task with its lines or its error. A team with a failed process is replaced."""
        waiting, running = list(reversed(tasks)), dict[int, tuple[Task, tempfile.TemporaryDirectory[str]]]()
        while waiting or running:
            for at, team in enumerate(self._teams):
                if waiting and at not in running:
                    task, folder = waiting.pop(), tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
                    running[at] = task, folder
                    arguments = task.arguments | {"folder": Path(folder.name)}
                    for _, pipe in team:
                        pipe.send((task.run, arguments, f"{folder.name}/store"))
            ready = wait([self._teams[at][0][1] for at in running], timeout=LIMIT)
            for at in [at for at in running if not ready or self._teams[at][0][1] in ready]:
                task, folder = running.pop(at)
                answers = [self._answer(pipe) for _, pipe in self._teams[at]]
                failed = next((answer for answer in answers if isinstance(answer, str)), None)
                if failed is not None:
                    self._end(self._teams[at])
                    self._teams[at] = self._start()
                folder.cleanup()
                yield task, failed or merged([each for each in answers if isinstance(each, dict)])

    @staticmethod
    def _answer(pipe: Connection) -> Lines | str:
        try:
            answer: Lines | str = pipe.recv() if pipe.poll(10) else "TimeoutError: a process hangs"
        except EOFError:
            answer = "EOFError: a process ended"
        return answer

    @staticmethod
    def _end(team: list[tuple[Any, Connection]]) -> None:
        for process, _ in team:
            process.kill()
            process.join()

    def close(self) -> None:
        """End the idle processes."""
        for team in self._teams:
            for process, pipe in team:
                pipe.send(None)
                process.join(LIMIT)


def merged(answers: Sequence[Lines]) -> Lines:
    """The lines of all ranks; lines that differ between ranks are hashed together."""
    found: Lines = {}
    for what in dict.fromkeys(what for answer in answers for what in answer):
        values = [answer.get(what, "") for answer in answers]
        found[what] = values[0] if len(set(values)) == 1 else hashlib.sha256(" ".join(values).encode()).hexdigest()
    return found


def unequal(results: Iterable[tuple[Task, Lines]]) -> list[str]:
    """Names of cases whose resumed run or other placements gave different numbers."""
    found, groups = [], dict[Any, dict[str, list[str]]]()
    for task, lines in results:
        if task.group is not None:
            numbers = " ".join(value for what, value in lines.items() if what != "plan")
            groups.setdefault(task.group, {}).setdefault(numbers, []).append(task.name)
        whole = [what for what in ("losses", "weights", "states") if f"resumed {what}" in lines]
        found += [f"{task.name} {what} as resumed" for what in whole if lines[what] != lines[f"resumed {what}"]]
    for by_numbers in groups.values():
        if len(by_numbers) > 1:
            found.append("by placement: " + " | ".join(map(" ".join, by_numbers.values())))
    return found


def parsed(text: str) -> Lines:
    """The hash of each line by what is before it."""
    lines = [line.partition(": ") for line in text.splitlines() if line]
    return {name: value for name, _, value in lines}


def differences(old: str, new: str, cases: Iterable[str]) -> list[str]:
    """Lines of these cases that differ between two outputs."""
    own = set(cases)
    olds, news = parsed(old), parsed(new)
    names = [name for name in dict.fromkeys([*olds, *news]) if name.partition(" ")[0] in own]
    said = {(True, False): "only in the old output", (False, True): "only in the new output", (True, True): "differs"}
    return [f"{said[name in olds, name in news]}: {name}" for name in names if olds.get(name) != news.get(name)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases and print their lines. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=8, help="updates of a bare loop on one rank")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="only the cases with this in their name")
    parser.add_argument("--list", action="store_true", help="print the cases' names, run nothing")
    parser.add_argument("--compare", type=Path, metavar="OLD.txt", help="the output of another run; says what differs")
    options = parser.parse_args(arguments)
    tasks = [task for task in all_tasks(options.steps) if options.only in task.name]
    if not tasks:
        parser.error(f"no case has {options.only!r} in its name")
    if options.list:
        print(*(task.name for task in tasks), sep="\n")
        return 0
    old = options.compare.read_text() if options.compare else None
    print(f"{offloadkit.__file__}, torch {torch.__version__}, {options.device}", file=sys.stderr)
    began = time.perf_counter()
    results: dict[str, Lines] = {}
    by_name = {task.name: task for task in tasks}
    failed: list[str] = []
    out: dict[str, list[str]] = {}
    for task in tasks:
        if task.needs and importlib.util.find_spec(task.needs) is None:
            out[task.name] = [f"{task.name} skipped: {task.needs} is not installed"]
    for ranks, teams in ((1, 2), (2, 1)):
        todo = [task for task in tasks if task.ranks == ranks and task.name not in out]
        if not todo:
            continue
        processes = Processes(min(teams, len(todo)), ranks, options.device)
        for task, lines in processes.run(todo):
            if isinstance(lines, str):
                failed.append(f"{task.name}: {lines}")
                out[task.name] = [f"{task.name} failed: {lines}"]
                continue
            results[task.name] = lines
            out[task.name] = [f"{task.name} {what}: {value[:16]}" for what, value in lines.items()]
        processes.close()
    text = "\n".join(line for task in tasks for line in out[task.name])
    print(text, flush=True)
    wrong = unequal([(by_name[name], lines) for name, lines in results.items()])
    changed = [] if old is None else differences(old, text, by_name)
    for kind, names in (("failed", failed), ("unequal", wrong), ("changed", changed)):
        for name in names:
            print(f"{kind}: {name}", file=sys.stderr)
    seconds = time.perf_counter() - began
    counts = f"{len(failed)} failed, {len(wrong)} unequal" + (
        f", {len(changed)} lines changed" if options.compare else ""
    )
    print(f"{len(tasks)} cases, {counts}, {seconds:.0f} s", file=sys.stderr)
    return 1 if failed or changed or (wrong and options.device == "cpu") else 0


if __name__ == "__main__":
    sys.exit(main())
