"""The first notebook in a stand-in for Colab: its ipywidgets, IPython and ipykernel, a `google.colab`, and torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

from tests.notebooks.kernels import REPOSITORY, Watched, kernel_folder, shown_losses
from tests.test_packaging import quick_compiler

WIDGETS = "ipywidgets==7.7.1"
OF_COLAB = [WIDGETS, "ipython==7.34.0", "ipykernel==6.17.1"]
KEPT = ("torch", "numpy", "ipywidgets")

SHELL = """
from ipykernel.ipkernel import IPythonKernel
from ipykernel.zmqshell import ZMQInteractiveShell

class Shell(ZMQInteractiveShell):
    pass

class Kernel(IPythonKernel):
    shell_class = Shell

if __name__ == "__main__":
    from google.colab._shell import Kernel
    from ipykernel.kernelapp import IPKernelApp
    IPKernelApp.launch_instance(kernel_class=Kernel)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.version_info >= (3, 13), reason="Colab's IPython 7.34 is for Python 3.12 and older"),
]


@pytest.fixture
def colab(tmp_path: Path) -> Path:
    """Python of a virtual environment that sees the libraries of this environment, but not the package."""
    home = tmp_path / "colab"
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    own = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    ours = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    (own / "ours.pth").write_text("\n".join(ours))
    # The browser half of ipywidgets, which would need half of Jupyter.
    front_end = own / "widgetsnbextension-3.6.10.dist-info"
    front_end.mkdir()
    (front_end / "METADATA").write_text("Metadata-Version: 2.1\nName: widgetsnbextension\nVersion: 3.6.10\n")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", *OF_COLAB]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs wheels of {', '.join(OF_COLAB)}: {done.stderr.strip().splitlines()[-1]}")
    package = own / "google" / "colab"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "_shell.py").write_text(SHELL)
    return python


def versions(python: Path) -> list[str]:
    """Versions and locations of the packages that the notebook must not change."""
    code = f"import importlib.metadata as m\nfor n in {KEPT}: print(n, m.version(n), m.distribution(n).locate_file(''))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()


def place_of_package(python: Path) -> str:
    """The location of offloadkit for this interpreter; "" if it is not installed."""
    code = "import importlib.util as u; print((s := u.find_spec('offloadkit')) and s.origin or '')"
    done = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_first_cell_installs_and_everything_runs(
    colab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    checkout = tmp_path / "checkout"
    shutil.copytree(
        REPOSITORY / "offloadkit", checkout / "offloadkit", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, checkout)
    assert not place_of_package(colab), "offloadkit must not be installed before the notebook runs"
    before = versions(colab)
    assert any(WIDGETS.replace("==", " ") in line for line in before)

    compiler = quick_compiler(tmp_path)
    kernels = kernel_folder(
        tmp_path / "jupyter", [str(colab), "-m", "google.colab._shell"], PYTHONPATH="", CC=str(compiler)
    )
    monkeypatch.setenv("JUPYTER_PATH", str(kernels))
    ran = Watched(REPOSITORY / "notebooks" / "01_finetune_t5.ipynb", checkout / "notebooks")
    ran.execute()

    assert versions(colab) == before
    installed = Path(place_of_package(colab))
    assert installed.is_relative_to(colab.parents[1])
    assert len(list(installed.parent.glob("kernels/_cpu_kernels*.so"))) == (shutil.which("cc") is not None)
    losses = shown_losses(ran.values)
    assert losses[-1] < 0.8 * losses[0]
    assert any("To stop, interrupt the kernel" in value for value in ran.values)
    (summary,) = (o["data"] for o in ran.outputs("train") if 'class="okm"' in o.get("data", {}).get("text/html", ""))
    assert "step 40 of 40" in summary["text/html"]
    assert "writes the same: True" in ran.text("save")
