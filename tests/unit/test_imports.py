"""The tree keeps its shape: imports point downwards, modules stay short, nothing new appears at the top."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 450

# Lowest first. A part imports itself and what stands before it; parts of one row do not know each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("herald_kernels",),
    ("herald.errors",),
    ("herald.config",),
    ("herald.sampling_params",),
    ("herald.outputs",),
    ("herald.hardware",),
    ("herald.jit",),
    ("herald.shutdown",),
    ("herald.cuda_driver",),
    ("herald._native",),
    ("herald.kvstore",),
    ("herald.select",),
    ("herald.transfer",),
    ("herald.models",),
    ("herald.decode",),
    ("herald.tokenizer",),
    ("herald.engine",),
    ("herald.llm",),
    ("herald.async_llm",),
    ("herald",),
    ("herald.doctor", "herald.profile", "herald.serve"),
    ("herald.cli",),
    ("herald.__main__",),
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}

TOP_LEVEL = {
    *("setup.py", "herald", "csrc", "kernels", "tests", "bench_longctx", "README.md"),  # the project
    *("docs", "examples", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"),  # papers
    *("pyproject.toml", "constraints.txt", "MANIFEST.in", "Makefile", ".ci"),  # build
    *(".gitignore", ".gitattributes", ".clang-format", ".pre-commit-config.yaml"),  # tools
}


def modules() -> Iterator[tuple[str, Path]]:
    """Dotted name and path of every module of the two packages."""
    for base, package in ((ROOT, "herald"), (ROOT / "kernels", "herald_kernels")):
        for path in sorted((base / package).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def part_of(name: str) -> str | None:
    """The row of `LAYERS` that a dotted name belongs to; None for other distributions."""
    if name == "herald_kernels" or name.startswith("herald_kernels."):
        return "herald_kernels"
    if name == "herald" or not name.startswith("herald."):
        return name if name == "herald" else None
    return ".".join(name.split(".")[:2])


def is_typing_guard(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imported_names(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each import, relative ones resolved, those for type checkers left out."""
    for node in ast.iter_child_nodes(tree):
        if is_typing_guard(node):
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")
                package = package[: len(package) - node.level + (1 if is_package else 0)]
                base = ".".join([*package, base] if base else package)
            # `from herald import config` names a part below `herald`, not the package's own surface.
            for alias in node.names:
                deeper = f"{base}.{alias.name}"
                yield node.lineno, deeper if base == "herald" and deeper in LEVEL else base
        else:
            yield from imported_names(node, module, is_package)


def violations(module: str, source: str, is_package: bool) -> list[str]:
    """Imports of ``module`` that point upwards."""
    own = part_of(module)
    assert own is not None
    if own not in LEVEL:
        return [f"{module}: {own} has no place in the import order"]
    wrong = []
    for line, name in imported_names(ast.parse(source), module, is_package):
        part = part_of(name)
        if part is None or part == own:
            continue
        if part not in LEVEL:
            wrong.append(f"{module}:{line}: {part} has no place in the import order")
        elif LEVEL[part] >= LEVEL[own]:
            wrong.append(f"{module}:{line} imports {name}, which is above it")
    return wrong


def test_imports_point_downwards() -> None:
    found = [
        problem
        for module, path in modules()
        for problem in violations(module, path.read_text("utf-8"), path.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "is_package"),
    [
        ("herald.kvstore.pool", "from herald.engine import Engine", False),
        ("herald.kvstore.pool", "def f():\n    import herald.select.scan", False),
        ("herald.kvstore.pool", "from ..transfer import base", False),
        ("herald.kvstore", "from ..transfer import base", True),
        ("herald_kernels.ops.commit", "import herald.config", False),
        ("herald.models.sdar", "from herald import cli", False),
        ("herald.engine.runner", "from herald import LLM", False),
        ("herald.novelty", "import json", False),
    ],
)
def test_upward_imports_are_found(module: str, source: str, is_package: bool) -> None:
    assert violations(module, source, is_package)


@pytest.mark.parametrize(
    ("module", "source", "is_package"),
    [
        ("herald.engine.runner", "import torch\nfrom herald_kernels import copy_rows", False),
        ("herald.kvstore.pool", "from .layout import RowLayout\nfrom ..errors import HeraldError", False),
        ("herald.select.scan", "from herald import config", False),
        ("herald.models.base", "if TYPE_CHECKING:\n    from herald.engine import Engine", False),
        ("herald.cli.generate", "from herald import LLM", False),
    ],
)
def test_downward_imports_pass(module: str, source: str, is_package: bool) -> None:
    assert violations(module, source, is_package) == []


def test_modules_stay_short() -> None:
    lengths = {module: len(path.read_text("utf-8").splitlines()) for module, path in modules()}
    assert not {module: lines for module, lines in lengths.items() if lines > MAX_LINES}


def test_kernels_folder_is_no_package() -> None:
    # A top-level module called `kernels` would hide the one that transformers imports.
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_top_level_is_fixed() -> None:
    try:
        listing = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True, timeout=30
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout, so which files belong to the project is not known")
    names = {path.split("/")[0] for path in listing.stdout.split("\0") if path}
    assert names <= TOP_LEVEL
