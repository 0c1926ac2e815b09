"""On a GPU a penalty on weights in RAM counts as in torch, on whichever device it is computed."""

from __future__ import annotations

import pytest
import torch

from offloadkit import OffloadConfig, OffloadEngine, Placement
from tests.engine.test_penalties_and_hooks import PENALTIES, X, blocks, placements, trained

pytestmark = pytest.mark.gpu


@placements
@pytest.mark.parametrize("when", ["before", "between", "after"])
@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_counts_as_in_torch(name: str, when: str, placement: object) -> None:
    ours = trained(PENALTIES[name], placement, when, device="cuda")
    torch.testing.assert_close(ours, trained(PENALTIES[name], None, when, device="cuda"))


def test_a_view_that_autograd_records_shows_and_writes_the_weights() -> None:
    model = blocks()
    with OffloadEngine(model, OffloadConfig(placement=Placement(weights="ram")), device="cuda") as engine:
        view = model[0].weight[0]
        torch.testing.assert_close(view.square().sum().item(), model[0].weight.data[0].square().sum().item())
        with torch.no_grad():
            view[:2].zero_()
        assert not model[0].weight.data[0, :2].any()
        with torch.no_grad():
            model[0].weight[0].zero_()
        assert not view.detach().any()
        assert view.square().sum().item() == 0
        assert not model[0].weight.data[0].any()
        engine.backward(engine(X.cuda()).sum())
        assert engine.step()
