"""Private names of JAX and PyTorch are in ``_compat`` alone, where each has its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from modules import sources

FRAMEWORKS = frozenset({"jax", "jaxlib", "torch", "torch_xla", "torchax"})

# No public name exists, and it has not changed since torch 1.8. Operators' namespaces are data.
KNOWN = ("torch.utils._pytree", "torch.ops.")


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of an expression that is nothing else, or ""."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if inner and isinstance(node, ast.Attribute) else ""


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names of frameworks that a program imports or looks up, each with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.lineno, dotted(node)


def private(tree: ast.AST) -> list[str]:
    """The private ones among them."""
    found = set()
    for line, name in names(tree):
        first, *rest = name.split(".")
        hidden = any(part.startswith("_") and not part.endswith("__") for part in rest)
        if first in FRAMEWORKS and hidden and not name.startswith(KNOWN):
            found.add(f"{line}: {name}")
    return sorted(found)


def test_private_names_are_in_compat_alone() -> None:
    looked, found = 0, []
    for module, path in sources().items():
        if "_compat" not in module.split("."):
            looked += 1
            found += [f"{module}:{place}" for place in private(ast.parse(path.read_text()))]
    assert looked > 100
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "from jax._src import core",
        "import jax._src.core",
        "def f():\n    from torch._dynamo import eval_frame",
        "from torch import _C",
        "import torch\nx = torch._C._is_tracing()",
        "import torch\nx = torch.ops._schema, torch.utils._device",
    ],
)
def test_a_private_name_is_found_however_it_is_reached(text: str) -> None:
    assert private(ast.parse(text))
    assert not private(ast.parse("import torch\nfrom jax.extend import core\nx = torch.jit.script"))
    assert not private(
        ast.parse("import jaxlib\nx = jaxlib.__version__, my._own, torch.ops._c10d.x")
    )
