"""DPO and GRPO of TRL on offloadkit's engine: seconds of a step, memory planned and measured, tokens/s of generation.

    python -m benchmarks.preferences                       # four parts, each at most 100 s; needs TRL
    python -m benchmarks.preferences --parts grpo-12       # one part
    python -m benchmarks.preferences --tiny                # a try without a GPU

The model is a Llama of 3.2 billion random bf16 weights. Each part runs in its own process, within `vram` GiB, and
prints one line of JSON. Its stderr says when each piece is done, in seconds since the start of the process. A part does
two updates, and up to `--steps` if they end before 80 s:

- `dpo-24`: DPO of 4 pairs of 1,024 tokens; the reference model's weights stream where they do not fit.
- `dpo-24-before`: the same with the reference's log-probabilities computed before training.
- `grpo-24`, `grpo-12`: GRPO of 8 completions of 128 tokens after a prompt of 384. Its generation is compared with plain
  `generate`, with all weights in VRAM, in tokens/s for the same rows in the same process.

TRL computes these losses outside the model, so the first update begins with little in VRAM and more in RAM, and moves
to the plan for its rows. "planned" is the plan in force in a phase, or the larger of two.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback, TrainerControl

from offloadkit import OffloadConfig, OffloadTrainerMixin
from offloadkit.facts import hardware
from offloadkit.facts.telemetry import Telemetry
from offloadkit.planner import Plan

Row = dict[str, Any]

PARTS = {"dpo-24": 24, "dpo-24-before": 24, "grpo-24": 24, "grpo-12": 12}
"""VRAM of each part, in GiB."""
TIMEOUT = 100.0
"""Seconds for a part's process."""
TRAINING = 80.0
"""Seconds from the start of a part's process. An update after the second begins only if it can end by then."""
_NUM_WORDS = 1000
_NUM_STEPS = 7


def main(arguments: list[str] | None = None) -> list[Row]:
    """Run each part in a process, print its line, and return the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.preferences", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--steps", type=int, default=_NUM_STEPS, help="updates of a part")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for trying it without a GPU")
    parser.add_argument("--out", type=Path, help="file for the lines of JSON")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.until is not None:
        try:
            measure(options.parts[0], options.steps, options.until, _print_row, tiny=options.tiny)
        except Exception:  # any error is the result of this part
            _print_row({"part": options.parts[0], "failed": traceback.format_exc()[-3000:]})
        return []
    rows: list[Row] = []
    for part in options.parts:
        rows.append(_in_process(part, options))
        if options.out is not None:
            options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def _print_row(row: Row) -> None:
    print("ROW " + json.dumps(row), flush=True)


def _in_process(part: str, options: argparse.Namespace) -> Row:
    began = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.preferences", "--parts", part, "--steps", str(options.steps)]
    command += ["--until", str(began + TRAINING)]
    try:
        done = subprocess.run(
            [*command, *(["--tiny"] if options.tiny else [])],
            stdout=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT,
            env=os.environ | {"TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore"},
        )
        printed, ended = done.stdout, f"the process ended with exit status {done.returncode}"
    except subprocess.TimeoutExpired as error:
        printed, ended = (error.stdout or b"").decode(errors="replace"), f"no result after {error.timeout:.0f} s"
    found = [line for line in printed.splitlines() if line.startswith("ROW ")]
    row: Row = json.loads(found[-1][4:]) if found else {"part": part, "failed": f"{ended}: stderr says how far it was"}
    row["process_seconds"] = round(time.monotonic() - began, 1)
    print(json.dumps(row), flush=True)
    return row


def _say(what: str) -> None:
    """Print on stderr what is done now."""
    print(f"{time.time() - psutil.Process().create_time():6.1f} s  {what}", file=sys.stderr, flush=True)


class Watch(TrainerCallback):
    """Ends training in time, and notes the plans.

    Attributes:
        plans: each plan that was in force, after the number of updates.
    """

    def __init__(self, until: float, telemetry: Telemetry) -> None:
        """until: a time of `time.monotonic`."""
        self._until, self._telemetry = until, telemetry
        self._began = self._longest = 0.0
        self.plans: list[tuple[int, Plan]] = []

    def note_plan(self, num_updates: int) -> None:
        self.plans.append((num_updates, self._telemetry.plan))

    def on_train_begin(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        _say("the weights are in their places")
        self._began = time.monotonic()
        self.note_plan(0)

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        _say(f"update {state.global_step} was started")
        self.note_plan(state.global_step)
        now = time.monotonic()
        took, self._began = now - self._began, now
        control.should_training_stop |= state.global_step > 1 and now + took >= self._until

    def planned(self, phase: str) -> dict[str, int] | None:
        """Bytes of a phase in the plan in force then. The first step ends with a move to the plan for its rows."""
        noted = {
            "reading": self.plans[:1],
            "evaluation": self.plans[:1],  # log-probabilities before training
            "training": [each for each in self.plans if each[0]],
        }.get(phase, self.plans)
        found = [each for _, plan in noted for each in plan.phases if each.name == phase]
        return {tier: max(getattr(each, tier) for each in found) for tier in ("vram", "ram")} if found else None


def measure(
    part: str, num_steps: int, until: float, report: Callable[[Row], None] = lambda row: None, *, tiny: bool
) -> Row:
    """Train, in this process; returns seconds of settled steps and bytes, measured and planned.

    Args:
        report: called with the row before the engine is closed, which takes seconds.
    """
    _say("libraries are imported")
    device, telemetry = hardware.default_device(), Telemetry()
    offload, watch = OffloadConfig(vram=f"{2 if tiny else PARTS[part]}GiB"), Watch(until, telemetry)
    make = _dpo if part.startswith("dpo") else _grpo
    with tempfile.TemporaryDirectory() as output:
        trainer, plain = make(part, num_steps, output, tiny, device, watch, offload=offload, telemetry=telemetry)
        _say("the Trainer is made")
        trainer.add_callback(watch)
        trainer.train()
        engine = trainer.engine
        engine.synchronize()
        _say("training is done")
        plan = engine.plan
        num_updates = trainer.state.global_step
        records = list(telemetry.records)[num_updates // 2 :]  # the first update begins with little in VRAM
        row: Row = {
            "part": part,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            "updates": num_updates,
            "step_seconds": _median(each.seconds["step"] for each in records if "step" in each.seconds),
            "planned_seconds": plan.seconds.step if plan.seconds else None,
            "plan": str(plan).splitlines(),
            "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
            "bytes": {
                name: {"measured": took, "planned": watch.planned(name)} for name, took in telemetry.peaks.items()
            },
            "moves": {move.why: move.seconds for move in telemetry.moves},
        }
        if plain is not None:
            row |= _of_generation(trainer, telemetry, plain)
        report(row)
        trainer.close()
        _say("the engine is closed")
        return row


def _median(numbers: Iterable[float]) -> float | None:
    found = list(numbers)
    return median(found) if found else None


def _of_generation(trainer: Any, telemetry: Telemetry, plain: float) -> Row:
    first, *later = trainer.rates
    moves = list(telemetry.generation_moves)
    ours = _median(later)
    row: Row = {
        "first_generation_tokens_per_second": first,
        "generation_tokens_per_second": ours,
        "plain_tokens_per_second": plain,
        "seconds_into_vram": _median(moves[0::2]),
        "seconds_out_of_vram": _median(moves[1::2]),
        "generates_in_vram": trainer.engine.plan.generates_in_vram,
    }
    if ours is None:
        said = "the time was over after the first generation, which runs before the plan for the rows"
        return row | {"share_of_plain": said}
    return row | {"generation_seconds": trainer.num_tokens / ours, "share_of_plain": ours / plain}


def _dpo(
    part: str, num_steps: int, output: str, tiny: bool, device: torch.device, watch: Watch, **more: Any
) -> tuple[Any, None]:
    from trl import DPOConfig, DPOTrainer

    class OffloadDPOTrainer(OffloadTrainerMixin, DPOTrainer):  # type: ignore[misc]
        pass

    length, pairs, before = 16 if tiny else 512, 4, part.endswith("before")
    rows = [
        {"prompt": _words(3 * at, length), "chosen": _words(3 * at + 1, length), "rejected": _words(3 * at + 2, length)}
        for at in range(pairs * num_steps)
    ]
    args = DPOConfig(
        output, max_length=2 * length, precompute_ref_log_probs=before, **_arguments(device, num_steps, pairs)
    )
    reference = {} if before else {"ref_model": _model(tiny, device)}
    model, data = _model(tiny, device), Dataset.from_list(rows)
    trainer = OffloadDPOTrainer(
        model=model, args=args, train_dataset=data, processing_class=_tokenizer(), **reference, **more
    )
    return trainer, None


def _grpo(
    part: str, num_steps: int, output: str, tiny: bool, device: torch.device, watch: Watch, **more: Any
) -> tuple[Any, float]:
    from trl import GRPOConfig, GRPOTrainer

    prompt_length, length, completions = 16 if tiny else 384, 16 if tiny else 128, 8

    class OffloadGRPOTrainer(OffloadTrainerMixin, GRPOTrainer):  # type: ignore[misc]
        rates: list[float]
        num_tokens = completions * length

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            self.engine.synchronize()  # the update before is not generation's time
            began = _now(device)
            found = super()._generate_single_turn(*args, **kwargs)
            self.rates.append(self.num_tokens / (_now(device) - began))
            _say(f"generated at {self.rates[-1]:,.0f} tokens/s")
            watch.note_plan(self.state.global_step)
            return found

    model, tokenizer = _model_on(device, tiny), _tokenizer()
    rows = [{"prompt": _words(at, prompt_length)} for at in range(num_steps)]
    exact = {"min_new_tokens": length}  # random weights would end some rows early
    plain = _plain_rate(model, tokenizer(rows[0]["prompt"])["input_ids"], completions, length, device)
    _say(f"plain generate ran at {plain:,.0f} tokens/s")
    _in_ram(model)
    args = GRPOConfig(
        output,
        num_generations=completions,
        max_completion_length=length,
        generation_kwargs=exact,
        beta=0.0,
        **_arguments(device, num_steps, completions),
    )
    trainer = OffloadGRPOTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        reward_funcs=lambda completion_ids, **_: [float(len({*ids})) for ids in completion_ids],
        **more,
    )
    trainer.rates = []
    return trainer, plain


def _plain_rate(model: Any, prompt: list[int], rows: int, length: int, device: torch.device) -> float:
    """Tokens/s of `generate` with the whole model on the device, after a call that warms up."""
    model.eval()
    ids = torch.tensor([prompt] * rows, device=device)
    seconds = []
    for number in (length // 8, length):
        began = _now(device)
        with torch.no_grad():
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=number,
                min_new_tokens=number,
                do_sample=True,
            )
        seconds.append(_now(device) - began)
    model.train()
    return rows * length / seconds[-1]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _arguments(device: torch.device, num_steps: int, rows: int) -> Row:
    on_gpu = device.type == "cuda"
    return {
        "max_steps": num_steps,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-5,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def _model(tiny: bool, device: torch.device) -> LlamaForCausalLM:
    """Random weights in RAM; bf16 on a GPU, where they are drawn."""
    return _in_ram(_model_on(device, tiny))


def _model_on(device: torch.device, tiny: bool) -> LlamaForCausalLM:
    shape = (64, 128, 2, 4, 2) if tiny else (3072, 8192, 28, 24, 8)
    width, inner, blocks, heads, kv_heads = shape
    config = LlamaConfig(
        vocab_size=1024 if tiny else 128_256,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return _drawn_on(device, config, torch.bfloat16 if device.type == "cuda" else torch.float32)


def drawn(config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> LlamaForCausalLM:
    """A model in RAM; its weights are drawn on `device`: a GPU takes a second where the CPU takes half a minute."""
    return _in_ram(_drawn_on(device, config, dtype))


def _drawn_on(device: torch.device, config: LlamaConfig, dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def _in_ram(model: LlamaForCausalLM) -> LlamaForCausalLM:
    on_gpu = model.device.type == "cuda"
    model.to("cpu")
    if on_gpu:
        torch.cuda.empty_cache()
    _say("a model's weights are in RAM")
    return model


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word "w0" to "w999"."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = {word: at for at, word in enumerate([*special, *(f"w{at}" for at in range(_NUM_WORDS))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def _words(seed: int, number: int) -> str:
    drawn = torch.randint(_NUM_WORDS, (number,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{at}" for at in drawn.tolist()) + " "


if __name__ == "__main__":
    main()
