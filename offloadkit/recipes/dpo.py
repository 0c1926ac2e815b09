"""Tune a chat model on preferences by TRL's DPO, with weights and optimizer states in RAM where VRAM is too small.

Needs:  preferences.jsonl, in each line {"prompt": "...", "chosen": "...", "rejected": "..."}; `pip install trl`.
Start:  offloadkit recipes cp dpo && python dpo.py Qwen/Qwen2.5-1.5B-Instruct preferences.jsonl
Change: the arguments of DPOConfig below; OffloadConfig(vram="8GiB") limits the VRAM.
"""

from __future__ import annotations

import argparse

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from offloadkit import OffloadConfig, OffloadTrainerMixin


class OffloadDPOTrainer(OffloadTrainerMixin, DPOTrainer):
    """TRL's Trainer on offloadkit's engine."""


def main() -> None:
    parser = argparse.ArgumentParser(description="DPO by TRL on offloadkit's engine")
    parser.add_argument("model", help="folder or hub name")
    parser.add_argument("preferences", help=".jsonl file")
    parser.add_argument("--output", default="dpo-output")
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    args = DPOConfig(
        output_dir=options.output,
        max_steps=options.max_steps,
        num_train_epochs=1,
        learning_rate=options.learning_rate,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=8,
        precompute_ref_log_probs=True,  # the reference model is not needed beside the trained one
        logging_steps=1,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        report_to="none",
    )
    trainer = OffloadDPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model),
        args=args,
        train_dataset=load_dataset("json", data_files=options.preferences, split="train"),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        offload=OffloadConfig(),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
