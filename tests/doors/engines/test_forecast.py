"""Plans of workloads that are timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from offloadkit.doors.engines.forecast import planned
from offloadkit.doors.engines.work import Work, model_to_plan
from offloadkit.planner import MicroBatch
from tests.hf.tiny import llama_config


def test_full_and_ragged_rows_of_a_causal_model_are_planned_without_a_mask(tmp_path: Path) -> None:
    llama_config(architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)

    def traced(mask: Any) -> MicroBatch:
        work = Work(str(tmp_path), batch_size=2, input_length=64, target_length=0, dtype="bf16", mask=mask)
        _, plan = planned(model_to_plan(work.model), work, torch.device("cpu"))
        assert plan.basis.work is not None
        return plan.basis.work

    full, ragged = (traced(mask).stages[1] for mask in ("full", "ragged"))
    assert (ragged.kept_bytes, ragged.forward.sdpa_flops) == (full.kept_bytes, full.forward.sdpa_flops)
