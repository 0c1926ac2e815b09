"""The C kernel: every CPU level gives the bits of the torch reference; wrong arguments; life without the library."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from offloadkit import errors
from offloadkit.facts.config import Precision
from offloadkit.kernels import cpu, dispatch
from offloadkit.optim.adamw import adamw_scalars
from offloadkit.optim.moments import random_bits, random_key, round_stochastically
from offloadkit.optim.reference import split_master, step_reference
from offloadkit.optim.table import FlatState, Segment
from tests.optim.states import (
    DTYPES,
    PRECISIONS,
    assert_same_array_bits,
    assert_same_bits,
    clone,
    flat,
    forced_level,
    make_gradient,
    make_state,
    special_state,
)

SCALARS = adamw_scalars(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, step=3)
OTHER_SCALARS = adamw_scalars(lr=3e-2, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1, step=1)

needs_library = pytest.mark.skipif(not cpu.available(), reason="the C kernel is not built")


@needs_library
def test_the_levels_are_those_that_the_processor_has() -> None:
    lines = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")]
    has = set(lines[0].split()) if lines else set[str]()
    avx512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
    wanted = {"baseline": set[str](), "avx2": {"avx2", "fma"}, "avx512": avx512}
    assert cpu.cpu_levels() == [level for level, flags in wanted.items() if flags <= has]


@pytest.fixture(params=cpu.cpu_levels() or [pytest.param("none", marks=needs_library)])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    with forced_level(request.param):
        yield request.param


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "c_library", lambda: None)
    monkeypatch.setattr(errors, "warned", set())


def assert_step_equals_reference(
    state: FlatState, gradient: torch.Tensor, segments: list[Segment], grad_scale: float
) -> None:
    expected = clone(state)
    step_reference(expected, gradient, segments, grad_scale)
    cpu.optimizer_step(state, gradient, segments, grad_scale)
    assert_same_bits(state, expected)


@pytest.mark.parametrize("gradient_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weights_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 15, 256, 1001, 40_003])
def test_step_equals_reference_bit_for_bit(
    level: str, weights_dtype: torch.dtype, gradient_dtype: torch.dtype, length: int
) -> None:
    state, gradient = make_state(weights_dtype, length), make_gradient(gradient_dtype, length)
    assert_step_equals_reference(state, gradient, [Segment(0, length, SCALARS)], 1.0)


@pytest.mark.parametrize("weights_dtype", DTYPES, ids=str)
def test_unaligned_arrays_several_segments_and_a_grad_scale(level: str, weights_dtype: torch.dtype) -> None:
    state = make_state(weights_dtype, 70_001, unaligned_by=3)
    gradient = make_gradient(torch.bfloat16, 70_002)[1:]
    segments = [Segment(1, 33_333, SCALARS), Segment(33_334, 7, OTHER_SCALARS), Segment(40_000, 30_001, OTHER_SCALARS)]
    assert_step_equals_reference(state, gradient, segments, 0.7312345)


@pytest.mark.parametrize("kept", PRECISIONS)
@pytest.mark.parametrize("place", ["master", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("gradient_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weights_dtype", DTYPES, ids=str)
def test_special_values(
    level: str, weights_dtype: torch.dtype, gradient_dtype: torch.dtype, place: str, kept: Precision
) -> None:
    state, gradient = special_state(weights_dtype, gradient_dtype, place, kept)
    assert_step_equals_reference(state, gradient, [Segment(0, gradient.numel(), SCALARS, 77)], 0.9)


@pytest.mark.parametrize("gradient_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weights_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kept", ["compact", "tiny"])
def test_rounded_moments_equal_the_reference_over_5_steps(
    level: str, kept: Precision, weights_dtype: torch.dtype, gradient_dtype: torch.dtype
) -> None:
    state = make_state(weights_dtype, 60_160, kept=kept)
    expected = clone(state)
    for number in range(1, 6):
        gradient, segments = make_gradient(gradient_dtype, 60_160, seed=number), ragged_segments(number)
        cpu.optimizer_step(state, gradient, segments, 0.7312345)
        step_reference(expected, gradient, segments, 0.7312345)
        assert_same_bits(state, expected)


def ragged_segments(number: int) -> list[Segment]:
    """Lengths around a block, and over several pieces of the thread pool; one segment crosses its parameter's element
    2**32."""
    segments, start = [], 0
    for length, offset in ((1, 0), (255, 256), (257, 0), (50_003, 2**32 - 512), (7000, 2**33)):
        key = random_key(3, f"parameter at {start}", number)
        segments.append(Segment(start, length, (SCALARS, OTHER_SCALARS)[len(segments) % 2], key, offset))
        start += -(-length // 256) * 256
    return segments


@pytest.mark.parametrize("decades", [1, 9])
def test_8_bit_codes_of_all_magnitudes(level: str, decades: int) -> None:
    """Blocks of all scales, subnormal ones too, with elements over `decades` decades; some are zero."""
    torch.manual_seed(0)
    num_blocks, block = 1024, 256
    scales = 10.0 ** (torch.rand(num_blocks, 1, dtype=torch.float64) * 80 - 44)
    gradient = (scales * 10.0 ** (-decades * torch.rand(num_blocks, block, dtype=torch.float64))).float()
    gradient *= torch.randint(-4, 5, (num_blocks, block)).sign()
    state = make_state(torch.float32, num_blocks * block, kept="tiny")
    for array in state.arrays.values():
        array.zero_()
    assert_step_equals_reference(state, gradient.flatten(), [Segment(0, num_blocks * block, SCALARS, 99)], 1.0)


@pytest.mark.parametrize("unaligned_by", [1, 3])
def test_compact_arrays_may_be_unaligned(level: str, unaligned_by: int) -> None:
    state = make_state(torch.bfloat16, 70_001, unaligned_by=unaligned_by, kept="compact")
    gradient = make_gradient(torch.bfloat16, 70_002)[1:]
    segments = [Segment(1, 33_333, SCALARS, 5), Segment(33_334, 7, OTHER_SCALARS, 6), Segment(40_000, 30_001, SCALARS)]
    assert_step_equals_reference(state, gradient, segments, 0.7312345)


def test_accumulate_converts_every_16_bit_pattern_as_torch_does(level: str) -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        gradient = patterns.view(dtype)
        accumulator = torch.full((gradient.numel(),), 7.0)
        cpu.accumulate(accumulator, gradient, add=False)
        assert_same_array_bits(accumulator, gradient.float())


def test_fp16_weights_are_rounded_as_torch_does(level: str) -> None:
    """With zero moments and no decay the step stores fp16(master); masters lie around every fp16 rounding boundary."""
    patterns = torch.arange(0, 0x7C00, dtype=torch.int32).to(torch.int16).view(torch.float16)
    halves = patterns.float()
    ties = (halves[:-1] + halves[1:]) / 2
    up, down = ties.nextafter(torch.tensor(torch.inf)), ties.nextafter(torch.tensor(0.0))
    limits = torch.tensor([65519.996, 65520.0, 65536.0, 1e-8, 2.9802322e-8, 2.9802326e-8, torch.inf])
    master = torch.cat([halves, ties, up, down, limits])
    master = torch.cat([master, -master])
    zeros = torch.zeros_like(master)
    state = flat(torch.zeros_like(master, dtype=torch.float16), master, zeros, zeros.clone())
    cpu.optimizer_step(state, zeros, [Segment(0, master.numel(), SCALARS._replace(decay=1.0))], 1.0)
    assert_same_array_bits(state.weights, master.half())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accumulate_equals_torch(level: str, dtype: torch.dtype) -> None:
    gradient = make_gradient(dtype, 150_001)
    accumulator = make_gradient(torch.float32, 150_001, seed=5)
    expected = accumulator + gradient.float()
    cpu.accumulate(accumulator, gradient, add=True)
    assert_same_array_bits(accumulator, expected)
    cpu.accumulate(accumulator, gradient, add=False)
    assert_same_array_bits(accumulator, gradient.float())


@pytest.mark.parametrize("with_library", [pytest.param(True, marks=needs_library), False])
def test_masters_are_split_as_the_reference_does(with_library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bf16 number, the ties next to it and their neighbours, with NaNs and infinities."""
    if not with_library:
        monkeypatch.setattr(cpu, "c_library", lambda: None)
        monkeypatch.setattr(cpu, "SLICE", 1000)
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    master = (high[:, None] | low).view(torch.float32).flatten()
    weights, remainder = torch.zeros_like(master, dtype=torch.bfloat16), torch.zeros_like(master, dtype=torch.int16)
    cpu.split_into(master, weights, remainder)
    for found, expected in zip((weights, remainder), split_master(master), strict=True):
        assert_same_array_bits(found, expected)
    cpu.split_into(master[:0], weights[:0], remainder[:0])
    for wrong, error, words in (
        ((master, master, remainder), TypeError, "bf16 and int16"),
        ((master, weights, remainder[1:]), ValueError, "one length"),
        ((master[::2], weights[::2], remainder[::2]), ValueError, "contiguous"),
    ):
        with pytest.raises(error, match=words):
            cpu.split_into(*wrong)


@pytest.mark.parametrize("with_library", [pytest.param(True, marks=needs_library), False])
def test_moments_are_rounded_as_the_reference_does(with_library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of every magnitude, infinities, NaNs and overflow, across pieces and across 2**32 elements."""
    if not with_library:
        monkeypatch.setattr(cpu, "c_library", lambda: None)
        monkeypatch.setattr(cpu, "SLICE", 1000)
    torch.manual_seed(0)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38, -3.4e38, 1e-45])
    values = torch.cat([special, torch.randn(70_000) * 10.0 ** torch.randint(-38, 38, (70_000,))])
    key = random_key(5, "weight", 3)
    for first in (0, 77, 2**32 - 5000):
        random = random_bits(key, first, len(values))
        for moment in (0, 1):
            rounded = torch.zeros_like(values, dtype=torch.bfloat16)
            cpu.round_into(values, rounded, key, first=first, moment=moment)
            expected = round_stochastically(values, random >> 16 * moment & 0xFFFF)
            assert torch.equal(rounded.view(torch.int16), expected.view(torch.int16))
    cpu.round_into(values[:0], rounded[:0], key, first=0, moment=0)
    for wrong, error, words in (
        ((values, values), TypeError, "bf16"),
        ((values, rounded[1:]), ValueError, "one length"),
        ((values[::2], rounded[::2]), ValueError, "contiguous"),
        ((values.to("meta"), rounded), ValueError, "on meta"),
    ):
        with pytest.raises(error, match=words):
            cpu.round_into(*wrong, key, first=0, moment=0)


@pytest.mark.parametrize("places", list(itertools.product(["cpu", "there"], repeat=3)))
@pytest.mark.parametrize("there", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_masters_are_split_wherever_each_array_lies(places: tuple[str, ...], there: str) -> None:
    """The meta device stands for a GPU: arrays there have no values, and arrays on the CPU have correct ones."""
    devices = [there if place == "there" else place for place in places]
    if devices[0] == "meta" and "cpu" in devices:
        pytest.skip("no numbers to split")
    master = torch.linspace(-3, 3, 1001)
    weights, remainder = (torch.zeros(1001, dtype=dtype) for dtype in (torch.bfloat16, torch.int16))
    arrays = [array.to(device) for array, device in zip((master, weights, remainder), devices, strict=True)]
    dispatch.split_into(*arrays)
    for found, expected in zip(arrays[1:], split_master(master), strict=True):
        if found.device.type != "meta":
            assert_same_array_bits(found.cpu(), expected)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda s: setattr(s, "weights", s.weights.double()), TypeError, "weights are torch.float64"),
        (lambda s: s.arrays.pop("remainder"), TypeError, "remainder is None: adamw keeps it in torch.int16"),
        (lambda s: s.arrays.update(remainder=s.remainder.float()), TypeError, "remainder is torch.float32"),
        (lambda s: s.arrays.update(exp_avg=s["exp_avg"].half()), TypeError, "exp_avg is torch.float16.* torch.float32"),
        (lambda s: s.arrays.update(exp_avg=s["exp_avg"][1:]), ValueError, "exp_avg has 9 elements on cpu; .* have 10"),
        (lambda s: s.arrays.update(exp_avg_sq=torch.zeros(20)[::2]), ValueError, r"strides \(2,\): it must be flat"),
        (
            lambda s: s.arrays.update(exp_avg=torch.zeros(10, device="meta")),
            ValueError,
            "exp_avg has 10 elements on meta",
        ),
    ],
)
@pytest.mark.parametrize("step", [cpu.optimizer_step, step_reference], ids=["c", "reference"])
def test_a_state_that_does_not_fit_is_refused(
    step: Callable[..., None], change: Callable[[FlatState], None], error: type[Exception], words: str
) -> None:
    state = make_state(torch.bfloat16, 10)
    change(state)
    with pytest.raises(error, match=words):
        step(state, torch.zeros(10), [Segment(0, 10, SCALARS)], 1.0)


@pytest.mark.parametrize("segment", [(-1, 5), (5, 6), (3, -1)])
def test_a_segment_outside_the_layer_is_refused(segment: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="leaves the flat layer of 10 elements"):
        cpu.optimizer_step(make_state(torch.bfloat16, 10), torch.zeros(10), [Segment(*segment, SCALARS)], 1.0)


def test_a_gradient_that_does_not_fit_is_refused() -> None:
    state, segments = make_state(torch.bfloat16, 10), [Segment(0, 10, SCALARS)]
    with pytest.raises(TypeError, match="int32: a step takes bf16, fp16 or fp32 gradients"):
        cpu.optimizer_step(state, torch.zeros(10, dtype=torch.int32), segments, 1.0)
    with pytest.raises(ValueError, match="gradient has 11 elements"):
        cpu.optimizer_step(state, torch.zeros(11), segments, 1.0)
    with pytest.raises(TypeError, match="the accumulator must be fp32"):
        cpu.accumulate(torch.zeros(3).half(), torch.zeros(3), add=True)
    with pytest.raises(ValueError, match="flat arrays of one length"):
        cpu.accumulate(torch.zeros(3), torch.zeros(4), add=True)
    with pytest.raises(ValueError, match="contiguous"):
        cpu.accumulate(torch.zeros(3), torch.zeros(6)[::2], add=True)
    with pytest.raises(ValueError, match="is on meta: this step runs on the CPU"):
        cpu.accumulate(torch.zeros(3), torch.zeros(3, device="meta"), add=True)


@needs_library
def test_the_triad_adds_and_takes_fp32_arrays_of_one_length_without_holes() -> None:
    a, b = torch.arange(1001.0), torch.ones(1001)
    cpu.triad(a, b, 0.5)
    assert torch.equal(a, torch.arange(1001.0) + 0.5)
    for other in (torch.ones(1000), torch.ones(1001).double()):
        with pytest.raises(ValueError, match="two fp32 arrays of one length"):
            cpu.triad(a, other, 0.5)
    with pytest.raises(ValueError, match="contiguous"):
        cpu.triad(a, torch.ones(2002)[::2], 0.5)


def test_nothing_to_do_is_fine() -> None:
    state = make_state(torch.bfloat16, 0)
    cpu.optimizer_step(state, torch.zeros(0), [], 1.0)
    cpu.optimizer_step(state, torch.zeros(0), [Segment(0, 0, SCALARS)], 1.0)
    cpu.accumulate(torch.zeros(0), torch.zeros(0), add=True)


def test_without_the_library_the_step_is_the_same_and_warns_once(without_library: None) -> None:
    state, gradient = make_state(torch.bfloat16, 1001), make_gradient(torch.bfloat16, 1001)
    expected, segments = clone(state), [Segment(0, 1001, SCALARS)]
    for _ in range(2):
        step_reference(expected, gradient, segments, 0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cpu.optimizer_step(state, gradient, segments, 0.5)
        cpu.optimizer_step(state, gradient, segments, 0.5)
    assert len(caught) == 1
    assert "times slower" in str(caught[0].message)
    assert "install a C compiler" in str(caught[0].message)
    assert_same_bits(state, expected)


@needs_library
def test_with_the_library_nothing_is_said() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cpu.optimizer_step(make_state(torch.bfloat16, 10), torch.zeros(10), [Segment(0, 10, SCALARS)], 1.0)


def test_a_library_that_does_not_load_counts_as_missing(tmp_path: Path) -> None:
    broken = tmp_path / "_cpu_kernels.so"
    broken.write_bytes(b"built for another machine")
    assert cpu.load(broken) is None
    assert cpu.load(Path(torch._C.__file__)) is None  # lacks functions, as a build of an older checkout does


def test_without_the_library_everything_else_works_too(without_library: None) -> None:
    assert not cpu.available()
    assert cpu.cpu_levels() == []
    assert cpu.num_threads() == torch.get_num_threads()
    accumulator = torch.ones(3)
    cpu.accumulate(accumulator, torch.full((3,), 2.0).bfloat16(), add=True)
    assert accumulator.tolist() == [3.0, 3.0, 3.0]
    cpu.accumulate(accumulator, torch.full((3,), 2.0).half(), add=False)
    assert accumulator.tolist() == [2.0, 2.0, 2.0]
    memory = torch.arange(10_000, dtype=torch.int64)
    cpu.populate(memory.data_ptr(), memory.nbytes)
    assert torch.equal(memory, torch.arange(10_000))
