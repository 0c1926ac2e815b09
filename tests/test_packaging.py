"""What an install promises: it works without a compiler and without torch, and the C source travels with it."""

from __future__ import annotations

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
    """A copy of what a build reads, so that nothing is written into the working tree."""
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "offloadkit", tmp_path / "offloadkit", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


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
    """cc, asked last of all not to optimise: that is most of the time of a build."""
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
    assert list((tree / "build").rglob("offloadkit/config.py"))


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
