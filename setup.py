"""Build of the distribution ``herald-dllm``: two packages, one optional C++ extension, the CUDA sources.

``HERALD_BUILD_EXT`` decides about the extension ``herald._native``: ``auto`` (default) builds it where a C++
compiler and pybind11 are there and otherwise warns and goes on, ``1`` fails without it, ``0`` leaves it out.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
NATIVE_SOURCES = "csrc/*.cpp"
CUDA_SOURCES = "csrc/gather*.cu"
MODES = ("auto", "1", "0")


def package_version() -> str:
    """``__version__`` of the package, read without importing it."""
    source = (ROOT / "herald" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if match is None:
        raise SystemExit('herald/__init__.py has no line: __version__ = "X.Y.Z"')
    return match[1]


def extension_mode() -> str:
    """``HERALD_BUILD_EXT``, checked."""
    mode = os.environ.get("HERALD_BUILD_EXT", "auto")
    if mode not in MODES:
        raise SystemExit(f"HERALD_BUILD_EXT={mode!r} is not valid; use one of {', '.join(MODES)}")
    return mode


def pybind11_include() -> str | None:
    """Folder of pybind11's headers: its own, else the copy that torch carries; None without either."""
    if importlib.util.find_spec("pybind11") is not None:
        import pybind11

        return pybind11.get_include()
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    include = Path(torch.origin).parent / "include"
    return str(include) if (include / "pybind11" / "pybind11.h").is_file() else None


def native_extensions(mode: str) -> list[Extension]:
    """The extension, or nothing where it is not wanted or (``auto``) cannot be built."""
    if mode == "0":
        return []
    include = pybind11_include()
    if include is None:
        if mode == "1":
            raise SystemExit("HERALD_BUILD_EXT=1 needs pybind11; run: pip install pybind11")
        warn("pybind11 is not installed")
        return []
    # No -march: the source picks its instruction set at run time, so one wheel serves every CPU.
    return [
        Extension(
            "herald._native",
            sources=[str(path.relative_to(ROOT)) for path in sorted(ROOT.glob(NATIVE_SOURCES))],
            depends=[str(path.relative_to(ROOT)) for path in sorted((ROOT / "csrc").glob("*.h*"))],
            include_dirs=[include],
            # Products and sums are fused only where the code says so: every CPU gives the same bits.
            extra_compile_args=[
                *("-O3", "-g0", "-std=c++17", "-pthread", "-fvisibility=hidden", "-ffp-contract=off")
            ],
            extra_link_args=["-pthread"],
            language="c++",
            optional=False,
        )
    ]


def warn(reason: str) -> None:
    """Say on stderr that the package works without the extension."""
    print(
        f"warning: herald._native is not built ({reason}); HERALD works without it, slower. "
        "Set HERALD_BUILD_EXT=1 to make this an error.",
        file=sys.stderr,
    )


class OptionalBuildExt(build_ext):
    """Builds the extension; in mode ``auto`` a compiler that is absent or fails is a warning."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:
            if extension_mode() == "1":
                raise
            warn(str(error).splitlines()[0] if str(error) else type(error).__name__)
            self.failed = [*getattr(self, "failed", []), ext.name]

    def copy_extensions_to_source(self) -> None:
        # An editable install copies what was built; what was not built must not be looked for.
        built, failed = self.extensions, getattr(self, "failed", [])
        self.extensions = [ext for ext in built if ext.name not in failed]
        super().copy_extensions_to_source()
        self.extensions = built

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if Path(path).exists()]


class BuildPyWithCuda(build_py):
    """Puts the CUDA sources into the package as ``herald/_csrc/``; editable installs read them in place."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "herald" / "_csrc"
        target.mkdir(parents=True, exist_ok=True)
        for source in sorted(ROOT.glob(CUDA_SOURCES)):
            shutil.copy2(source, target)


setup(
    name="herald-dllm",
    version=package_version(),
    description="Long-context inference for block-diffusion language models with the KV cache in host memory",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    author="The HERALD authors",
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    package_dir={"": ".", "herald_kernels": "kernels/herald_kernels"},
    packages=[
        *find_packages(".", include=["herald", "herald.*"]),
        *find_packages("kernels", include=["herald_kernels", "herald_kernels.*"]),
    ],
    package_data={"herald": ["py.typed", "models/tiny_weights/*"], "herald_kernels": ["py.typed", "**/*.md"]},
    install_requires=[
        "torch>=2.8",
        "triton>=3.4; platform_system == 'Linux'",
        "numpy>=1.26",
        "numba>=0.61",
        "safetensors>=0.4.5",
        "tokenizers>=0.21",
        "transformers>=4.51",
        "huggingface_hub>=0.30",
        "tqdm>=4.66",
        "rich>=13.7",
        "psutil>=5.9",
    ],
    extras_require={
        # CuPy brings the NVRTC binding that compiles the gather kernels and the binding that pins memory.
        "cuda": ["cupy-cuda13x>=13.6; platform_system == 'Linux'"],
        "profile": ["matplotlib>=3.9"],
        # real_keys reads a GGUF file, quality scores LongBench's summaries and Chinese answers.
        "bench": ["gguf>=0.10", "jieba>=0.42", "matplotlib>=3.9", "rouge>=1.0.1"],
        "serve": ["fastapi>=0.115", "prometheus_client>=0.21", "pydantic>=2.10", "uvicorn>=0.34"],
        "dev": [
            "build>=1.2",
            "clang-format>=19",
            "fastapi>=0.115",
            "hypothesis>=6.100",
            "matplotlib>=3.9",
            "mypy>=1.14",
            "openai>=1.60",
            "pre-commit>=4.0",
            "prometheus_client>=0.21",
            "pybind11>=2.13",
            "pydantic>=2.10",
            "pytest>=8.3",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ruff>=0.9",
            "schemathesis>=4.0",
            "setuptools>=77",
            "uvicorn>=0.34",
        ],
    },
    entry_points={"console_scripts": ["herald = herald.cli.main:main"]},
    ext_modules=native_extensions(extension_mode()),
    cmdclass={"build_ext": OptionalBuildExt, "build_py": BuildPyWithCuda},
    zip_safe=False,
)
