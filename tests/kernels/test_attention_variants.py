"""The number of attention kernel variants that Triton would compile, by its specialization rule, without Triton."""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offloadkit.kernels import attention

SOURCE = Path(attention.__file__).with_name("attention_triton.py")


class Kernel:
    """Records what Triton specializes on: constants, dtypes, alignment of memory, and whether integers are 1 or
    multiples of 16, except those in `do_not_specialize`."""

    def __init__(self, definition: ast.FunctionDef, seen: set[Any]) -> None:
        (decorator,) = definition.decorator_list
        options = {each.arg: ast.literal_eval(each.value) for each in getattr(decorator, "keywords", [])}
        self._names = [each.arg for each in definition.args.args]
        self._free = set(options.get("do_not_specialize", ()))
        assert self._free <= set(self._names)
        self._seen = seen

    def __getitem__(self, grid: Any) -> Any:
        return self._start

    def _start(self, *arguments: Any, **constants: Any) -> None:
        constants = {name: value for name, value in constants.items() if name not in ("num_warps", "num_stages")}
        names = self._names[: len(arguments)]
        assert [*names, *constants] == [*names, *constants.keys()]
        assert set(names).isdisjoint(constants)
        assert {*names, *constants} == set(self._names)
        forms = zip(names, map(self._form, names, arguments), strict=True)
        self._seen.add((tuple(forms), tuple(sorted(constants.items()))))

    def _form(self, name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        if isinstance(value, float):
            return "float"
        return abs(value) < 2**31, () if name in self._free else (value == 1, value % 16 == 0)


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[Any]]:
    """Variants by kernel."""
    found: dict[str, set[Any]] = defaultdict(set)
    public = [node for node in ast.parse(SOURCE.read_text()).body if isinstance(node, ast.FunctionDef)]
    kernels = {node.name: Kernel(node, found[node.name]) for node in public if not node.name.startswith("_")}
    monkeypatch.setattr(attention, "KERNELS", SimpleNamespace(**kernels))
    monkeypatch.setattr(attention, "SCRATCH_BYTES", 2 * 40 * 40 * 3 * 2)  # heads by threes, twos and ones
    return found


def attended(queries: int, keys: int, mask: str) -> None:
    """Forward and backward of two rows, with T5's masks."""
    query, key = (torch.zeros(2, length, 6, 16, dtype=torch.bfloat16).transpose(1, 2) for length in (queries, keys))
    bias = query.new_zeros(1, 6, queries, keys)
    masks = {"keys": (2, 1, 1, keys), "causal": (1, 1, queries, keys), "both": (2, 1, queries, keys)}
    added = query.new_zeros(masks[mask]).expand(2, 1, queries, keys)
    given = (query, key, key, bias, added)
    outputs = attention.attention(*given, 1.0, 0.1)
    attention.attention_backward(outputs[0], *given, *outputs, 1.0, 0.1, True)


def test_lengths_that_16_divides_share_one_variant_and_all_others_one(variants: dict[str, set[Any]]) -> None:
    draw = random.Random(0)
    for mask in ("keys", "causal", "both"):
        for _ in range(10):
            attended(draw.randrange(16, 90), 16 * draw.randrange(1, 6), mask)
    assert {name: len(found) for name, found in variants.items()} == dict.fromkeys(variants, 1)
    assert len(variants) == 3
    for mask in ("keys", "causal", "both"):
        for _ in range(10):
            attended(draw.randrange(16, 90), draw.choice([1, 17, 24, 30, 55, 89]), mask)
    assert {name: len(found) for name, found in variants.items()} == dict.fromkeys(variants, 2)
