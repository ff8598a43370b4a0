"""The house rules: which module may import which, and what only one file may name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / "python" / "reprieve"
RUST = ROOT / "rust"

# Each module and what it may import of the package at run time. Packages stand for all that is in them.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "request": {"errors"},
    "config": {"errors", "request"},
    "step": set(),
    "latch": {"errors"},
    "image_store": {"errors"},
    "park": {"errors", "image_store", "latch", "step"},
    "launch": {"errors", "latch", "request", "step"},
    "lane": {"errors", "launch", "step"},
    "constraint": {"errors", "step"},
    "model": {"errors"},
    "text": {"errors"},
    "device": {"_native", "errors", "model", "step"},
    "hub": {"errors"},
    "loading": {"errors", "hub", "model", "text", "device"},
    "stats": {"request"},
    "handle": {"errors", "request"},
    "trace_events": set(),
    "trace": {"request", "trace_events"},
    "deadlines": set(),
    "journal": {"deadlines", "request", "stats"},
    "delivery": {"step", "trace"},
    "intake": {"errors", "text"},
    "batch": {"errors", "request"},
    "exclusive": {"errors"},
    "engine": {
        "_native", "batch", "config", "constraint", "delivery", "errors", "exclusive", "handle", "image_store",
        "intake", "journal", "lane", "latch", "loading", "park", "request", "stats", "trace",
    },
    "mailbox": set(),
    "commands": set(),
    "stream": {"mailbox", "request"},
    "decode_thread": {"commands", "errors", "mailbox"},
    "async_engine": {"decode_thread", "engine", "errors", "mailbox", "request", "stream"},
    "cli": {"config", "engine", "errors", "hub", "loading", "request", "trace", "__version__"},
    "__main__": {"cli"},
}  # fmt: skip

RUST_ARROWS: dict[str, set[str]] = {
    "ids": set(),
    "error": {"ids"},
    "blocks": {"error", "ids"},
    "slots": {"ids"},
    "victim": {"ids"},
    "ledger": {"blocks", "error", "ids", "slots", "victim"},
    "schedule": {"error", "ids", "ledger", "victim"},
    "cpu": set(),
    "python": {"cpu", "error", "ids", "ledger", "schedule", "victim"},
}


def module_of(path: Path) -> str:
    """Return the top module of the package that `path` belongs to."""
    return path.relative_to(PYTHON).parts[0].removesuffix(".py")


def imported(tree: ast.AST, *, also_typing: bool = False) -> set[str]:
    """Return the absolute names of all modules that a file imports, those for typing only if asked for."""
    names: set[str] = set()
    todo = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not also_typing:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            module = node.module or ""
            names |= {f"reprieve.{alias.name}" for alias in node.names} if module == "reprieve" else {module}
        todo.extend(ast.iter_child_nodes(node))
    return names


def package_files() -> list[Path]:
    files = [path for path in PYTHON.rglob("*.py") if path != PYTHON / "__init__.py"]
    assert len(files) > 30
    return files


def test_python_arrows_point_one_way_and_all_are_used() -> None:
    used: dict[str, set[str]] = {module: set() for module in ARROWS}
    for path in package_files():
        module = module_of(path)
        for name in imported(ast.parse(path.read_text("utf-8"))):
            parts = name.split(".")
            if parts[0] != "reprieve" or parts[1] == module:
                continue
            assert parts[1] in ARROWS[module], f"{path} imports {name}"
            used[module].add(parts[1])
    assert used == ARROWS


def test_no_arrow_points_back() -> None:
    closed: set[str] = set()
    while len(closed) < len(ARROWS):
        ready = {module for module, used in ARROWS.items() if used - {"_native", "__version__"} <= closed} - closed
        assert ready, f"a circle among {set(ARROWS) - closed}"
        closed |= ready


def test_native_is_named_by_the_engine_and_the_cpu_device_and_no_gpu_library_by_anybody() -> None:
    native = set()
    for path in package_files():
        names = imported(ast.parse(path.read_text("utf-8")), also_typing=True)
        assert not any(name.split(".")[0] in {"cupy", "torch"} for name in names), path
        if any(name.startswith("reprieve._native") for name in names):
            native.add(path.relative_to(PYTHON).as_posix())
    assert native == {"engine.py", "device/cpu.py"}


def test_the_architecture_sees_ops_only() -> None:
    names = imported(ast.parse((PYTHON / "model" / "llama.py").read_text("utf-8")), also_typing=True)
    ours = {name for name in names if name.startswith("reprieve")}
    assert ours == {"reprieve.device.base", "reprieve.model.config", "reprieve.model.weights"}


def test_rust_arrows_point_one_way_only_python_names_pyo3_and_only_cpu_is_unsafe() -> None:
    seen = 0
    unsafe = set()
    for path in RUST.rglob("*.rs"):
        module = path.relative_to(RUST).parts[0].removesuffix(".rs")
        text = path.read_text("utf-8")
        assert ("pyo3" in text) == (module == "python"), path
        if "unsafe" in text:
            unsafe.add(module)
        if module == "lib":
            continue
        assert "use crate::{" not in text, f"{path}: one line for each module, as the next one counts on it"
        for name in re.findall(r"crate::(\w+)", text):
            assert name in RUST_ARROWS[module] | {module}, f"{path} uses {name}"
            seen += 1
    assert seen > 20
    assert unsafe == {"cpu"}


def test_every_file_says_first_what_it_owns() -> None:
    folders = ("python", "rust", "tests", "benches", "examples", "docs")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".rs"}]
    assert len(files) > 100
    for path in files:
        assert path.read_text("utf-8").startswith(('"""', "//!")), path
