"""Rules that say where to cut a graph."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from dynaflow_xla.errors import RuleError, RuleTypeError, bad_rule
from dynaflow_xla.ir.graph import RESOURCES, Graph, Operator, Resource


def check_labels(what: str, name: Any, resource: Any, tags: Any) -> frozenset[str]:
    """The tags of a rule or a mark.

    Args:
        what: Whose labels these are, for errors.
        name: None or a string.
        resource: None or one of ``RESOURCES``.
        tags: Strings.

    Raises:
        RuleError: one of them is none of that.
    """
    if name is not None and (not isinstance(name, str) or not name):
        raise bad_rule(name, str, f"{what}: name must be a non-empty string; got {name!r}")
    if resource is not None and resource not in RESOURCES:
        raise RuleError(f"{what}: resource must be one of {', '.join(RESOURCES)}; got {resource!r}")
    labels = tuple(tags) if isinstance(tags, Iterable) and not isinstance(tags, str) else (None,)
    if not all(isinstance(tag, str) for tag in labels):
        raise RuleTypeError(f"{what}: tags must be a collection of strings; got {tags!r}")
    return frozenset(labels)


class Rule:
    """Base of the rules: maps operators to groups; each group becomes a region.

    Args:
        name: Name of the regions it makes; default from what it matched.
        resource: Their dominant resource; default estimated.
        tags: Tags they get.
    """

    def __init__(
        self,
        *,
        name: str | None = None,
        resource: Resource | None = None,
        tags: Iterable[str] = (),
    ) -> None:
        self.tags = check_labels(type(self).__name__, name, resource, tags)
        self.name = name
        self.resource = resource

    def __repr__(self) -> str:
        return self.text()

    def groups(self, graph: Graph) -> list[tuple[str, list[int]]]:
        """(name, operator indices) of every match, in program order."""
        raise NotImplementedError

    def near_misses(self, graph: Graph) -> list[str]:
        """What the graph has that the rule might have meant."""
        return []

    def text(self) -> str:
        """How the rule was written."""
        return type(self).__name__


def _pattern(rule: str, pattern: Any) -> str:
    if not isinstance(pattern, str) or not pattern:
        raise bad_rule(pattern, str, f"{rule} takes a non-empty pattern string; got {pattern!r}")
    return pattern


def _glob_path(pattern: str) -> re.Pattern[str]:
    """``**`` spans components, ``*`` and ``?`` stay within one."""
    out = []
    for part in re.split(r"(\*\*/|\*\*|\*|\?)", pattern):
        out.append(
            {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(part, re.escape(part))
        )
    return re.compile("".join(out))


def _close(word: str, have: Iterable[str]) -> list[str]:
    names = sorted(set(have))
    return difflib.get_close_matches(word, names, n=5, cutoff=0.4) or names[:8]


def _grouped(
    items: Iterable[tuple[Hashable, str, int]],
) -> list[tuple[str, list[int]]]:
    found: dict[Hashable, tuple[str, list[int]]] = {}
    for key, name, index in items:
        found.setdefault(key, (name, []))[1].append(index)
    return list(found.values())


_REPEATED = re.compile(r"@\d+(?=/|$)")


class Scope(Rule):
    """Operators under a name scope: ``Scope("**/self_attn")``. One region a scope and enclosing call.

    The pattern is a glob over the scope path joined by "/", where ``**`` spans components; it
    matches an operator if it matches the path or one of its leading parts. In PyTorch the path is
    the module's ("encoder/layers/0"); a module's second call adds "@1", which the pattern may omit.

    Args:
        pattern: The glob.
        **labels: ``name``, ``tags`` and ``resource`` of the regions, see :class:`Rule`.
    """

    def __init__(self, pattern: str, **labels: Any) -> None:
        super().__init__(**labels)
        self.pattern = _pattern("Scope", pattern)
        self._regex = _glob_path(pattern)

    def groups(self, graph: Graph) -> list[tuple[str, list[int]]]:
        """Operators by the shortest part of their path that matches, and by enclosing call."""

        def matches() -> Iterator[tuple[Hashable, str, int]]:
            for op in graph.ops:
                for depth in range(1, len(op.scope) + 1):
                    path = "/".join(op.scope[:depth])
                    if self._regex.fullmatch(path) or self._regex.fullmatch(
                        _REPEATED.sub("", path)
                    ):
                        calls = op.scope_calls[depth - 1] if op.scope_calls else 0
                        yield (path, op.call_path[:calls]), op.scope[depth - 1], op.index
                        break

        return _grouped(matches())

    def near_misses(self, graph: Graph) -> list[str]:
        """Scope paths of the graph with similar names."""
        return _close(self.pattern, ("/".join(op.scope) for op in graph.ops if op.scope))

    def text(self) -> str:
        """``Scope('pattern')``."""
        return f"Scope({self.pattern!r})"


class Op(Rule):
    """Operators by kind: ``Op("all_reduce|psum")``. One region each.

    Args:
        pattern: A glob over the kind, or several with ``|`` between them.
        **labels: ``name``, ``tags`` and ``resource`` of the regions, see :class:`Rule`.
    """

    def __init__(self, pattern: str, **labels: Any) -> None:
        super().__init__(**labels)
        self.pattern = _pattern("Op", pattern)

    def matches(self, op: Operator) -> bool:
        """Whether one operator fits."""
        return any(fnmatch.fnmatchcase(op.kind, p.strip()) for p in self.pattern.split("|"))

    def groups(self, graph: Graph) -> list[tuple[str, list[int]]]:
        """Each operator whose kind matches, alone."""
        return [(op.kind, [op.index]) for op in graph.ops if self.matches(op)]

    def near_misses(self, graph: Graph) -> list[str]:
        """Kinds of operators of the graph with similar names."""
        return _close(self.pattern, (op.kind for op in graph.ops))

    def text(self) -> str:
        """``Op('pattern')``."""
        return f"Op({self.pattern!r})"


class Call(Rule):
    """Calls of nested functions by name: ``Call("block")`` for a nested ``jax.jit``. One region a call.

    Args:
        pattern: A glob over the function's name.
        **labels: ``name``, ``tags`` and ``resource`` of the regions, see :class:`Rule`.
    """

    def __init__(self, pattern: str, **labels: Any) -> None:
        super().__init__(**labels)
        self.pattern = _pattern("Call", pattern)

    def groups(self, graph: Graph) -> list[tuple[str, list[int]]]:
        """Operators by the outermost call that matches."""

        def matches() -> Iterator[tuple[Hashable, str, int]]:
            for op in graph.ops:
                for depth, call in enumerate(op.call_path):
                    name = call.split("#", 1)[0]
                    if fnmatch.fnmatchcase(name, self.pattern):
                        yield op.call_path[: depth + 1], name, op.index
                        break

        return _grouped(matches())

    def near_misses(self, graph: Graph) -> list[str]:
        """Nested functions of the graph with similar names."""
        return _close(self.pattern, (c.split("#", 1)[0] for op in graph.ops for c in op.call_path))

    def text(self) -> str:
        """``Call('pattern')``."""
        return f"Call({self.pattern!r})"


class Module(Rule):
    """Modules by class or path glob, for graphs that know module classes (PyTorch's). One region a call.

    Args:
        module: A class of modules, or a glob over their paths.
        **labels: ``name``, ``tags`` and ``resource`` of the regions, see :class:`Rule`.
    """

    def __init__(self, module: Any, **labels: Any) -> None:
        super().__init__(**labels)
        if not isinstance(module, str | type):
            raise RuleTypeError(f"Module takes a class or a path glob; got {module!r}")
        self.module = module

    def groups(self, graph: Graph) -> list[tuple[str, list[int]]]:
        """Operators by the outermost module that matches; RuleError if the graph knows no classes."""
        if isinstance(self.module, str):
            return Scope(self.module).groups(graph)
        wanted = self.module.__name__
        if not graph.part and not any(op.classes for op in graph.ops):
            raise RuleError(
                f"{self.text()}: this graph carries no module classes; use dfx.Scope with the "
                "module's path instead"
            )

        def matches() -> Iterator[tuple[Hashable, str, int]]:
            for op in graph.ops:
                for depth, name in enumerate(op.classes):
                    if name == wanted:
                        yield op.scope[: depth + 1], op.scope[depth], op.index
                        break

        return _grouped(matches())

    def near_misses(self, graph: Graph) -> list[str]:
        """Module paths, or classes, of the graph with similar names."""
        if isinstance(self.module, str):
            return Scope(self.module).near_misses(graph)
        return _close(self.module.__name__, (c for op in graph.ops for c in op.classes if c))

    def text(self) -> str:
        """``Module('name')``, of a class its name."""
        name = self.module if isinstance(self.module, str) else self.module.__name__
        return f"Module({name!r})"


class Where(Rule):
    """Operators for which a predicate holds; connected ones form one region.

    Args:
        predicate: Gets an operator of the graph and says whether it is meant.
        **labels: ``name``, ``tags`` and ``resource`` of the regions, see :class:`Rule`.
    """

    def __init__(self, predicate: Callable[[Operator], bool], **labels: Any) -> None:
        super().__init__(**labels)
        if not callable(predicate):
            raise RuleTypeError(f"Where takes a function of an operator; got {predicate!r}")
        self.predicate = predicate

    def groups(self, graph: Graph) -> list[tuple[str, list[int]]]:
        """Operators for which the predicate holds, joined where one reads another."""
        chosen = [op for op in graph.ops if self.predicate(op)]
        group_of: dict[int, int] = {}
        producer = {v: op.index for op in graph.ops for v in op.outputs}
        for op in chosen:
            near = {group_of[producer[v]] for v in op.inputs if producer.get(v) in group_of}
            target = min(near, default=op.index)
            for index, group in list(group_of.items()):
                if group in near:
                    group_of[index] = target
            group_of[op.index] = target
        name = self.name or "where"
        return _grouped((group, name, index) for index, group in sorted(group_of.items()))

    def text(self) -> str:
        """``Where(name)``, with the predicate's name."""
        return f"Where({getattr(self.predicate, '__name__', self.predicate)!s})"


class Seq(Rule):
    """A chain of operators, each matched by the next rule and reading the previous one's result.

    Args:
        *rules: ``Op`` or ``Where``, one for each operator of the chain, two at least.
        **labels: ``name``, ``tags`` and ``resource`` of the regions, see :class:`Rule`.
    """

    def __init__(self, *rules: Op | Where, **labels: Any) -> None:
        super().__init__(**labels)
        if len(rules) < 2 or not all(isinstance(rule, Op | Where) for rule in rules):
            wrong = next((rule for rule in rules if not isinstance(rule, Op | Where)), None)
            raise bad_rule(
                rules[0] if wrong is None and rules else wrong,
                (Op, Where),
                f"Seq takes two or more Op or Where rules, one for each operator of a chain; got {rules!r}",
            )
        self.rules = rules

    @staticmethod
    def _fits(rule: Op | Where, op: Operator) -> bool:
        return rule.matches(op) if isinstance(rule, Op) else bool(rule.predicate(op))

    def groups(self, graph: Graph) -> list[tuple[str, list[int]]]:
        """Whole chains in program order; no operator is in two of them."""
        consumers = graph.consumers()
        taken: set[int] = set()
        found = []
        for op in graph.ops:
            if op.index in taken or not self._fits(self.rules[0], op):
                continue
            chain = self._chain(graph, consumers, [op.index], taken)
            if chain:
                taken.update(chain)
                found.append(("_".join(graph.ops[i].kind for i in chain), chain))
        return found

    def _chain(
        self, graph: Graph, consumers: dict[int, list[int]], chain: list[int], taken: set[int]
    ) -> list[int]:
        """The first whole chain that goes on from ``chain``, in program order; [] if there is none."""
        if len(chain) == len(self.rules):
            return chain
        after = {user for v in graph.ops[chain[-1]].outputs for user in consumers.get(v, ())}
        for user in sorted(after - taken):
            if self._fits(self.rules[len(chain)], graph.ops[user]):
                whole = self._chain(graph, consumers, [*chain, user], taken)
                if whole:
                    return whole
        return []

    def near_misses(self, graph: Graph) -> list[str]:
        """Kinds of operators of the graph with similar names."""
        return _close(self.text(), (op.kind for op in graph.ops))

    def text(self) -> str:
        """``Seq(...)`` with the text of each of its rules."""
        return f"Seq({', '.join(rule.text() for rule in self.rules)})"


def as_rules(given: Any, option: str = "rules") -> tuple[Rule, ...]:
    """The rules of an option or a strategy; RuleError if it is no collection of rules.

    Args:
        given: Rules, or one.
        option: Its name, for the error.
    """
    one = isinstance(given, Rule | str) or not isinstance(given, Iterable)
    rules = (given,) if one else tuple(given)
    for rule in rules:
        if not isinstance(rule, Rule):
            raise RuleTypeError(
                f"{option} must be dfx.Scope, Op, Call, Module, Seq or Where objects; got {rule!r}"
            )
    return rules


def check_matches(rule: Rule, graph: Graph) -> list[tuple[str, list[int]]]:
    """A rule's groups; RuleError if there are none in a graph that is the whole function."""
    groups = rule.groups(graph)
    if not groups and not graph.part:
        near = rule.near_misses(graph)
        hint = f" The graph has: {', '.join(near)}." if near else ""
        if isinstance(rule, Module) and not any(op.classes for op in graph.ops):
            hint += (
                " No operator of it belongs to a module, as in a function that calls none, and in every "
                "graph of a JAX function: use dfx.Op or dfx.mark; in JAX dfx.Scope with a name of "
                "jax.named_scope, or dfx.Call with a function's"
            )
        raise RuleError(f"rule {rule.text()} matches nothing in {graph.name!r}.{hint}")
    return groups
