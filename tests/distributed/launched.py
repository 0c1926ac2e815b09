"""A script for launchers: `launched.py finetune|loop|accelerate FOLDER`. Each rank writes its final weights.

- `loop`: a bare loop. With several nodes, each node counts as a host.
- `accelerate`: a bare loop with accelerate's loader, then a Trainer.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def loop(accelerator: Any = None) -> dict[str, torch.Tensor]:
    """Two micro-batches an update over one or two ranks; an accelerator's loader distributes them."""
    from offloadkit import OffloadConfig, OffloadEngine
    from tests.models import TinyLM, tokens

    torch.manual_seed(0)
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    model, loader = TinyLM(tied=False), tokens(6)[rank::size]
    if accelerator is not None:
        loader = accelerator.prepare(torch.utils.data.DataLoader(torch.cat(tokens(6)), batch_size=len(tokens(1)[0])))
    config = OffloadConfig(gradient_accumulation=2 // size, learning_rate=1e-2)
    with OffloadEngine(model, config, device="cpu") as engine:
        for batch in loader:
            engine.backward(engine(batch))
            engine.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def finetuned_here(folder: Path) -> dict[str, torch.Tensor]:
    from tests.distributed.doors import finetuned

    weights: dict[str, torch.Tensor] = finetuned("llama", folder, accumulation=2, rows=8, epochs=1, size=2)["weights"]
    return weights


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    if what == "loop":
        from offloadkit.distributed import machine, ranks

        if int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1:
            ranks.host = machine.host = lambda: int(os.environ["GROUP_RANK"])
        weights = loop()
    elif what == "accelerate":
        from accelerate import Accelerator

        from offloadkit import OffloadEngine
        from offloadkit.errors import ModelError

        accelerator = Accelerator(cpu=True)
        try:
            OffloadEngine(accelerator.prepare(torch.nn.Linear(2, 2)), device="cpu")
        except ModelError as error:
            (folder / f"error-{accelerator.process_index}").write_text(str(error))
        weights = loop(accelerator)
        torch.save(finetuned_here(folder / "out"), folder / f"finetuned-{accelerator.process_index}.pt")
    else:
        weights = finetuned_here(folder / "out")
    torch.save(weights, folder / f"weights-{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
