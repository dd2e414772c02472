"""Builds the native library for CPUs; everything else is in pyproject.toml.

The library is plain C++ behind a C interface, loaded with ctypes. It depends neither on torch nor on Python's ABI, so one wheel
per platform serves all of them. It is optional: without a compiler that understands GCC's vector types, or with
HF_SPECDEC_NO_NATIVE=1, the package is built without it, and plain torch runs instead.
"""

import os
import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, CompileError

SOURCE = Path("hf_specdec/kernels/native/source")
NAME = "hf_specdec.kernels.native.library"
COMMON = ["-std=c++17", "-O2", "-g0", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-w"]
# They throw nothing, so tables to unwind them are not needed.
KERNELS = ["-fno-exceptions", "-fno-asynchronous-unwind-tables"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
AVX512_BF16 = [*AVX512, "-mavx512bf16", "-mavx512vnni"]
# The kernels are compiled for each instruction set; the CPU is asked at run time.
INSTRUCTION_SETS = {
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512_bf16": AVX512_BF16,
    "amx_bf16": [*AVX512_BF16, "-mamx-tile", "-mamx-bf16"],
}


class BuildLibrary(build_ext):
    """Compiles every source with its own flags. An instruction set that the compiler does not know is left out."""

    def get_ext_filename(self, fullname):
        """The library's path, without a tag for a version of Python."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext):
        """Compile and link; called by setuptools, which turns an error into a warning."""
        objects, known = [], []
        on_x86 = platform.machine().lower() in ("x86_64", "amd64")
        for name, flags in INSTRUCTION_SETS.items() if on_x86 else ():
            try:
                objects += self._compile("kernels.cpp", [f"-DSET={name}", *KERNELS, *flags], name)
            except CompileError:
                self.warn(f"the compiler does not know {name}; the native library is built without it")
                break  # the later ones contain it
            known.append(name)
        macros = [f"-DHAS_{name.upper()}" for name in known]
        # x86 without AVX2 is older than 2013: there, small code is worth more than fast code.
        small = ["-Os"] if "avx2" in known else []
        objects += self._compile("kernels.cpp", ["-DSET=baseline", *KERNELS, *small], "baseline")
        for name in ("program.cpp", "round.cpp", "threads.cpp", "api.cpp"):
            objects += self._compile(name, macros)
        self.compiler.link_shared_object(
            objects, self.get_ext_fullpath(ext.name), target_lang="c++", extra_postargs=["-pthread", "-s"]
        )

    def _compile(self, name, flags, folder=""):
        return self.compiler.compile(
            [str(SOURCE / name)],
            output_dir=str(Path(self.build_temp) / folder),
            extra_postargs=[*COMMON, "-pthread", *flags],
            depends=[str(path) for path in SOURCE.iterdir()],
        )

    def run(self):
        """Build, or say in one line why not."""
        try:
            super().run()
        except (CCompilerError, OSError) as error:
            self.warn(f"the native library was not built ({error}); plain torch runs in its place")


class Wheel(bdist_wheel):
    """A wheel for every Python: of this platform with the library, of any platform without."""

    def get_tag(self):
        """(Python, ABI, platform)."""
        *_, system = super().get_tag()
        built = (Path(self.bdist_dir) / NAME.replace(".", "/")).with_suffix(".so").exists() if self.bdist_dir else False
        return "py3", "none", system if built else "any"


def extensions():
    """The library, where it can exist: MSVC lacks the vector types."""
    if sys.platform == "win32" or os.environ.get("HF_SPECDEC_NO_NATIVE") == "1":
        return []
    return [Extension(NAME, [str(SOURCE / "api.cpp")], optional=True)]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel})
