"""A script for launchers: `launched.py finetune|loop FOLDER`. Each rank writes the weights that it has at the end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def loop(accelerator: Any = None) -> dict[str, torch.Tensor]:
    """A loop of one's own; under `accelerate launch` its loader is accelerate's, and one rank has two micro-batches."""
    from offloadkit import OffloadConfig, OffloadEngine
    from tests.models import TinyLM, tokens

    torch.manual_seed(0)
    model, loader = TinyLM(tied=False), torch.utils.data.DataLoader(tokens(6), batch_size=None)
    if accelerator is not None:
        loader = accelerator.prepare(torch.utils.data.DataLoader(torch.cat(tokens(6)), batch_size=len(tokens(1)[0])))
    config = OffloadConfig(gradient_accumulation=1 if accelerator else 2, learning_rate=1e-2)
    with OffloadEngine(model, config, device="cpu") as engine:
        for batch in loader:
            engine.backward(engine(batch))
            engine.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    if what == "loop":
        from accelerate import Accelerator

        from offloadkit import OffloadEngine
        from offloadkit.errors import ModelError

        accelerator = Accelerator(cpu=True)
        try:
            OffloadEngine(accelerator.prepare(torch.nn.Linear(2, 2)), device="cpu")
        except ModelError as error:
            (folder / f"error-{accelerator.process_index}").write_text(str(error))
        weights = loop(accelerator)
    else:
        from tests.distributed.doors import finetuned

        weights = finetuned("llama", folder / "out", accumulation=2, rows=8, epochs=1, size=2)["weights"]
    torch.save(weights, folder / f"weights-{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
