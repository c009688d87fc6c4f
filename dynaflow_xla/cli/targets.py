"""What the command line works on: a function of the user's, and the arguments of a call."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import re
import shlex
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import dynaflow_xla as dfx
from dynaflow_xla import dispatch, published
from dynaflow_xla.errors import DynaflowError


class TargetError(DynaflowError, ValueError):
    """What was written on the command line names nothing that can be used."""


@dataclass(frozen=True)
class Target:
    """A call.

    Attributes:
        name: As it was written.
        fn: The function, or what ``schedule`` made of it already.
        args: By position.
        kwargs: By keyword.
        framework: "jax" or "torch", if the arguments were made for one.
        lost: Why its arguments could not be kept; "" if they were.
    """

    name: str
    fn: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    framework: str = ""
    lost: str = ""

    def bound(self, fast: Any) -> Any:
        """A scheduled function with the arguments by keyword.

        The function that looks into it may have a keyword of the same name itself.
        """
        return functools.partial(fast, **self.kwargs) if self.kwargs else fast


_DTYPES = {
    "f16": "float16", "f32": "float32", "f64": "float64", "bf16": "bfloat16", "s8": "int8", "s16": "int16",
    "s32": "int32", "s64": "int64", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64", "pred": "bool", "bool": "bool",
    "c64": "complex64", "c128": "complex128",
}  # fmt: skip
_SHAPE = re.compile(r"(\w+)\[\s*((?:\d+\s*(?:,\s*\d+\s*)*)?)\]")


def named(text: str) -> Any:
    """What ``module:name`` or ``file.py:name`` names; ``name`` may have dots.

    Raises:
        TargetError: there is no such module, file or name, it is a notebook, or a file of a package that
            has to be named as a module.
    """
    where, colon, name = text.rpartition(":")
    if (notebook := where or name).endswith(".ipynb"):
        script = f"{notebook.removesuffix('.ipynb')}.py"
        raise TargetError(
            f"notebooks are not read; got {notebook}. Export it as a file of Python code (jupyter nbconvert "
            f"--to script) and name that: {script}{colon and ':' + name}"
        )
    if not (colon and where and name):
        raise TargetError(
            f"a function is named by module:function or file.py:function; got {text!r}"
        )
    module = _file(where, name) if where.endswith(".py") else _module(where)
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            known = [n for n in dir(found) if not n.startswith("_")]
            close = difflib.get_close_matches(part, known, n=3)
            way_out = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
            raise TargetError(f"{where} has no {part!r}{way_out}") from None
    return found


def _module(name: str) -> Any:
    here = os.getcwd()
    if here not in sys.path:  # as ``python -m`` does
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name + ".").startswith(error.name + "."):
            raise TargetError(
                f"there is no module {error.name!r} in {here} or on Python's path. A file is named by its "
                f"path: {name.replace('.', '/')}.py:function"
            ) from error
        raise


def _file(path: str, wanted: str) -> Any:
    file = Path(path).resolve()
    if not file.is_file():
        raise TargetError(f"there is no file {path}")
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(file) and module.__name__ != "__main__":
            return module
    name = file.stem if file.stem not in sys.modules else f"_dynaflow_xla_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # a .py file has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]  # a half of it is no module
        own = traceback.extract_tb(error.__traceback__)[-1].filename == str(file)
        if own and isinstance(error, ImportError) and "no known parent package" in str(error):
            raise TargetError(_as_module(path, file, wanted)) from error
        raise
    return module


def _as_module(path: str, file: Path, wanted: str) -> str:
    """What to write for a file that imports from its package, which a file alone does not have."""
    folder = file.parent.parent  # without an __init__.py the dots still mean the file's own folder
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    module = ".".join(file.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
    there = "" if folder == Path.cwd() else f", in the folder {folder}"
    return (
        f"{path} has relative imports, for which it must be imported as a part of its package. Name it as a "
        f"module: {module}:{wanted}{there}"
    )


def target(
    text: str,
    shapes: Sequence[str] = (),
    make: str | None = None,
    *,
    framework: str | None = None,
    factory: bool = False,
    seed: int = 0,
) -> Target:
    """The function that ``text`` names, with arguments.

    Args:
        text: See :func:`named`.
        shapes: The arguments by position: ``f32[8,128]`` is an array of random values, a Python literal
            is itself.
        make: Names a function that makes the arguments: a tuple, a mapping, or a ``dfx.Arguments``.
        framework: Whose arrays to make of shapes.
        factory: What ``text`` names makes the function.
        seed: Of random values.

    Raises:
        TargetError: nothing of that name, or arguments that cannot be.
    """
    fn = named(text)
    if factory:
        if not callable(fn):
            raise TargetError(f"{text!r} makes no function: it is a {type(fn).__name__}")
        fn = fn()
    if not callable(fn):
        raise TargetError(f"{text!r} is no function or model; it is a {type(fn).__name__}")
    if isinstance(fn, type):
        raise TargetError(
            f"{text!r} is a class. With --factory it is called without arguments, and what it makes is used"
        )
    if make is not None:
        if not re.fullmatch(r"(.*:)?[^\W\d]\w*(\.\w+)*", make):
            raise TargetError(
                f"--args names a function that makes the arguments; got {make!r}. Write shapes and numbers "
                f"after TARGET: {text} {' '.join(map(shlex.quote, (make, *shapes)))}"
            )
        if shapes:
            raise TargetError(
                "arguments come from shapes or from --args; got both: leave one of them out"
            )
        given = named(make if ":" in make else f"{text.rpartition(':')[0]}:{make}")
        given = given() if callable(given) else given
        args, kwargs = _arguments(make, given)
        return Target(text, fn, args, kwargs)
    if not shapes and (needed := _needed(fn)):
        raise TargetError(
            f"{text!r} takes {', '.join(needed)}. Give a shape such as f32[8,128] or a Python literal for "
            "each, or --args module:function, which returns them"
        )
    given = [_parsed(one.strip()) for one in shapes]
    whose = framework or _framework(fn, given)
    args = tuple(_argument(one, whose, seed + number) for number, one in enumerate(given))
    return Target(text, fn, args, {}, whose)


def _arguments(make: str, given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, dfx.Arguments):
        return given.args, given.kwargs
    if isinstance(given, Mapping) and all(isinstance(key, str) for key in given):
        return (), dict(given)
    if isinstance(given, tuple | list):
        return tuple(given), {}
    raise TargetError(
        f"--args {make}: must give a tuple of arguments, a mapping of arguments by keyword, or a "
        f"dfx.Arguments of both; got a {type(given).__name__}"
    )


def _needed(fn: Any) -> list[str]:
    """Names of arguments without which it cannot be called; none where that is not known."""
    called = getattr(fn, "forward", fn) if hasattr(fn, "parameters") else fn
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return []
    by_call = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in by_call]


def _framework(fn: Any, given: Sequence[Any]) -> str:
    if not any(isinstance(one, _Shape) for one in given):
        return ""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(fn, torch.nn.Module):
        return "torch"
    if callable(getattr(fn, "lower", None)):  # jax.jit's
        return "jax"
    loaded = [name for name in ("jax", "torch") if name in sys.modules]
    if len(loaded) == 1:
        return loaded[0]
    raise TargetError(
        f"are the arrays JAX's or PyTorch's? {'Both are loaded' if loaded else 'Neither is loaded'}: "
        "say --framework jax or --framework torch"
    )


def _argument(given: Any, framework: str, seed: int) -> Any:
    if isinstance(given, _Shape):
        return dispatch.frontend(framework).example(given.shape, given.dtype, seed)
    return given


class _Shape(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


def _parsed(text: str) -> Any:
    """The shape, or the literal's value.

    Raises:
        TargetError: it is neither.
    """
    if found := _SHAPE.fullmatch(text):
        if found[1] not in _DTYPES:
            raise TargetError(f"{text!r}: the type must be one of {', '.join(_DTYPES)}")
        shape = tuple(int(n) for n in found[2].split(",") if n.strip())
        return _Shape(_DTYPES[found[1]], shape)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise TargetError(
            "an argument must be a shape such as f32[8,128] or s32[], or a Python literal such as 3, True or "
            f"\"'text'\"; got {text!r}"
        ) from None


def strategy(text: str) -> Any:
    """The strategy that a text means.

    That is a name (``branches``), one of ``dynaflow_xla`` or of ``dynaflow_xla.published`` with arguments
    (``NanoBatch(4)``, ``IOS()``), or the user's own (``module:MyStrategy``).

    Raises:
        TargetError: it means none.
    """
    if re.fullmatch(r"\w+", text) and text == text.lower():
        return text  # schedule knows these, and says so of others
    if ":" in text:
        found = named(text)
        return _made(found, text) if isinstance(found, type) else found
    try:
        call = ast.parse(text, mode="eval").body
        if isinstance(call, ast.Name):
            call = ast.Call(call, [], [])
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError(text)
        made = getattr(dfx, call.func.id, None) or getattr(published, call.func.id, None)
        args = [ast.literal_eval(one) for one in call.args]
        kwargs = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
    except (ValueError, SyntaxError):
        made = None
    if not (isinstance(made, type) and issubclass(made, dfx.Strategy)):
        raise TargetError(
            "a strategy is a name (auto, branches, nano_batch, ...), one of dynaflow_xla or of "
            "dynaflow_xla.published with its arguments (NanoBatch(4), Branches(wide=False)) or "
            f"module:Strategy; got {text!r}"
        )
    return _made(made, text, *args, **kwargs)


def _made(kind: Any, text: str, *args: Any, **kwargs: Any) -> Any:
    """A strategy; what its own code says against its arguments is said with its name."""
    try:
        return kind(*args, **kwargs)
    except DynaflowError:
        raise
    except Exception as error:
        raise TargetError(
            f"the strategy {text!r} cannot be made: {type(error).__name__}: {error}"
        ) from error


def check_folder(path: Path) -> None:
    """Whether a file can be written there: before what it is to hold is measured.

    Raises:
        TargetError: there is no such folder, or a folder of that name.
    """
    if path.is_dir():
        raise TargetError(f"{path} cannot be written: it is a folder")
    if not path.absolute().parent.is_dir():
        raise TargetError(f"{path} cannot be written: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise TargetError(f"{path} cannot be written: no permission")


def literal(text: str, what: str) -> Any:
    """A Python literal of the command line.

    Raises:
        TargetError: it is none.
    """
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise TargetError(
            f"{what} must be a Python literal such as 0, (None, 0) or {{'x': 0}}; got {text!r}"
        ) from None
