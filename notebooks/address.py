"""Write the repository's public address into the notebooks: `python notebooks/address.py https://github.com/NAME/repo`.

The address goes to `REPOSITORY` in each first code cell, and to a badge under each title that opens the notebook in
Colab.
"""

import re
import sys
from pathlib import Path

import nbformat

FOLDER = Path(__file__).parent.resolve()
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"


def publish(path: Path, address: str) -> None:
    """Replaces the address of one notebook; its outputs stay."""
    repository = address.removesuffix("/").removesuffix(".git")
    notebook = nbformat.read(path, as_version=4)
    title, install = notebook.cells[:2]
    install.source = re.sub(r'(?<=^REPOSITORY = )"[^"]*"', f'"{repository}"', install.source)
    lines = [line for line in title.source.split("\n") if not line.startswith(BADGE)]
    of_colab = repository.replace("https://github.com/", "https://colab.research.google.com/github/")
    badge = f"{BADGE}({of_colab}/blob/main/notebooks/{path.name})"
    title.source = "\n".join([lines[0], "", badge, *lines[1:]])
    nbformat.write(notebook, path)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].startswith("https://github.com/"):
        sys.exit("one address is needed, such as https://github.com/NAME/offloadkit")
    for each in sorted(FOLDER.glob("*.ipynb")):
        publish(each, sys.argv[1])
