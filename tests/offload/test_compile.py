"""Compiled blocks: one graph for equal blocks, the same weights under every placement, and training without compilation
if it fails."""

from __future__ import annotations

import copy
import gc
import logging
import os
import re
import subprocess
import sys
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offloadkit
from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import ConfigError, OutOfVramError
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.hf import patches
from offloadkit.offload import compile as compiled
from offloadkit.offload.layers import flat_layers, plan_of
from offloadkit.offload.weight_ring import WeightRing
from offloadkit.planner import Plan, possible, tier_bytes
from tests.hf.tiny import llama_config, t5_config
from tests.models import Residual, TinyLM, assert_equal, tokens, train

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PLACEMENTS = [
    Placement(weights="ram"),
    Placement(weights="ram", activations="offload"),
    Placement(activations="checkpoint"),
    Placement(gradients="vram", states="vram", step="gpu", activations="checkpoint"),
    Placement(weights="ram", step="gpu"),
]


@pytest.fixture(autouse=True)
def evicted_weights_are_nan(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Iterator[None]:
    monkeypatch.setattr(WeightRing, "fill_with_nan", True)
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "level", logging.WARNING)  # pytest would keep all messages
    yield
    torch.compiler.reset()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On the CPU the graph is traced, cut into forward and backward, and run uncompiled: a C++ compiler takes
    minutes."""
    if request.param == "cpu":
        monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    return str(request.param)


def tiny(kind: str) -> nn.Module:
    from transformers import LlamaForCausalLM, T5ForConditionalGeneration

    torch.manual_seed(0)
    if kind == "lm":
        return TinyLM(dropout=0.1)
    if kind == "t5":
        return T5ForConditionalGeneration(t5_config(num_layers=2, attn_implementation="eager"))
    return LlamaForCausalLM(llama_config(num_hidden_layers=3))


def batches(kind: str, device: str, lengths: tuple[int, ...] = (7, 7, 7)) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 61, (2, length), generator=generator).to(device) for length in lengths]
    if kind == "lm":
        return ids
    return [{"input_ids": some, "labels": some[:, :5].clone() if kind == "t5" else some} for some in ids]


def engine_of(
    model: nn.Module, device: str, placement: Placement | None = None, plan: Plan | None = None, **options: Any
) -> OffloadEngine:
    settings: dict[str, Any] = {"learning_rate": 1e-2, "working_dtype": "bf16", "compile_blocks": True} | options
    return OffloadEngine(model, OffloadConfig(placement=placement, **settings), device=device, plan=plan)


def trained(kind: str, batches: list[Any], device: str, *args: Any, **options: Any) -> dict[str, torch.Tensor]:
    with engine_of(tiny(kind), device, *args, **options) as engine:
        engine.train()
        torch.manual_seed(2)
        for batch in batches:
            engine.backward(engine(**batch).loss if isinstance(batch, dict) else engine(batch))
            engine.step()
        return {name: weight.cpu().clone() for name, weight in engine.state_dict()["module"].items()}


def graphs(printed: str) -> list[str]:
    """Names of the compiled graphs, from the printed lines."""
    begun = re.findall(r"^compiling (.*): this step waits for it$", printed, re.MULTILINE)
    assert begun == re.findall(r"^compiled (.*) in \d+\.\d s$", printed, re.MULTILINE)
    return begun


def mixed(kind: str) -> Plan:
    """A plan with a different placement for each layer in turn."""
    model, config = tiny(kind), OffloadConfig(working_dtype="bf16")
    base = plan_of(model, flat_layers(model, config), config)
    chosen = tuple(possible(place, layer) for place, layer in zip(cycle(PLACEMENTS), base.layers, strict=False))
    return replace(base, placements=chosen, tiers=tier_bytes(base.layers, chosen, 1))


@pytest.mark.parametrize(
    ("kind", "lengths", "expected_graphs"),
    [
        pytest.param("lm", (7, 7, 7), ["4 x Residual"], marks=pytest.mark.slow),
        pytest.param("llama", (7, 5, 9), ["3 x LlamaDecoderLayer"], marks=pytest.mark.slow),
        pytest.param("t5", (7, 5), ["1 x T5Block", "1 x T5Block"], marks=pytest.mark.slow),
    ],
)
def test_equal_blocks_share_one_graph_and_no_placement_changes_a_number(
    kind: str, lengths: tuple[int, ...], expected_graphs: list[str], device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with weights at another address in every step. The first length compiles for every length; T5's first block
    holds an embedding in both stacks, and is not compiled."""
    work = batches(kind, device, lengths)
    expected = trained(kind, work, device)
    assert graphs(capsys.readouterr().out) == expected_graphs
    assert_equal(expected, trained(kind, work, device, plan=mixed(kind)), "mixed")
    assert graphs(capsys.readouterr().out) == expected_graphs
    for placement in PLACEMENTS if device == "cuda" else []:
        assert_equal(expected, trained(kind, work, device, placement), placement)


def test_it_is_the_graph_that_runs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block's own forward runs only in evaluation."""
    calls: list[bool] = []
    forward = Residual.forward

    def counted(self: Residual, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            calls.append(torch.is_grad_enabled())
        return forward(self, x)

    monkeypatch.setattr(Residual, "forward", counted)
    with engine_of(tiny("lm"), device) as engine:
        train(engine, tokens(2, device))
        assert not calls
        with torch.no_grad():
            engine(tokens(1, device)[0])
    assert calls == [False] * 4


@pytest.mark.slow
def test_one_engine_does_not_see_what_another_compiled(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The kernels for a length depend on earlier lengths in the run."""
    work = batches("lm", device)
    expected = trained("lm", work, device)
    trained("lm", batches("lm", device, (5, 9)), device)
    capsys.readouterr()
    assert_equal(expected, trained("lm", work, device))
    assert graphs(capsys.readouterr().out) == ["4 x Residual"]


@pytest.mark.parametrize("placement", [None, Placement(weights="ram", activations="checkpoint")])
def test_where_compiling_fails_training_goes_on_without(
    placement: Placement | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(graph: Any, inputs: Any, **_: Any) -> Any:
        raise ValueError("no such card\nand more")

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: fail)
    monkeypatch.setattr(patches, "fuse_norms", lambda model: lambda: None)  # compiled blocks have norms without patches
    work = batches("llama", device)
    with pytest.warns(RuntimeWarning) as warned:
        found = trained("llama", work, device, placement)
    assert [str(warning.message) for warning in warned if warning.category is RuntimeWarning] == [
        "3 x LlamaDecoderLayer cannot be compiled: ValueError: no such card. Training continues without compiling them"
    ]
    assert_equal(trained("llama", work, device, placement, compile_blocks=False), found)


def test_a_block_that_ran_compiled_is_recomputed_compiled_after_another_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the recomputation in backward would have other numbers than forward."""
    from torch._dynamo.exc import InternalTorchDynamoError

    blocks, ran = [Residual(3, 5) for _ in range(3)], list[int]()
    x = torch.ones(1, 3)

    def run(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        ran.append(blocks.index(block))
        if block is blocks[1]:
            raise InternalTorchDynamoError("no such card")
        return x

    monkeypatch.setattr(torch, "compile", lambda function, backend: run)
    forward = compiled.EqualBlocks(blocks, "").forward(False)
    assert forward(blocks[0], x) is x
    with pytest.warns(RuntimeWarning, match="3 x Residual cannot be compiled"):
        assert torch.equal(forward(blocks[1], x), blocks[1](x))
    assert forward(blocks[0], x) is x  # it ran compiled
    for block in blocks[1:]:  # these did not
        assert torch.equal(forward(block, x), block(x))
    assert ran == [0, 1, 0]


def test_where_torch_compiles_for_no_such_system_training_goes_on_without(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("torch.compile is not supported on Python 4")

    monkeypatch.setattr(torch, "compile", refuse)
    with pytest.warns(RuntimeWarning, match="4 x Residual cannot be compiled: torch.compile is not supported on Pyt"):
        trained("lm", batches("lm", device), device)


def test_a_torch_whose_choice_of_kernels_varies_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "DETERMINISTIC", "no_such_option")
    with pytest.warns(RuntimeWarning, match="4 x Residual cannot be compiled: torch .* chooses kernels by measured"):
        trained("lm", batches("lm", "cpu"), "cpu")


def test_memory_that_runs_out_in_compiling_is_no_reason_to_go_on(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: Any, inputs: Any, **_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: fail)
    with warnings.catch_warnings(), engine_of(tiny("lm"), device) as engine:
        warnings.simplefilter("error", RuntimeWarning)
        warnings.filterwarnings("ignore", "the GPU's memory was full")  # the engine moves to a leaner plan
        with pytest.raises(OutOfVramError, match="the GPU's memory is full"):
            engine(tokens(1, device)[0])


def test_a_mistake_in_a_block_is_shown_as_it_is(device: str) -> None:
    class Mistaken(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.up(x)  # changes the width

    model = tiny("lm")
    model.blocks = nn.ModuleList([Mistaken(65, 1027) for _ in range(2)])
    with engine_of(model, device) as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="must match the size"):
            engine(tokens(1, device)[0])


def test_blocks_whose_weights_or_forward_are_exchanged_run_as_they_are(device: str) -> None:
    model: Any = tiny("lm")
    model.blocks[1].up.weight = model.blocks[0].up.weight
    work = batches("lm", device)

    def weights(compile_blocks: bool) -> dict[str, torch.Tensor]:
        own = copy.deepcopy(model).eval()
        inner = type(own.blocks[2]).forward
        own.blocks[2].forward = lambda x: 2 * inner(own.blocks[2], x)
        with engine_of(own, device, working_dtype="fp32", compile_blocks=compile_blocks) as engine:
            train(engine, work)
        return {name: weight.detach().cpu() for name, weight in own.state_dict().items()}

    with pytest.warns(RuntimeWarning) as warned:
        found = weights(True)
    told = [str(warning.message) for warning in warned if "compiled" in str(warning.message)]
    assert told == [
        "2 x Residual cannot be compiled: it contains a tied weight. Training continues without compiling them",
        "1 x Residual cannot be compiled: its forward was replaced. Training continues without compiling them",
    ]
    for name, weight in weights(False).items():
        torch.testing.assert_close(found[name], weight, rtol=1e-3, atol=1e-3)


def test_a_copy_of_the_model_has_blocks_of_its_own(device: str) -> None:
    with engine_of(tiny("lm"), device) as engine:
        twin: Any = copy.deepcopy(engine.module)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        batch = tokens(1, device)[0]
        assert not torch.equal(twin(batch), engine(batch))


@pytest.mark.slow
def test_afterwards_the_model_is_as_it_was_and_can_go(device: str) -> None:
    model = tiny("llama")
    with engine_of(model, device, Placement(activations="checkpoint")) as engine:
        for batch in batches("llama", device):
            engine.backward(engine(**batch).loss)
            engine.step()
        del engine
    assert all("forward" not in vars(module) for module in model.modules())
    gone = weakref.ref(model)
    del model, batch
    gc.collect()
    assert gone() is None


@pytest.mark.slow
def test_finetune_compiles_and_evaluates_without(
    tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import LlamaForCausalLM

    rows = [{"text": f"{number}+1={number + 1}"} for number in range(4)]
    run: dict[str, Any] = {"max_steps": 2, "batch_size": 4, "use_cpu": device == "cpu", "output_dir": tmp_path}
    model = LlamaForCausalLM(llama_config(num_hidden_layers=2, vocab_size=384))
    result = offloadkit.finetune(model, rows, eval_dataset=rows, tokenizer="byte", compile_blocks=True, **run)
    assert graphs(capsys.readouterr().out) == ["2 x LlamaDecoderLayer"]
    assert result.metrics["eval_loss"] > 0


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"compile_blocks=True, but Linear has no repeated blocks to compile: put"):
        engine_of(nn.Linear(2, 2), "cpu")


IN_A_PROCESS_OF_ITS_OWN = """
from torch._dynamo.utils import counters
from tests.models import tokens, train
from tests.offload.test_compile import engine_of, tiny
with engine_of(tiny("lm"), "cuda") as engine:
    train(engine, tokens(2, "cuda"))
found = counters["inductor"]
print("from the cache", found["fxgraph_cache_hit"], "compiled", found["fxgraph_cache_miss"])
"""


@pytest.mark.gpu
def test_the_next_run_finds_what_was_compiled(tmp_path: Path) -> None:
    def run() -> str:
        root = Path(__file__).parents[2]
        paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths}
        command = [sys.executable, "-c", IN_A_PROCESS_OF_ITS_OWN]
        done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()[-1]

    first, second = run(), run()
    assert re.fullmatch("from the cache 0 compiled [1-9]", first)
    assert re.fullmatch("from the cache [1-9] compiled 0", second)
