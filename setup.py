"""Lists the packages and compiles the CPU operator where there is a C++ compiler; all else is in setup.cfg."""

import runpy
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError


KERNELS = Path("sparsebert") / "attention" / "kernels"
compilation = runpy.run_path(str(Path(__file__).parent / KERNELS / "compilation.py"))
NAMES = {Path(compilation["library_name"](level)).stem: level for level in compilation["LEVELS"]}


class BuildLibraries(build_ext):
    """The libraries are no modules of Python: their names carry no version of it, and no headers of it are needed."""

    def get_ext_filename(self, fullname):
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext):
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            compilation["compile_library"](NAMES[ext.name.split(".")[-1]], target)
        except compilation["CompilationError"] as error:
            raise CompileError(error) from None  # which is a warning, since the libraries are optional

    def copy_extensions_to_source(self):
        for outdated in KERNELS.glob("csr_attention_*.so"):
            outdated.unlink()
        super().copy_extensions_to_source()


class PlatformWheel(bdist_wheel):
    """A wheel for every version of Python, on one platform if it holds compiled libraries."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


try:
    compilation["find_compiler"]()
    extensions = [
        Extension(f"sparsebert.attention.kernels.{name}", [str(KERNELS / "csr_attention.cpp")], optional=True)
        for name in NAMES
    ]
except compilation["CompilationError"] as error:
    extensions = []
    print(
        f"sparsebert is installed without its attention kernel for CPUs, sparse_cpu: {error}. It will be compiled at "
        "its first use where there is a compiler then; otherwise PyTorch's attention runs, which is slower.",
        file=sys.stderr,
    )

setup(
    packages=[*find_packages(include=["sparsebert", "sparsebert.*"]), "sparsebert.recipes"],
    ext_modules=extensions,
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel},
    options={"build_ext": {"parallel": True}},
)
