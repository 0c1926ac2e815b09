"""Run notebooks from top to bottom and keep their outputs in them: `python notebooks/execute.py [01_finetune_t5 ...]`.

Needs nbclient and ipykernel, and no network. Progress bars are left out: in a saved notebook they would stand still.
"""

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

VIEW = "application/vnd.jupyter.widget-view+json"
FOLDER = Path(__file__).parent.resolve()


def execute(path: Path) -> None:
    """Run one notebook in place. It is saved after every cell, and where one fails or the run is interrupted: with the
    outputs so far, and none of an earlier run."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None

    def save(**_: object) -> None:
        kept = nbformat.from_dict(notebook)
        for cell in kept.cells:
            if cell.cell_type == "code":
                cell.outputs = [output for output in cell.outputs if VIEW not in output.get("data", {})]
                cell.metadata.pop("execution", None)
        kept.metadata.pop("widgets", None)
        kept.metadata["language_info"] = {"name": "python"}
        new = path.with_suffix(".part")
        nbformat.write(kept, new)
        new.replace(path)

    resources = {"metadata": {"path": str(path.parent)}}
    try:
        NotebookClient(notebook, timeout=None, resources=resources, on_cell_executed=save).execute()
    finally:
        save()


if __name__ == "__main__":
    names = sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    for name in names:
        began = time.perf_counter()
        execute(FOLDER / f"{Path(name).stem}.ipynb")
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
