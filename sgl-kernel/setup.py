"""Builds the operators against the torch of this environment: `pip install --no-build-isolation sgl-kernel/`.

SGL_BATCH_KERNEL_FLAGS: more flags for the compiler, after our own. Where ninja is on the path it compiles on all cores.
"""

import os
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

SOURCES = sorted(str(path) for room in ("cpu", "store", "weights") for path in Path("csrc", room).glob("*.cpp"))

setup(
    ext_modules=[
        CppExtension(
            name="sgl_batch_kernel._cpu",
            sources=SOURCES,
            # Instruction sets are chosen file by file, with a pragma, and at run time. OpenMP is compiled in but not
            # linked: its symbols are then found in the runtime that torch has loaded, so that there is one pool of
            # threads.
            extra_compile_args=[
                "-O3",
                "-g0",
                "-std=c++20",
                "-fopenmp",
                "-fvisibility=hidden",
                "-Wall",
                "-Wextra",
                "-Wno-psabi",
                *os.environ.get("SGL_BATCH_KERNEL_FLAGS", "").split(),
            ],
        )
    ],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=True, no_python_abi_suffix=True)},
)
