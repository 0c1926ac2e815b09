"""On a GPU a bare loop and the Trainer plan, stay within the budget and leave nothing behind."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from offloadkit import OffloadConfig, OffloadEngine
from offloadkit.facts import hardware
from offloadkit.hf.source import from_pretrained
from offloadkit.hf.trainer import OffloadSeq2SeqTrainer
from offloadkit.offload.unread import is_unread
from tests.hf.training import arguments

GIB = 1 << 30
SHAPE: dict[str, Any] = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8}


def t5() -> Any:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(**SHAPE, decoder_start_token_id=0, dropout_rate=0.0)).bfloat16()


def rows(number: int = 8) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    words = [torch.randint(3, 1000, (number, length), generator=generator) for length in (512, 128)]
    return [
        {"input_ids": read, "attention_mask": torch.ones_like(read), "labels": wrote}
        for read, wrote in zip(*words, strict=True)
    ]


@pytest.mark.parametrize("has_example", [True, False])
def test_a_bare_loop_keeps_its_budget(has_example: bool) -> None:
    batch = {name: torch.stack([row[name] for row in rows(4)]).cuda() for name in rows(1)[0]}
    budget = int(2.5 * GIB)
    before = torch.cuda.get_per_process_memory_fraction()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    example = batch if has_example else None
    with OffloadEngine(t5(), OffloadConfig(vram=budget), example=example) as engine:
        assert engine.is_beginning == (not has_example)
        for _ in range(4):
            engine.backward(engine(**batch).loss)
            engine.step()
        engine.synchronize()
        assert not engine.is_beginning
        assert engine.plan.tiers["vram"]["activations"] > 0
        assert engine.plan.total_bytes("vram") <= budget
        context = hardware.vram_context_bytes(engine.device)
        assert torch.cuda.max_memory_reserved() + context <= budget
    assert torch.cuda.get_per_process_memory_fraction() == before


def reserve_all(device: torch.device) -> None:
    """Make torch reserve about as much as it may."""
    for share in (0.98, 0.9, 0.8):
        try:
            torch.empty(int(share * hardware.vram_bytes(device)[0]), dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:  # free memory is fragmented
            continue
        return


def test_a_budget_is_kept_while_kernels_load_and_torch_reserves_all_it_may() -> None:
    """The loss is outside the model. Freed memory stays reserved, so there is no slack in the budget."""
    batch = {name: torch.stack([row[name] for row in rows(4)]).cuda() for name in rows(1)[0]}
    labels = batch.pop("labels")
    batch["decoder_input_ids"] = labels
    budget = int(2.5 * GIB)
    torch.cuda.empty_cache()
    used: list[int] = []
    with OffloadEngine(t5(), OffloadConfig(vram=budget)) as engine:

        def look() -> None:
            used.append(torch.cuda.memory_reserved() + hardware.vram_context_bytes(engine.device))

        for _ in range(5):
            reserve_all(engine.device)
            look()
            logits = engine(**batch).logits
            look()
            engine.backward(torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten()))
            look()
            engine.step()
            look()
        with torch.no_grad():
            engine(**batch)
        look()
        engine.synchronize()
    assert max(used) <= budget, [(each - budget) >> 20 for each in used]


def test_what_else_the_process_has_in_vram_counts() -> None:
    batch = {name: torch.stack([row[name] for row in rows(1)]).cuda() for name in rows(1)[0]}
    framework = []
    for size in (1, 1, GIB):  # the first engine of a process also loads kernels
        held = torch.empty(size, dtype=torch.uint8, device="cuda")
        with OffloadEngine(t5(), OffloadConfig(vram=4 * GIB), example=batch) as engine:
            framework.append(engine.plan.tiers["vram"]["framework"])
        del held
    assert 0.9 * GIB < framework[2] - framework[1] < 1.1 * GIB


def test_the_trainer_plans_for_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = arguments(tmp_path, use_cpu=False, bf16=True, max_steps=2, per_device_train_batch_size=4)
    trainer = OffloadSeq2SeqTrainer(
        model=t5(), args=args, train_dataset=rows(), offload=OffloadConfig(vram=int(2.5 * GIB))
    )
    trainer.train()
    assert trainer.engine is not None
    assert "4 x (512+128) tokens a step" in capsys.readouterr().out
    assert {module.config._attn_implementation for module in trainer.model.encoder.block.modules()
            if hasattr(module, "config")} == {"offloadkit"}  # fmt: skip
    trainer.close()


@pytest.mark.parametrize("evaluates", [False, True])
def test_weights_are_read_from_their_files_into_place(evaluates: bool, tmp_path: Path) -> None:
    """With a learning rate of 0, training leaves the weights as read."""
    t5().save_pretrained(tmp_path / "model")
    model = from_pretrained(tmp_path / "model")
    args = arguments(tmp_path, use_cpu=False, bf16=True, max_steps=2, learning_rate=0.0)
    trainer = OffloadSeq2SeqTrainer(
        model=model, args=args, train_dataset=rows(), eval_dataset=rows(2), offload=OffloadConfig(vram=int(2.5 * GIB))
    )
    if evaluates:
        assert isfinite(trainer.evaluate()["eval_loss"])
    assert is_unread(model) != evaluates
    trainer.train()
    trainer.close()
    expected = t5().state_dict()
    assert all(value.cpu().equal(expected[name]) for name, value in model.state_dict().items())
