"""Which framework something belongs to. Frameworks are imported only by their frontends."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

from dynaflow_xla import backends
from dynaflow_xla.errors import UnsupportedError, UnsupportedTypeError, optional
from dynaflow_xla.protocols import Fixed, Frontend, Scheduled, stands_at
from dynaflow_xla.settings import Settings

_WHY = {"jax": "scheduling a JAX function", "torch": "scheduling a PyTorch model"}
_MODULES = {"jax": "jax.frontend", "torch": "torch.frontend", "torch_xla": "torch_xla"}

_ROOTS = {
    "torch": "torch", "torchvision": "torch", "torchaudio": "torch", "torch_xla": "torch",
    "jax": "jax", "jaxlib": "jax", "flax": "jax", "equinox": "jax", "optax": "jax",
}  # fmt: skip
"""Framework by the first name of a module."""

_CALLED = (types.FunctionType, types.MethodType, functools.partial)
_MOST = 64
"""Functions looked at, with those that they call; and entries of a container."""


def _module(name: str) -> str:
    return f"dynaflow_xla.frontends.{_MODULES[name]}"


def frontend(framework: str, why: str = "") -> Frontend:
    """The frontend of "jax" or "torch".

    Args:
        framework: Its name.
        why: What it is needed for, for the message.

    Raises:
        UnsupportedError: the framework is missing, or outside the supported versions.
    """
    name = framework
    if framework == "torch" and _has_torch_xla():
        name = "torch_xla"
        optional.require("jax", "running a PyTorch model on XLA", "jax")
    else:
        optional.require(framework, why or _WHY[framework], framework)
    made: Any = importlib.import_module(_module(name))
    return made  # type: ignore[no-any-return]


def is_loaded(framework: str) -> bool:
    """Whether something imported it already."""
    return framework in sys.modules


def is_traced(arguments: Any) -> bool:
    """Whether these have no values: JAX traces the call."""
    jax = sys.modules.get("jax")
    if jax is None:
        return False
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree_util.tree_leaves(arguments))


def is_scheduled(fn: Any) -> bool:
    """Whether ``schedule`` or ``together`` returned it."""
    return (
        isinstance(fn, EitherFunction)
        or _is_together(fn)
        or type(fn).__module__.startswith("dynaflow_xla.frontends.")
    )


def _has_torch_xla() -> bool:
    """Whether the PyTorch at hand is the one that torch_xla works with, and that is installed."""
    torch = sys.modules.get("torch")
    version = str(getattr(torch, "__version__", ""))
    return version.startswith("2.9.") and optional.available("torch_xla")


def framework_of(fn: Any, settings: Settings) -> str:
    """Whose a function is; "either" for a plain function that its calls have to tell it of.

    PyTorch is loaded then, and JAX is or may be by the time of a call.

    Raises:
        UnsupportedError: it is no function, not one of the backend's framework, or a plan of several.
    """
    torch = sys.modules.get("torch")
    if _is_together(fn):
        raise UnsupportedError(
            f"{fn.__name__!r} is what dfx.together returned, which is one plan already. Give its functions "
            "themselves to schedule or together; together(..., strategy=...) takes a strategy for all"
        )
    if isinstance(fn, type) and any("__call__" in vars(base) for base in fn.__mro__):
        raise UnsupportedTypeError(
            f"schedule takes a model; got the class {fn.__name__}: pass an instance, {fn.__name__}(...)"
        )
    is_torch = torch is not None and isinstance(fn, _torch_classes(torch))
    is_jax = _is_jax(fn) and not is_torch
    only = backends.only_framework(settings.backend)
    if only == "torch" and is_jax:
        raise UnsupportedError(
            f"backend={settings.backend!r} cannot run a jax.jit function; leave it out"
        )
    if not is_torch and not callable(fn):
        raise UnsupportedTypeError(
            f"schedule takes a function, a jax.jit function or a model; got {type(fn).__name__}"
        )
    if is_torch or only == "torch":
        return "torch"
    if is_jax or torch is None or only == "jax":
        return "jax"
    if not optional.available("jax") or settings.compiler != "eager":
        return "torch"
    return "either"


def _is_jax(fn: Any) -> bool:
    """Whether something is made by JAX, or by a library on it: a jitted function, or a call bound to one."""
    if _is_together(fn):
        return bool(fn._framework == "jax")
    if isinstance(fn, EitherFunction):  # has JAX's methods, whatever it turns out to be
        return False
    if callable(fn) and hasattr(fn, "lower"):  # pmap's functions have no trace
        return True
    if isinstance(fn, functools.partial):
        return _is_jax(fn.func)
    inner = getattr(fn, "__func__", None)
    if inner is not None:
        return _is_jax(inner)
    return type(fn).__module__.partition(".")[0] in ("jax", "jaxlib", "flax", "equinox")


def _is_together(fn: Any) -> bool:
    return hasattr(type(fn), "_dfx_serving")


def _torch_classes(torch: Any) -> tuple[type, ...]:
    classes = [torch.nn.Module]
    export = sys.modules.get("torch.export")
    if export is not None:
        classes.append(export.ExportedProgram)
    return tuple(classes)


def serving(fast: Any, caller: str, args: Any, kwargs: Any) -> Scheduled:
    """What serves these arguments inside of a scheduled callable.

    Args:
        fast: What ``schedule`` returned.
        caller: Of the public functions, for the message.
        args: Of a call.
        kwargs: Of a call.

    Raises:
        UnsupportedTypeError: it is none.
    """
    return _known(_found(fast, args, kwargs), fast, caller)


def _known(found: Scheduled | None, fast: Any, caller: str) -> Scheduled:
    if found is None:
        raise UnsupportedTypeError(
            f"{caller} takes what dynaflow_xla.schedule returned; got {type(fast).__name__}"
        )
    return found


def _found(fast: Any, args: Any, kwargs: Any) -> Scheduled | None:
    if (several := getattr(type(fast), "_dfx_serving", None)) is not None:
        return several(fast, args, kwargs)  # type: ignore[no-any-return]
    if isinstance(fast, functools.partial):  # a bound method of those that are scheduled, say
        args, kwargs = (*fast.args, *args), {**fast.keywords, **kwargs}
        member = _found(fast.func, args, kwargs)
        return None if member is None else Fixed(member, args, kwargs)
    if isinstance(fast, EitherFunction):
        fast = fast.made_for(args, kwargs)
    for name in _MODULES:
        module: Any = sys.modules.get(_module(name))  # one that made something is loaded
        if module is not None and (found := module.serving(fast, args, kwargs)) is not None:
            return found  # type: ignore[no-any-return]
    return None


def compiling(fast: Any, args: Any, kwargs: Any) -> Scheduled:
    """As ``serving``, for ``dynaflow_xla.compile``: a ``jax.jit`` function around a scheduled one, too."""
    jax: Any = sys.modules.get(_module("jax"))
    found = _found(fast, args, kwargs)
    if found is None and jax is not None:
        found = jax.around(fast)
    return _known(found, fast, "compile")


def bucketed(fast: Any, sizes: Sequence[int], in_axes: Any, out_axes: Any, check: bool) -> Any:
    """The padded callable of ``dynaflow_xla.bucketed``, from the frontend that made ``fast``."""
    if isinstance(fast, EitherFunction):
        fast = fast.of_torch("bucketed")
    torch: Any = sys.modules.get(_module("torch"))
    made = None if torch is None else torch.bucketed(fast, sizes, in_axes, out_axes, check)
    if made is None:
        raise UnsupportedTypeError(
            f"bucketed takes what schedule returned for PyTorch; got {type(fast).__name__}. A function of "
            "JAX is planned once a shape: pad its arguments outside"
        )
    return made


def target(given: Any) -> str:
    """The path of the text of a GPU to compile for.

    Raises:
        PlanError: there is none of that name.
    """
    jax: Any = frontend("jax", "compiling for a GPU")
    return jax.target(given)  # type: ignore[no-any-return]


def of_call(
    name: str,
    functions: Sequence[Any],
    args: Any,
    kwargs: Any = None,
    torch: Any = None,
) -> str:
    """Whose a call of plain functions is, where PyTorch is loaded.

    Its arguments tell; where they hold neither tensors nor arrays, what the functions name; else it is JAX's
    if something imported JAX, which nothing here does unasked.

    Args:
        name: Of what is called, for the message.
        functions: What runs.
        args: Of the call.
        kwargs: Of the call.
        torch: PyTorch's frontend, if the caller has it: looking for it takes longer than a small call.

    Raises:
        UnsupportedError: they belong to both.
    """
    torch = torch or frontend("torch")
    has_tensor, has_array = torch.kinds(args, kwargs or {})
    if has_tensor and has_array:
        raise UnsupportedError(
            f"{name} got torch tensors and JAX arrays in one call; a schedule runs one framework. Convert "
            "with torch.from_dlpack or jnp.from_dlpack before the call."
        )
    if has_tensor or has_array:
        return "torch" if has_tensor else "jax"
    return _named_by(functions) or ("jax" if is_loaded("jax") else "torch")


def given(fn: Any) -> Any:
    """The function itself of a scheduled one whose framework only a call tells."""
    return fn._given if isinstance(fn, EitherFunction) else fn


class EitherFunction:
    """A plain function that may be of either framework: scheduled by that of its calls (see ``of_call``).

    Args:
        fn: The function.
        settings: What the user asked for.

    Attributes:
        original: What the calls so far were compared with (for JAX, the jitted function); before any
            call, the function as given to ``schedule``.
    """

    def __init__(self, fn: Any, settings: Settings) -> None:
        self._given, self._settings = given(fn), settings
        self._torch: Any = frontend("torch")  # loaded already
        self._made: dict[str, Any] = {}
        self._lock = threading.RLock()
        functools.update_wrapper(self, fn, updated=())

    @property
    def original(self) -> Any:
        """The framework's original once a call told which it is; until then the function as given."""
        made = list(self._made.values())
        return made[0].original if len(made) == 1 else self._given

    def __repr__(self) -> str:
        made = list(self._made.values())
        return repr(made[0]) if len(made) == 1 else f"<scheduled {self._given!r}>"

    def made_for(self, args: Any, kwargs: Any) -> Any:
        """The scheduled function of the framework that these arguments belong to.

        Raises:
            UnsupportedError: they belong to both.
        """
        name = getattr(self, "__name__", "the function")
        return self._get(of_call(name, (self._given,), args, kwargs, self._torch))

    def of_torch(self, who: str) -> Any:
        """The scheduled function of PyTorch's, for a function of ours that knows no other.

        Raises:
            UnsupportedTypeError: the function is JAX's.
        """
        if "jax" in self._made or _named_by((self._given,)) == "jax":
            raise UnsupportedTypeError(
                f"{who} takes what schedule returned for PyTorch; got {self!r}, a function of JAX, which is "
                "planned once a shape: pad its arguments outside"
            )
        return self._get("torch")

    def _get(self, framework: str) -> Any:
        if framework not in self._made:
            with self._lock:  # two threads' first calls get one, which plans and measures once
                if framework not in self._made:
                    self._made[framework] = frontend(framework).schedule(
                        self._given, self._settings
                    )
        return self._made[framework]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Same values as the original."""
        if self._torch.inlines():
            return self._given(*args, **kwargs)
        return self.made_for(args, kwargs)(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Binds like a function, so that methods can be scheduled."""
        return self if instance is None else functools.partial(self, instance)

    def __reduce__(self) -> Any:
        if stands_at(self):  # where pickle would look for the original
            return self.__qualname__
        return EitherFunction, (self._given, self._settings)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        # lower, trace: only JAX's has more than a call. Without arguments the function alone tells.
        return getattr(self._get(of_call(name, (self._given,), (), torch=self._torch)), name)


def _named_by(functions: Sequence[Any]) -> str:
    """The framework that functions name; "" if they name none, or both equally near.

    It is what they close over and the globals that they name. No attribute is asked for that could run code.
    What a function names itself says more than what the functions that it calls name, so these are looked at
    only where it says nothing.
    """
    level, seen = list(functions), 0
    known: dict[int, Any] = {}  # what is kept here keeps its number
    while level and seen < _MOST:
        found: set[str] = set()
        further: list[Any] = []
        for fn in level[: _MOST - seen]:
            seen += 1
            for used in _used(fn):
                if id(used) in known:
                    continue
                known[id(used)] = used
                if framework := _of(used):
                    found.add(framework)
                elif isinstance(used, _CALLED):
                    further.append(used)
        if found:
            return found.pop() if len(found) == 1 else ""
        level = further
    return ""


def _used(fn: Any) -> Iterator[Any]:
    """What a function closes over, has as defaults and names; of an import inside of it, the name."""
    if isinstance(fn, functools.partial):
        yield from (*fn.args, *fn.keywords.values(), fn.func)
    elif isinstance(fn, types.MethodType):
        yield from (fn.__self__, fn.__func__, *_attributes(fn.__self__))
    elif not isinstance(fn, types.FunctionType):
        yield from (fn, *_attributes(fn))
        yield from (vars(c)["__call__"] for c in type(fn).__mro__[:-1] if "__call__" in vars(c))
    else:
        for cell in fn.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # nothing was assigned yet
                continue
        yield from fn.__defaults__ or ()
        yield from (fn.__kwdefaults__ or {}).values()
        if "__wrapped__" in vars(fn):
            yield vars(fn)["__wrapped__"]
        for name in _names(fn.__code__):
            if name in fn.__globals__:
                yield fn.__globals__[name]
            elif name.partition(".")[0] in _ROOTS:
                yield _Imported(name)


class _Imported(str):
    """The name of a module that a function imports itself."""


def _names(code: types.CodeType) -> Iterator[str]:
    """Names of globals, and of the functions inside."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names(const)


def _attributes(thing: Any) -> Sequence[Any]:
    """Those of an object itself; of a class or module, which hold whatever they like, none."""
    held = getattr(thing, "__dict__", None)
    if isinstance(thing, type | types.ModuleType) or not isinstance(held, dict):
        return ()
    return list(held.values())[:_MOST]


def _of(thing: Any, depth: int = 4) -> str:
    """The framework that made a thing, or of one of whose classes it is."""
    if isinstance(thing, _Imported):
        return _root(thing)
    if isinstance(thing, types.ModuleType):
        return _root(thing.__name__)
    if isinstance(thing, types.FunctionType):
        return _root(thing.__module__)
    if isinstance(thing, types.BuiltinFunctionType):
        return _root(thing.__module__) or _of(thing.__self__, 0)
    if depth and isinstance(thing, dict | list | tuple):
        entries = list(thing.values() if isinstance(thing, dict) else thing)[:_MOST]
        return next((found for entry in entries if (found := _of(entry, depth - 1))), "")
    classes = (thing if isinstance(thing, type) else type(thing)).__mro__
    return next((found for kind in classes if (found := _root(kind.__module__))), "")


def _root(module: Any) -> str:
    """The framework of a module's name, this package's parts for one of them included."""
    if not isinstance(module, str):
        return ""
    first, _, rest = module.partition(".")
    if first == "dynaflow_xla" and rest.startswith("frontends."):
        first = rest.split(".")[1]
    return _ROOTS.get(first, "")
