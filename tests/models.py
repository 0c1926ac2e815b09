"""Small models for the engine's tests. Shapes are odd and batches tiny, so copies outlast the arithmetic and a missing
wait shows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from offloadkit.engine.engine import OffloadEngine


class Residual(nn.Module):
    """One repeated block: a wide MLP for a tiny batch."""

    def __init__(self, width: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.dropout(torch.tanh(self.up(x))))


class TinyLM(nn.Module):
    """Embedding, blocks, head; the head may share the embedding's weight. The forward returns the loss."""

    def __init__(
        self, *, tied: bool = True, width: int = 65, hidden: int = 1027, depth: int = 4, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, width)
        self.blocks = nn.ModuleList([Residual(width, hidden, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 61, bias=False)
        self.unused = nn.Parameter(torch.ones(7))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), tokens.flip(-1).flatten())


class Cube(torch.autograd.Function):
    """A user-defined autograd function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(9, 300), nn.Linear(300, 1)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(Cube.apply(self.first(x) * self.scale)).float().pow(2).mean()


class SquaredOutput(nn.Module):
    """Any module with a loss on top."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x).float() - 1).pow(2).mean()


def tokens(num: int, device: str = "cpu", shape: tuple[int, int] = (1, 3)) -> list[torch.Tensor]:
    """`num` batches of token ids for a `TinyLM`, deterministic."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 61, shape, generator=generator).to(device) for _ in range(num)]


def train(engine: OffloadEngine, batches: Sequence[torch.Tensor]) -> None:
    """One backward and step per batch, then `synchronize`."""
    for batch in batches:
        engine.backward(engine(batch))
        engine.step()
    engine.synchronize()


class Twin:
    """The slow reference: plain torch on a copy of the engine's working weights, fp32 masters, `torch.optim.AdamW`.

    Tied weights are untied here, and the gradients of their uses are added in fp32. Each window starts from the working
    weights of the engine, so both sides compute the same gradients.
    """

    def __init__(
        self, engine: OffloadEngine, groups: Callable[[nn.Module], list[dict[str, Any]]] | None, **options: Any
    ) -> None:
        self.engine = engine
        self.model = copy.deepcopy(engine.module)
        self.tied_name = {}
        if isinstance(self.model, TinyLM) and self.model.head.weight is self.model.embed.weight:
            self.model.head.weight = nn.Parameter(self.model.head.weight.detach().clone())  # uses are summed in fp32
            self.tied_name = {"head.weight": "embed.weight"}
        self.masters = {
            name: master.to(engine.device).requires_grad_() for name, master in engine.master_weights().items()
        }
        of_twin = dict(self.model.named_parameters())
        names = {parameter: name for name, parameter in of_twin.items()}
        params: list[dict[str, Any]] = groups(self.model) if groups else [{"params": list(of_twin.values())}]
        self.optimizer = torch.optim.AdamW(
            [
                {**group, "params": [self.masters[names[p]] for p in group["params"] if names[p] in self.masters]}
                for group in params
            ],
            **options,
        )
        self.norm = 0.0

    def relative_difference(self) -> float:
        """Largest difference between the master weights of engine and reference, relative to each tensor's largest
        value."""
        differences = []
        for name, master in self.engine.master_weights().items():
            reference = self.masters[name].detach().cpu()
            differences.append(float((master - reference).abs().max() / reference.abs().max()))
        return max(differences)

    def step(self, window: Sequence[torch.Tensor], max_grad_norm: float | None) -> None:
        """Forward and backward of each micro-batch, fp32 sums, clipping, AdamW."""
        self.model.load_state_dict(self.engine.module.state_dict())
        sums: dict[str, torch.Tensor] = {}
        for batch in window:
            self.model.zero_grad()
            (self.model(batch) / len(window)).backward()
            for own_name, parameter in self.model.named_parameters():
                name = self.tied_name.get(own_name, own_name)
                if parameter.grad is not None and name in self.masters:
                    sums[name] = sums[name] + parameter.grad.float() if name in sums else parameter.grad.float()
        self.norm = float(sum(gradient.double().pow(2).sum() for gradient in sums.values())) ** 0.5
        scale = min(1.0, max_grad_norm / (self.norm + 1e-6)) if max_grad_norm else 1.0
        for name, master in self.masters.items():
            master.grad = sums[name] * scale if name in sums else None
        self.optimizer.step()


def numbers(engine: OffloadEngine) -> dict[str, torch.Tensor]:
    """Copies of all weights and optimizer states."""
    state = engine.state_dict()
    found = {name: weight.cpu().clone() for name, weight in state["module"].items()}
    for name, states in state["optimizer"].items():
        found |= {f"{name}.{key}": value.cpu().clone() for key, value in states.items()}
    return found


def assert_equal(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor], what: object = None) -> None:
    assert expected.keys() == found.keys()
    different = [name for name, value in expected.items() if not torch.equal(value, found[name])]
    assert not different, (what, different[:5], len(different))
    assert all(bool(value.isfinite().all()) for value in found.values())
