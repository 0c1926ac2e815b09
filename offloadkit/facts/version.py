"""The version of the package, which pyproject.toml says too."""

__version__ = "0.1.0"
