"""What is kept for as long as a process or an object lives is bounded."""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dynaflow_xla
from dynaflow_xla.caches.recent import Recent


def test_the_entries_used_last_are_kept() -> None:
    kept: Recent[int, str] = Recent(3)
    for n in range(3):
        kept[n] = str(n)
    assert kept.get(0) == "0" and kept[1] == "1"
    kept[3] = "3"
    assert list(kept) == [0, 1, 3] and kept.values() == ["0", "1", "3"]
    assert kept.setdefault(0, "new") == "0" and kept.setdefault(4, "4") == "4"
    assert list(kept) == [3, 0, 4] and 1 not in kept and kept.get(1) is None
    assert kept.pop(3) == "3" and kept.pop(3, "none") == "none" and len(kept) == 2
    kept.clear()
    assert not kept.items()


def test_many_threads() -> None:
    kept: Recent[int, int] = Recent(8)
    errors: list[BaseException] = []

    def use(start: int) -> None:
        try:
            for n in range(2000):
                kept[(start + n) % 20] = n
                kept.get(n % 20)
                kept.pop(n % 7)
        except BaseException as error:
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not errors and len(kept) <= 8


# -- nothing at the level of a module grows -----------------------------------------------------------

# Why what is there cannot grow without bound. Whatever is not here should be a ``Recent``.
KNOWN = {
    "batch/arguments.py": {"_parameters_of": "weak: functions that somebody owns"},
    "machine/__init__.py": {"assumed": "no arguments", "cpu_model": "no arguments"},
    "machine/memory.py": {"fault_ns": "no arguments"},
    "ir/marks.py": {"_backends": "one for each frontend", "_load_jax": "no arguments"},
    "ffi/device_lanes.py": {"_cuda": "one for each device"},
    "ffi/programs.py": {"_living": "weak: programs that somebody owns"},
    "ffi/xla.py": {"_clients": "one for each lane and width"},
    "frontends/jax/batch/rules/walk.py": {
        "RULES": "by name of a primitive",
        "IN_ORDER": "by name of a primitive",
        "LISTS": "by name of a primitive",
        "INTEGER": "by name of a primitive",
    },
    "frontends/torch/_compat/operators.py": {
        "composites": "no arguments",
        "decompositions": "no arguments",
    },
    "frontends/torch/_compat/inlining.py": {"_install": "no arguments"},
    "frontends/torch/_compat/captures.py": {"_ask_for_limit": "no arguments"},
    "frontends/torch/opaque/regions.py": {
        "_sites": "weak: whoever captured a graph owns its sites",
        "_held": "weak: tensors that autograd saved own them",
    },
    "frontends/jax/capture/stablehlo.py": {"_primitive": "by name of an operator"},
    "frontends/jax/xla/xla_backend.py": {"_logs": "a stack: one for each context that is open"},
    "frontends/torch/on_xla/aten_lowering.py": {
        "_find": "by operator",
    },
    "frontends/torch/on_xla/aten_table.py": {"TABLE": "by operator"},
    "frontends/torch/batch/walking/registry.py": {
        "RULES": "by operator",
        "RULE_FIRST": "by operator",
        "IN_ORDER": "by operator",
        "COUNTS": "by operator",
        "SIZES": "by operator",
    },
    "frontends/torch/native/cuda/streams.py": {
        "_broken": "one for each capture that failed",
        "_spare": "streams of plans that are gone, for the next ones",
    },
    "frontends/torch/native/compiling/compilers.py": {
        "_unwritable": "folders that were named as the cache and warned of",
        "_own_folder": "no arguments",
    },
    "watching/telling.py": {"_counts": "one for each counter"},
    "watching/counters.py": {"_before": "one for each counter"},
    "caches/private_files.py": {"_refused": "folders that were named as the cache and warned of"},
    "frontends/torch/_compat/class_attributes.py": {"mend": "no arguments"},
    "frontends/torch/native/native.py": {"_calls": "one for each call that runs now"},
    "frontends/torch/native/threads.py": {
        "_library": "no arguments",
        "_openmp": "no arguments",
        "_settings": "no arguments",
    },
    "frontends/torch/on_xla/torchax_table.py": {"folder": "no arguments", "table": "no arguments"},
}
_GROWING = {"dict", "list", "set", "OrderedDict", "defaultdict", "WeakKeyDictionary", "deque",
            "WeakValueDictionary", "Counter", "RuleTable"}  # fmt: skip


def growing(tree: ast.Module) -> Iterator[str]:
    """Names at the level of a module that start empty and may grow, and caches without a bound."""
    for node in tree.body:
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and value is not None:
            empty = (
                isinstance(value, ast.Dict | ast.List | ast.Set)
                and not list(ast.iter_child_nodes(value))[:-1]
            )
            called = isinstance(value, ast.Call) and not value.args and not value.keywords
            made = called and ast.unparse(value.func).rpartition(".")[2] in _GROWING  # type: ignore[union-attr]
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if (empty or made) and isinstance(target, ast.Name):
                yield target.id
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node in tree.body:
            for decorator in node.decorator_list:
                text = ast.unparse(decorator)
                if text in ("functools.cache", "cache") or "maxsize=None" in text:
                    yield node.name


def test_nothing_in_a_module_grows_without_bound() -> None:
    root = Path(dynaflow_xla.__file__).parent
    files = [p for p in root.glob("**/*.py") if p.is_file()]
    for part in ("frontends", "ffi"):  # links, where the sources are used as they lie
        files += [p for p in (root / part).glob("**/*.py") if p not in files]
    assert len(files) > 100
    found: dict[str, set[str]] = {}
    for file in files:
        names = set(growing(ast.parse(file.read_text())))
        if names:
            found[file.relative_to(root).as_posix()] = names
    for name, names in found.items():
        unknown = names - set(KNOWN.get(name, {}))
        assert not unknown, f"{name}: {sorted(unknown)} may grow without bound; use Recent"
    assert "_spare" in found["frontends/torch/native/cuda/streams.py"], "nothing is found any more"


def test_a_key_without_a_hash_is_a_type_error_even_where_nothing_is_kept() -> None:
    for kept in ({}, {1: 2}):
        recent: Recent[Any, int] = Recent(4)
        for key, value in kept.items():
            recent[key] = value
        with pytest.raises(TypeError, match="unhashable"):
            recent.get(([2, 2],))
