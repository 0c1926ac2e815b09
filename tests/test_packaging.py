"""The package builds without a compiler and without torch; its wheel works without the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

import offloadkit

ROOT = Path(__file__).parent.parent
KERNEL = "_cpu_kernels"

pytest.importorskip("setuptools")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    copy_sources(tmp_path)
    return tmp_path


def copy_sources(folder: Path) -> None:
    """Copy what a build reads, so that nothing is written into the working tree."""
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "offloadkit", folder / "offloadkit", ignore=shutil.ignore_patterns("*.so", "__pycache__"))


def setup_py(tree: Path, *arguments: str, **environment: str) -> None:
    # -S hides site-packages (torch, numpy) from the build; setuptools alone is put back.
    setuptools_at = Path(sys.modules["setuptools"].__file__ or "").parent.parent
    bare = tree / "bare"
    bare.mkdir()
    for name in ("setuptools", "_distutils_hack"):
        (bare / name).symlink_to(setuptools_at / name)
    subprocess.run(
        [sys.executable, "-S", "setup.py", "-q", *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(bare), **environment},
        check=True,
        capture_output=True,
        text=True,
    )


def quick_compiler(folder: Path) -> Path:
    """cc without optimisation, which takes most of the time of a build."""
    script = folder / "quick-cc"
    script.write_text('#!/bin/sh\nexec cc "$@" -O0\n')
    script.chmod(0o755)
    return script


def built_kernels(tree: Path) -> list[Path]:
    return list((tree / "build").rglob(f"{KERNEL}*.so"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_kernel_is_compiled_where_there_is_a_compiler(tree: Path, tmp_path: Path) -> None:
    setup_py(tree, "build", CC=str(quick_compiler(tmp_path)))
    assert built_kernels(tree)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["/bin/false", "no-such-compiler"])
def test_a_build_without_a_compiler_succeeds_without_the_kernel(tree: Path, compiler: str) -> None:
    setup_py(tree, "build", CC=compiler)
    assert built_kernels(tree) == []
    assert list((tree / "build").rglob("offloadkit/facts/config.py"))


@pytest.mark.slow
def test_the_source_distribution_carries_the_kernel(tree: Path) -> None:
    setup_py(tree, "sdist")
    (archive,) = (tree / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = files.getnames()
    sources = [path.name for path in (ROOT / "offloadkit" / "kernels").iterdir() if path.suffix in (".c", ".h")]
    assert "cpu_kernels.c" in sources
    for source in sources:
        assert any(name.endswith(f"offloadkit/kernels/{source}") for name in names)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel in it, over the packages of this environment."""
    tree, environment = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("installed")
    copy_sources(tree)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tree),
        str(tree),
    ]
    subprocess.run(build, check=True, env=os.environ | {"CC": str(quick_compiler(tree))})
    (wheel,) = tree.glob("*-py3-none-linux_*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "outer.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*install, "--ignore-installed", str(wheel)], check=True)
    return environment / "bin"


def outside_the_checkout(installed: Path, folder: Path, program: str, *arguments: str) -> str:
    """Run a program of the environment in `folder`, and return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    command = [installed / program, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_holds_the_package_alone(installed: Path, tmp_path: Path) -> None:
    found = outside_the_checkout(installed, tmp_path, "python", "-c", "import offloadkit; print(offloadkit.__file__)")
    package = Path(found.strip()).parent
    assert package.is_relative_to(installed.parent)
    for kind in ("*.py", "*.yaml"):
        files = {path.relative_to(ROOT) for path in (ROOT / "offloadkit").rglob(kind)}
        assert {path.relative_to(package.parent) for path in package.rglob(kind)} == files
    assert not (package.parent / "benchmarks").exists()
    assert not [path for path in package.rglob("*") if "roundpipe" in path.name or "torchao" in path.name]


@pytest.mark.slow(20)
def test_an_installed_wheel_compares(installed: Path, tmp_path: Path) -> None:
    sizes = ("--max-input-length", "8", "--max-target-length", "4", "--steps", "1")
    command = ("compare", "t5-tiny", "--engine", "offloadkit", "--batch-size", "1", *sizes, "--output", "out")
    outside_the_checkout(installed, tmp_path, "offloadkit", *command)
    (row,) = json.loads((tmp_path / "out" / "comparison.json").read_text())["rows"]
    assert row["status"] == "measured", row


DEEPSPEED = """
import deepspeed, offloadkit
from offloadkit import OffloadConfig, Placement
from transformers import T5Config, T5ForConditionalGeneration

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
tiny = {"vocab_size": 384, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 2}
model = T5ForConditionalGeneration(T5Config(**tiny, decoder_start_token_id=0))
in_vram = OffloadConfig(placement=Placement("vram", "vram", "vram", "keep", "gpu"))
usual = {"tokenizer": "byte", "batch_size": 2, "max_steps": 2, "use_cpu": True, "output_dir": "out"}
result = offloadkit.finetune(model, [{"input": "1", "target": "2"}] * 4, engine="deepspeed", offload=in_vram, **usual)
assert result.metrics["train_loss"] > 0
"""


@pytest.mark.slow
def test_an_installed_wheel_trains_by_deepspeed(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    outside_the_checkout(installed, tmp_path, "python", "-c", DEEPSPEED)
    assert (tmp_path / "out" / "model" / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_wheel_of_one_python_has_the_kernels_of_every_python(installed: Path, tmp_path: Path) -> None:
    """The name of the library has no tag of a Python version, and it uses nothing of Python."""
    asks = "import offloadkit.kernels.cpu as cpu; print(cpu.c_library()._name)"
    library = Path(outside_the_checkout(installed, tmp_path, "python", "-c", asks).strip())
    assert library == next(installed.parent.rglob("offloadkit/kernels")) / f"{KERNEL}.so"
    assert b"PyInit" not in library.read_bytes()


def test_building_needs_nothing_but_setuptools() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert [requirement.split(">")[0] for requirement in project["build-system"]["requires"]] == ["setuptools"]


def test_package_and_project_say_the_same_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == offloadkit.__version__


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-gcc") is None, reason="needs a compiler for aarch64")
def test_the_kernel_compiles_for_aarch64_without_a_warning(tmp_path: Path) -> None:
    flags = [
        "-O3",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-pthread",
        "-fPIC",
        "-shared",
        "-Wall",
        "-Wextra",
        "-Werror",
    ]
    source, library = ROOT / "offloadkit" / "kernels" / "cpu_kernels.c", tmp_path / "kernel.so"
    subprocess.run(["aarch64-linux-gnu-gcc", *flags, str(source), "-o", str(library)], check=True)
    assert library.read_bytes()[18:20] == b"\xb7\x00"  # the ELF header's machine: AArch64
