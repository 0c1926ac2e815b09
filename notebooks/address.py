"""Write the repository's public address into the notebooks: `python notebooks/address.py https://github.com/NAME/repo`.

The address goes to `REPOSITORY` in each first code cell, and to a badge that opens Colab: under each title for its
notebook, in the README for the first notebook, and to the README's `git clone`.
"""

import re
import sys
from pathlib import Path

import nbformat

FOLDER = Path(__file__).parent.resolve()
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"


def badge_of(repository: str, notebook: str) -> str:
    of_colab = repository.replace("https://github.com/", "https://colab.research.google.com/github/")
    return f"{BADGE}({of_colab}/blob/main/notebooks/{notebook})"


def publish_readme(path: Path, address: str) -> None:
    repository = address.removesuffix("/").removesuffix(".git")
    text = re.sub(re.escape(BADGE) + r"\([^)]*\) ", "", path.read_text())
    text = text.replace("![Python", f"{badge_of(repository, '01_finetune_t5.ipynb')} ![Python", 1)
    path.write_text(re.sub(r"(?<=^git clone ).+?(?= offloadkit && )", repository, text, flags=re.MULTILINE))


def publish(path: Path, address: str) -> None:
    """Replaces the address of one notebook; its outputs stay."""
    repository = address.removesuffix("/").removesuffix(".git")
    notebook = nbformat.read(path, as_version=4)
    title, install = notebook.cells[:2]
    install.source = re.sub(r'(?<=^REPOSITORY = )"[^"]*"', f'"{repository}"', install.source)
    lines = [line for line in title.source.split("\n") if not line.startswith(BADGE)]
    title.source = "\n".join([lines[0], "", badge_of(repository, path.name), *lines[1:]])
    nbformat.write(notebook, path)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].startswith("https://github.com/"):
        sys.exit("one address is needed, such as https://github.com/NAME/offloadkit")
    for each in sorted(FOLDER.glob("*.ipynb")):
        publish(each, sys.argv[1])
    publish_readme(FOLDER.parent / "README.md", sys.argv[1])
