"""The machine that a run's figures are set against: the plan's, or this one, where the plan was made without any."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import torch

from offloadkit import hardware
from offloadkit.plan import Plan


@dataclass(frozen=True)
class Machine:
    """What the monitor needs to know of a machine.

    Attributes:
        on_gpu: whether the model computes on a GPU.
        vram_bytes_per_second: None where it is not known.
        budgets: bytes that this process may have, by tier ("vram", "ram"), with what it has already.
    """

    on_gpu: bool
    vram_bytes_per_second: float | None
    budgets: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan | None) -> Self | None:
        """The machine that `plan` was made for; None where it was made without one."""
        planned_for = plan.basis.hardware if plan is not None and plan.basis is not None else None
        if plan is None or planned_for is None:
            return None
        return cls(not plan.on_cpu, planned_for.vram_bytes_per_second, plan.budgets)

    @classmethod
    def here(cls) -> Self:
        """This one, with what is free now. Where its rates were never measured it takes a few hundredths of a second.

        Whether it computes on a GPU is told by CUDA being in use; on which, by where torch holds most.
        """
        device = hardware.busiest_device()
        budgets = {"ram": hardware.process_ram_bytes() + hardware.ram_available_bytes()}
        if device.type == "cuda":
            own = torch.cuda.memory_allocated(device) + hardware.vram_context_bytes(device)
            budgets["vram"] = own + hardware.vram_bytes(device)[0]
        return cls(device.type == "cuda", hardware.vram_rate(device), budgets)
