"""No module imports what imports it, whichever way: at the top, inside of a function, or for types only."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping

import pytest
from modules import sources


def imported(tree: ast.AST, modules: Iterable[str]) -> Iterator[str]:
    """Modules that a program imports, at any place in it; names from ``importlib.import_module``, too."""
    known = set(modules)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in known else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant))


def graph_of(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """For each module those of the same package that it imports."""
    return {
        name: {found for found in imported(ast.parse(text), texts) if found in texts} - {name}
        for name, text in texts.items()
    }


def circles(edges: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """The largest sets of modules each of which leads to every other one."""
    reach: dict[str, set[str]] = {}
    for start in edges:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            for name in edges[ahead.pop()] - seen:
                seen.add(name)
                ahead.append(name)
        reach[start] = seen
    return {
        frozenset(b for b in reach[a] if a in reach[b]) for a in edges if a in reach[a]
    }  # fmt: skip


def test_no_module_imports_what_imports_it() -> None:
    texts = {name: path.read_text() for name, path in sources().items()}
    assert len(texts) > 100
    found = circles(graph_of(texts))
    assert not found, "\n".join(", ".join(sorted(part)) for part in found)


@pytest.mark.parametrize(
    "back",
    [
        "from p import a",
        "def f():\n    from p.a import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.a",
        "import importlib\nm = importlib.import_module('p.a')",
    ],
)
def test_a_circle_is_found_however_it_is_closed(back: str) -> None:
    texts = {"p": "", "p.a": "from p.b import y", "p.b": "from p import c", "p.c": back}
    assert circles(graph_of(texts)) == {frozenset({"p.a", "p.b", "p.c"})}
    assert circles(graph_of({**texts, "p.c": "import os"})) == set()
