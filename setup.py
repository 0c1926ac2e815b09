"""The one part of the build that pyproject.toml cannot say: the C kernel, which an install may go without."""

from setuptools import Extension, setup

cpu_kernels = Extension(
    "offloadkit.kernels._cpu_kernels",
    sources=["offloadkit/kernels/cpu_kernels.c"],
    depends=[f"offloadkit/kernels/cpu_{name}.h" for name in ("adamw", "floats", "lion", "plan", "step", "tiny")],
    extra_compile_args=["-O3", "-ffp-contract=off", "-fno-math-errno", "-pthread"],
    extra_link_args=["-pthread"],
    optional=True,
)

setup(ext_modules=[cpu_kernels])
