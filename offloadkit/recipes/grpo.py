"""Tune a chat model on a reward by TRL's GRPO, with weights and optimizer states in RAM where VRAM is too small.

Needs:  questions.jsonl, in each line {"prompt": "...", "answer": "..."}; `pip install trl`.
Start:  offloadkit recipes cp grpo && python grpo.py Qwen/Qwen2.5-1.5B-Instruct questions.jsonl
Change: `reward` and the arguments of GRPOConfig below; OffloadConfig(vram="12GiB") limits the VRAM.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from offloadkit import OffloadConfig, OffloadTrainerMixin


class OffloadGRPOTrainer(OffloadTrainerMixin, GRPOTrainer):
    """TRL's Trainer on offloadkit's engine. While it writes completions, the weights are in VRAM if they fit."""


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The share of the answer's words that the completion has."""
    shares = []
    for written, expected in zip(completions, answer, strict=True):
        words = expected.split()
        shares.append(sum(word in written.split() for word in words) / max(len(words), 1))
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO by TRL on offloadkit's engine")
    parser.add_argument("model", help="folder or hub name")
    parser.add_argument("questions", help=".jsonl file")
    parser.add_argument("--output", default="grpo-output")
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--max-completion-length", type=int, default=256)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    args = GRPOConfig(
        output_dir=options.output,
        max_steps=options.max_steps,
        num_train_epochs=1,
        learning_rate=options.learning_rate,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        num_generations=8,  # completions of each prompt, whose rewards are compared
        max_completion_length=options.max_completion_length,
        logging_steps=1,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        report_to="none",
    )
    trainer = OffloadGRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model),
        reward_funcs=reward,
        args=args,
        train_dataset=load_dataset("json", data_files=options.questions, split="train"),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        offload=OffloadConfig(),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
