"""What pyproject.toml cannot say about the build: the C kernels, which an install may go without.

They are a plain shared library that ctypes loads, so that one wheel serves every Python 3.
"""

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

cpu_kernels = Extension(
    "offloadkit.kernels._cpu_kernels",
    sources=["offloadkit/kernels/cpu_kernels.c"],
    depends=[f"offloadkit/kernels/cpu_{name}.h" for name in ("adamw", "floats", "lion", "plan", "step", "tiny")],
    extra_compile_args=["-O3", "-ffp-contract=off", "-fno-math-errno", "-pthread"],
    extra_link_args=["-pthread"],
    optional=True,
)


class BuildLibrary(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"


class WheelOfAnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(ext_modules=[cpu_kernels], cmdclass={"build_ext": BuildLibrary, "bdist_wheel": WheelOfAnyPython})
