"""Rules by the names of the operators that they are for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F")


class RuleTable(dict[str, F]):
    """A dictionary that functions enter by a decorator."""

    def of(self, *names: str) -> Callable[[F], F]:
        """Registers a function as the rule of operators with these names.

        Raises:
            ValueError: one of them has a rule.
        """

        def register(function: F) -> F:
            for name in names:
                if name in self:
                    raise ValueError(f"two rules for {name}")
                self[name] = function
            return function

        return register
