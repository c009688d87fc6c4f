"""Calls that are only tried: on copies of the arguments, with the backward pass where it is wanted."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from dynaflow_xla.errors import SeparabilityError, UnsupportedError, VerificationError
from dynaflow_xla.frontends.torch._compat import operators
from dynaflow_xla.frontends.torch.native.cuda import devices
from dynaflow_xla.frontends.torch.tuning import copying, gradients, keeping
from dynaflow_xla.tuning import autotune, quiet

_ORIGINAL, _CANDIDATE = (0, 1), (1,)
"""In which runs it is looked at what they write and draw. What the first one of a candidate compiles may take
seconds, in which other threads write and draw, too."""

_WRONG, _WRONG_NARROW = 0.01, 0.05
"""Results that are farther from the original's than this share of their norm are other results; of types of
16 bits and fewer, and under autocast, the second. Rounding in another order makes a thousandth of it."""

_NOISE, _NOISE_OF_GRADIENTS = 1e-4, 1e-6
"""Root mean square of differences that may be all that a result is made of: what should be zero."""

_MOST_KEPT = 1 << 28
"""Bytes of the original's results and gradients that are kept to compare with."""


class Trial:
    """A call on copies of the arguments, with the backward pass where gradients are wanted.

    Attributes:
        wanted: Tensors to differentiate for: parameters, and copies of arguments.
        runs: Is told of each run.

    Raises:
        UnsupportedError: an argument cannot be copied, or the backward would use up a graph of the caller's.
    """

    runs: keeping.OwnRuns

    def __init__(self, core: Any, args: Any, kwargs: Any) -> None:
        self._copies = copying.Copies((args, kwargs))
        self._copies.anew()  # or it is known that this cannot be
        self.wanted: list[torch.Tensor] = []
        self._changes = core.changes
        self._expected: _Values | None = None
        self._cotangents: dict[int, torch.Tensor] = {}
        self._wait = devices.waiting(core.original, args, kwargs)
        if torch.is_grad_enabled() and not core.captured_ahead:
            self.wanted = self._copies.wanted
            if isinstance(core.original, torch.nn.Module):
                self.wanted += [p for p in core.original.parameters() if p.requires_grad]
            self.wanted = list({id(x): x for x in self.wanted}.values())
        held = gradients.held_by(core.original) if self.wanted else []
        self._retains = bool(held)
        if held and core.options.compiler != "eager":
            raise UnsupportedError(
                f"the module holds tensors with a graph of autograd's ({', '.join(held)}), which a backward "
                "of compiled code would use up"
            )

    def put_back(self) -> None:
        """Puts back what a call leaves behind beside its arguments, tensors left out."""
        self.runs.put_back()

    def _given(self, look: bool = False) -> keeping.GivenRun:
        """Arguments of a call, which finds everything as the first one did."""
        return self.runs.begin(self._copies.anew(), look=look)

    def check(self, child: Any) -> None:
        """Whether a candidate that splits serves what is differentiated.

        Raises:
            SeparabilityError: it cannot be split, or the backward cannot be planned here.
        """
        if torch.is_grad_enabled() and not self.wanted:
            given = self._given()
            results = pytree.tree_leaves(child.call(given.args, given.kwargs))
            if any(isinstance(x, torch.Tensor) and x.requires_grad for x in results):
                raise SeparabilityError("its gradients go to tensors that are no arguments of it")

    def of(
        self,
        call: Callable[..., Any],
        looked_at: Sequence[int] = _CANDIDATE,
        *,
        compared: bool = True,
    ) -> autotune.Fresh:
        """The call and its backward; what it leaves behind the next call's arguments put back.

        Args:
            call: What is called.
            looked_at: Numbers of runs of which is found out what they write and draw.
            compared: Whether the first run's results have to be the original's.
        """
        numbers = itertools.count()
        # What the caller's graph keeps is not freed; all ways to run keep their own alike then.
        retain_graph = True if self._retains else None

        def given() -> keeping.GivenRun:
            return self._given(next(numbers) in looked_at)

        def run(given: keeping.GivenRun) -> None:
            nonlocal compared
            with contextlib.nullcontext() if self.wanted else torch.no_grad():
                result = call(*given.args, **given.kwargs)
            if not (self.wanted or compared):
                return
            results = pytree.tree_leaves(result)
            # Before the backward: a function of the caller's may write into what it returned.
            values = _Values(results) if compared else None
            found: Sequence[Any] = ()
            made = [x for x in results if isinstance(x, torch.Tensor) and x.requires_grad]
            if self.wanted and made:  # ``backward`` would add to ``grad``
                found = torch.autograd.grad(
                    made,
                    self.wanted,
                    [self._cotangent(n, x) for n, x in enumerate(made)],
                    allow_unused=True,
                    retain_graph=retain_graph,
                )
            if values is not None:
                compared = False  # the first call is not timed, the others are
                values.gradients(found)
                self._compare(values)

        def in_a_row() -> bool:
            """Whether a call finds all as the one before it did: what it changes is put back between two."""
            return not (self._copies.written or self._changes.places)

        return autotune.Fresh(given, run, self._wait, in_a_row)

    def _cotangent(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Cotangents of a result: no two alike, or those of a softmax or a normalization would cancel."""
        known = self._cotangents.get(number)
        if known is not None and (known.shape, known.dtype) == (x.shape, x.dtype):
            return known
        made = torch.ones_like(x)
        if _is_plain(x):
            turns = torch.arange(x.numel(), device=x.device, dtype=torch.float32)
            made = turns.cos_().to(x.dtype).reshape(x.shape)
        self._cotangents[number] = made
        return made

    def _compare(self, values: _Values) -> None:
        """Compares what a way to run makes with what the first one made, the original.

        Where a call changes the function's own tensors each run finds others, and nothing is compared.

        Raises:
            VerificationError: it is something else.
        """
        if self._changes.places:
            return
        if self._expected is None:
            self._expected = values
        else:
            values.compare(self._expected)

    def of_original(self, call: Callable[..., Any], *, strict: bool) -> autotune.Fresh:
        """As ``of``, of the original: what fails only here is no error of the caller's call.

        Args:
            call: The original.
            strict: Its errors pass through: the user asked for the measurement.
        """
        made = self.of(call, _ORIGINAL)
        if strict:
            return made

        def run(given: keeping.GivenRun) -> None:
            try:
                made.run(given)
            except Exception as error:
                if devices.out_of_memory(error):
                    raise  # nor will there be more memory later
                told = (str(error) or type(error).__name__).splitlines()[0]
                raise quiet.NotNow(
                    f"not measured: the original fails on copies of the arguments, or its backward ({told})"
                ) from error

        return replace(made, run=run)


class _Values:
    """Copies of floating-point results of a call, and of their gradients as far as there is room.

    Args:
        results: Of the call; what is no plain tensor is not looked at.
    """

    def __init__(self, results: Iterable[Any]) -> None:
        self._left = _MOST_KEPT
        self.results = self._kept(results)
        self.found: list[torch.Tensor | None] = []

    def gradients(self, found: Iterable[Any]) -> None:
        """Keeps these, too."""
        self.found = self._kept(found)

    def _kept(self, values: Iterable[Any]) -> list[torch.Tensor | None]:
        kept: list[torch.Tensor | None] = []
        for x in values:
            if _is_plain(x) and (x.is_floating_point() or x.is_complex()):
                self._left -= x.nbytes
                kept.append(x.detach().clone() if self._left >= 0 else None)
            else:
                kept.append(None)
        return kept

    def compare(self, expected: _Values) -> None:
        """Whether these are the same but for rounding.

        Raises:
            VerificationError: they are not.
        """
        for number, (want, got) in enumerate(zip(expected.results, self.results, strict=False)):
            apart = _apart(want, got)
            if apart.difference > max(apart.allowed, _NOISE * math.sqrt(apart.elements)):
                raise _different(f"result {number} differs", apart.difference, apart.size)
        # Together: some are zero but for rounding (of a bias before a normalization).
        pairs = zip(expected.found, self.found, strict=False)
        parts = [_apart(want, got) for want, got in pairs]
        difference, allowed, size = (
            math.hypot(*(getattr(part, of) for part in parts))
            for of in ("difference", "allowed", "size")
        )
        noise = _NOISE_OF_GRADIENTS * math.sqrt(sum(part.elements for part in parts))
        if difference > max(allowed, noise):
            raise _different("gradients differ", difference, size)


def _different(what: str, difference: float, size: float) -> VerificationError:
    share = difference / size if size else math.inf
    return VerificationError(
        f"its values are not the original's: {what} by {share:.2g} of the norm"
    )


def _is_plain(x: Any) -> bool:
    """Whether it is an ordinary tensor, of memory of its own kind."""
    plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout is torch.strided
    return plain and not x.is_meta


class _Apart(NamedTuple):
    """Norms of the difference of two results, of what may be rounding, and of the first one."""

    difference: float = 0.0
    allowed: float = 0.0
    size: float = 0.0
    elements: int = 0


def _apart(want: torch.Tensor | None, got: torch.Tensor | None) -> _Apart:
    """How far two results are apart; what the first one lacks (NaN, infinite) does not count."""
    if want is None or got is None or want.shape != got.shape or not want.numel():
        return _Apart()
    wide = torch.complex128 if want.is_complex() else torch.float64
    w, g = want.to(wide), got.to(wide)
    there = w.isfinite()
    w, g = torch.where(there, w, 0), torch.where(there, g, 0)
    size = float(torch.linalg.vector_norm(w))
    difference = float(torch.linalg.vector_norm(w - g))
    narrow = want.dtype.itemsize <= 2 or want.dtype == torch.complex32
    share = _WRONG_NARROW if narrow or torch.is_autocast_enabled(want.device.type) else _WRONG
    return _Apart(
        math.inf if math.isnan(difference) else difference, share * size, size, want.numel()
    )


def hooked(original: Any) -> str | None:
    """Path of a module with hooks, if there is one: they may have effects."""
    if operators.hooks_on_all_modules():
        return "every module"
    if isinstance(original, torch.nn.Module):
        for name, module in original.named_modules():
            if operators.has_hooks(module):
                return f"the module {name!r}" if name else "the module"
    return None
