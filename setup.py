"""The one part of the build that pyproject.toml cannot say: the C kernel, which an install may go without."""

from setuptools import Extension, setup

cpu_adamw = Extension(
    "offloadkit.kernels._cpu_adamw",
    sources=["offloadkit/kernels/cpu_adamw.c"],
    depends=["offloadkit/kernels/cpu_floats.h", "offloadkit/kernels/cpu_step.h"],
    extra_compile_args=["-O3", "-ffp-contract=off", "-fno-math-errno", "-pthread"],
    extra_link_args=["-pthread"],
    optional=True,
)

setup(ext_modules=[cpu_adamw])
