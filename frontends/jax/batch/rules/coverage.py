"""Which primitives have a rule, as a table: ``python -m dynaflow_xla.frontends.jax.batch.rules.coverage``."""

from __future__ import annotations

import sys

import jax

from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.batch.rules.walk import RULES

BEGIN, END = "<!-- rules: begin -->", "<!-- rules: end -->"


def rules_table() -> str:
    """Markdown: each family of rules and its primitives; the same for every version of JAX."""
    families: dict[str, list[str]] = {}
    for name, function in RULES.items():
        families.setdefault(function.__module__.rpartition(".")[2], []).append(name)
    lines = ["| rules | primitives |", "|---|---|"]
    for family in sorted(families):
        names = " ".join(f"`{n}`" for n in sorted(families[family]))
        lines.append(f"| {family.replace('_', ' ')} | {names} |")
    return "\n".join(lines)


def without_rule() -> list[str]:
    """Primitives of the installed JAX that have no rule."""
    return sorted(_compat.registered_primitives() - RULES.keys())


def main() -> None:
    """Prints the table, then, on stderr, what the installed JAX has besides."""
    print(rules_table())
    missing = without_rule()
    print(
        f"jax {jax.__version__}: {len(missing)} without a rule: {' '.join(missing)}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
