"""OffloadConfig's values: meaningless ones are refused by name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from offloadkit.errors import ConfigError
from offloadkit.facts.config import OffloadConfig, Placement


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", "1e-4"),
        ("learning_rate", float("inf")),
        ("learning_rate", None),
        ("eps", "tiny"),
        ("weight_decay", True),
        ("betas", 0.9),
        ("betas", (0.9, None)),
        ("max_grad_norm", "1"),
        ("gradient_accumulation", True),
        ("gradient_accumulation", 2.0),
        ("activation_checkpointing", "no"),
        ("compile_blocks", 1),
        ("placement", "ram"),
    ],
)
def test_a_value_of_the_wrong_type_is_a_config_error_that_shows_it(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be .*{re.escape(repr(value))}"):
        OffloadConfig(**{name: value})


def test_compiled_blocks_are_not_recomputed_in_part() -> None:
    with pytest.raises(ConfigError, match="activations='cheap' with compile_blocks=True"):
        OffloadConfig(compile_blocks=True, placement=Placement(activations="cheap"))


def test_what_has_a_meaning_is_taken() -> None:
    betas: Any = [0, 0.5]
    config = OffloadConfig(learning_rate=0, betas=betas, max_grad_norm=None, placement=Placement(gradients="vram"))
    assert (config.learning_rate, config.betas, config.max_grad_norm) == (0, (0, 0.5), None)
