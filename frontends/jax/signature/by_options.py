"""The jitted programs of a scheduled function, by the compiler options that they are made with."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.signature.own_options import Key, OtherProgram, OwnOptions, key_of
from dynaflow_xla.frontends.jax.xla import xla_options

T = TypeVar("T")


class ProgramsByOptions:
    """Which jitted program calls run, and where they go straight to it.

    A call that is a part of something larger is that program's, whose options are its own. One at top level
    has the options of its plan, where plans have such, else those that the user gave.

    Args:
        fast: The scheduled function.

    Attributes:
        settled: The program of all signatures met at top level; None: there are several, or none yet.
    """

    def __init__(self, fast: Any) -> None:
        self._fast = fast
        self._own = OwnOptions(self._found, fast._signature)
        self._made: dict[tuple[Key, int], Any] = {}
        self._here = threading.local()
        self.settled: Any = None

    @property
    def _by_signature(self) -> bool:
        """Whether the options of a call at top level are its plan's."""
        return bool(self._fast.has_two or self._fast.options_by_plan())

    def _found(self, args: Any, kwargs: Any) -> Mapping[str, Any]:
        """The options of these arguments' program; for symbolic sizes there is no plan."""
        fast = self._fast
        if fast._symbolic(args, kwargs):
            return {}
        if fast.options_by_plan():
            return fast.compiler_options(args, kwargs)  # type: ignore[no-any-return]
        own = fast.planned(args, kwargs).own_options
        return {**(fast._options.compiler_options or {}), **own}

    def call(self, args: Any, kwargs: Any) -> Any:
        """Runs the program of these arguments; later calls go straight to it if it is the only one."""
        jitted, result = self.use(lambda program: self._called(program, args, kwargs), args, kwargs)
        self._settle(jitted)
        return result

    def _called(self, jitted: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return jitted, self._fast._guarded(jitted, args, kwargs)

    def use(self, use: Callable[[Any], T], args: Any, kwargs: Any) -> T:
        """What ``use`` makes of these arguments' program."""

        def used() -> T:
            jitted = self._of(args, kwargs)
            with self._asking():
                return use(jitted)

        return self._own.again(used)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """A block in which programs are traced for signatures that were looked at."""
        before = self._asked
        self._here.asked = True
        try:
            yield
        finally:
            self._here.asked = before

    @property
    def _asked(self) -> bool:
        return getattr(self._here, "asked", False)

    def _of(self, args: Any, kwargs: Any) -> Any:
        fast = self._fast
        by_plan = fast.options_by_plan()
        if _compat.tracing():
            if by_plan and not xla_options.plan_inside_trace(fast._options.name):
                return fast.original
            return fast._inside
        checked = self._by_signature
        # What no lane computes is in the program around them.
        options, number = fast._options.compiler_options or {}, 0
        if checked:
            options, number = self._own.known(args, kwargs)
        key = key_of(options)
        if not key and not by_plan:
            return fast._jit
        place = key, number
        if place not in self._made:

            def call(*args: Any, **kwargs: Any) -> Any:
                return self.traced(key, args, kwargs)

            made = fast.jitted(call if checked else fast._traced, compiler_options=options or None)
            self._made.setdefault(place, made)
        return self._made[place]

    def traced(self, key: Key, args: Any, kwargs: Any) -> Any:
        """A trace of the program with these options, which calls reach with signatures that nobody met, too.

        Raises:
            OtherProgram: the plan is for another one, or nobody decided for what is a candidate of Auto's.
        """
        fast = self._fast
        if not fast.left_alone(args, kwargs):
            if fast._options.candidate and not self._asked:
                self._own.renew()
                raise OtherProgram
            self._own.check(args, kwargs, key)
        return fast._traced(*args, **kwargs)

    def _settle(self, jitted: Any) -> None:
        fast = self._fast
        if not self._by_signature and not fast._options.compiler_options:
            fast._settle(jitted, None, None)  # the one program, inside of others as well
        elif not _compat.tracing():
            # Where signatures have programs of several kinds, calls find theirs in Python.
            alike = not self._by_signature or self._own.alike
            self.settled = jitted if alike else None
            fast._settle(self.settled, None, _compat.at_top_level)

    def clear(self) -> None:
        """Forgets signatures and what was compiled."""
        self.settled = None
        for made in self._made.values():
            made.clear_cache()
        self._made.clear()
        self._own.clear()
