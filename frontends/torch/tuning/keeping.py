"""Calling without leaving a trace: copies of arguments, and what a call changes put back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.torch._compat import modes, operators
from dynaflow_xla.frontends.torch.capture import lazy
from dynaflow_xla.frontends.torch.capture.mutation import effects
from dynaflow_xla.frontends.torch.capture.random.states import Generators, changed
from dynaflow_xla.frontends.torch.tuning.copying import copies as copies, objects_copied
from dynaflow_xla.tuning import quiet
from dynaflow_xla.tuning.put_back import Saved


class _Value:
    """What a tensor held before anything ran, and whether it was written since.

    Attributes:
        tensor: The tensor.
        value: A copy of that.
        first: How often it had been written then; None: it does not count writes.
        seen: The same, when that was last looked at.
        since: How many runs had been looked at when it was saved.
        runs: In how many of those that followed it was written.
        in_first: Whether the first of them wrote it.
        uncounted: Whether that one wrote it without being counted; other ways to run may count.
    """

    __slots__ = ("first", "in_first", "runs", "seen", "since", "tensor", "uncounted", "value")

    def __init__(self, tensor: torch.Tensor, since: int) -> None:
        self.tensor, self.value = tensor, tensor.detach().clone()
        self.first = self.seen = None if tensor.is_inference() else tensor._version
        self.since, self.runs, self.in_first, self.uncounted = since, 0, False, False

    def put_back(self, is_ours: bool) -> None:
        """Writes the value back, where something changed it.

        The count of writes decides, since autograd refuses a graph with a tensor that was written after: none
        is written for nothing. Some writes are not counted (of batch norm, through ``data``), nor are these
        put back in a way that counts.

        Args:
            is_ours: Whether writes that were counted are those of our runs.
        """
        if self.first is None:
            if self.differs():
                with torch.inference_mode():
                    self.tensor.copy_(self.value)
        elif self.tensor._version != self.first:
            if is_ours:
                with torch.no_grad():
                    self.tensor.copy_(self.value)
        elif self.differs():
            self.tensor.data.copy_(self.value)

    def differs(self) -> bool:
        """Whether other values are there; of what has no elements in memory to compare, no.

        Without memory to compare, yes: the same values are written then, maybe.
        """
        if self.tensor.layout != torch.strided or self.tensor.is_meta:
            return False
        if isinstance(self.tensor, modes.FakeTensor):
            return False
        try:
            return not torch.equal(self.tensor, self.value)
        except torch.OutOfMemoryError:
            return True
        except NotImplementedError:  # a class or type of tensors that cannot be compared
            return False


class _Values:
    """Tensors with what they held before anything ran.

    Attributes:
        alone: Whether there was no other thread of Python's when runs began.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Value] = {}
        self._runs = 0
        self.alone = True

    def save(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keeps what some hold; what is known already was saved before anything changed it."""
        with modes.apart(), torch.no_grad():  # of the modes of a capture, which may be going on
            for tensor in tensors:
                if id(tensor) not in self._known:
                    self._known[id(tensor)] = _Value(tensor, self._runs)

    def begin(self) -> None:
        """A run of ours begins, of which is noted what it writes."""
        self.alone &= threading.active_count() == 1
        for known in self._known.values():
            if known.first is not None:
                known.seen = known.tensor._version

    def end(self) -> None:
        """It is over."""
        for known in self._known.values():
            is_first = self._runs == known.since
            if known.first is not None and known.tensor._version != known.seen:
                known.runs += 1
                known.in_first |= is_first
            elif is_first:
                known.uncounted = known.first == known.seen and known.differs()
        self._runs += 1

    def put_back(self) -> None:
        """Writes back what runs of ours changed; all is theirs where no run was noted.

        Our runs all do the same: what few of them wrote, another thread wrote. What only the first one
        did is ours, too: something that is made once.
        """
        for known in reversed(self._known.values()):
            most = known.uncounted or 2 * known.runs > self._runs - known.since
            known.put_back(self.alone or most or (known.in_first and known.runs == 1))


@contextmanager
def random_kept(args: Any, kwargs: Any, original: Any = None) -> Iterator[None]:
    """Puts random states back: of the default generators, and as ``Generators`` finds them."""
    generators = Generators(args, kwargs, original)
    states = generators.states()
    try:
        yield
    finally:
        generators.put_back(states)


@contextmanager
def called_modules_kept() -> Iterator[None]:
    """Puts back the state of every module that this thread calls meanwhile, wherever the module is held."""
    me = threading.get_ident()
    found: dict[int, tuple[torch.nn.Module, Saved]] = {}
    tensors = _Values()

    def before(module: torch.nn.Module, _: Any) -> None:
        if threading.get_ident() != me or id(module) in found:
            return
        for inside in module.modules():
            if id(inside) not in found:
                saved = Saved()
                saved.whole(inside)
                found[id(inside)] = inside, saved
                tensors.save((*inside.parameters(recurse=False), *inside.buffers(recurse=False)))

    handle = operators.before_all_modules(before)
    try:
        yield
    finally:
        handle.remove()
        for _, saved in found.values():
            saved.put_back()
        tensors.put_back()


def _modules(called: Sequence[Any], args: Any, kwargs: Any) -> list[torch.nn.Module]:
    """Those of what is called that are modules, and those among the arguments, with all inside of them."""
    leaves = (*called, *pytree.tree_leaves((args, kwargs)))
    tops = [x for x in leaves if isinstance(x, torch.nn.Module)]
    return list({id(m): m for top in tops for m in top.modules()}.values())


@contextmanager
def arguments_kept(
    original: Any, args: Any, kwargs: Any
) -> Iterator[tuple[tuple[Any, Any], Callable[[], None]]]:
    """For a call up to its first graph: what Dynamo cannot follow in front of that runs.

    Tensors among the arguments get their values back, modules their attributes (those that a function holds,
    too), generators their states; what else there is among the arguments is copied. Of what may be large,
    parameters and other tensors that modules hold, values are kept only if asked for.

    Args:
        original: The scheduled function or module.
        args: Of the call.
        kwargs: Of the call.

    Yields:
        Arguments to call with, the same tensors, as a capture is for what memory they share; and what keeps
        the tensors of modules, too, before anything may change them.
    """
    whole = Saved()
    modules = _modules((*lazy.held_modules(original),), args, kwargs)
    for module in modules:
        whole.whole(module)
    tensors = _Values()

    kept = False

    @torch.compiler.disable  # it is called in the midst of what Dynamo looks at
    def keep_state() -> None:
        nonlocal kept
        if kept:
            return
        kept = True
        for module in modules:
            # Containers and all: those of parameters, buffers, and the user's own.
            tensors.save(x for x in pytree.tree_leaves(vars(module)) if _is_plain(x))

    tensors.save(x for x in pytree.tree_leaves((args, kwargs)) if _is_plain(x))
    try:
        given = objects_copied((args, kwargs))
    except UnsupportedError:  # whether it has to be copied is not known here
        given = args, kwargs
    try:
        with random_kept(args, kwargs, original):
            yield given, keep_state
    finally:
        whole.put_back()
        tensors.put_back()


def _is_plain(leaf: Any) -> bool:
    """Whether it is a tensor of PyTorch's own whose elements lie in memory."""
    own = type(leaf) in (torch.Tensor, torch.nn.Parameter)
    return own and leaf.layout == torch.strided and not leaf.is_meta


@contextmanager
def _state_kept(
    original: Any, changes: effects.Changes, args: Any, kwargs: Any, captured: bool = False
) -> Iterator[tuple[Saved, _Values]]:
    places, whole, tensors = Saved(), Saved(), _Values()
    tensors.save(_saved_places(changes.places, original, places))
    # A copy of all parameters may be more than the device has room for.
    known = set(original.modules()) if captured and isinstance(original, torch.nn.Module) else ()
    for module in _modules([original], args, kwargs):
        if module not in known:
            tensors.save(module.parameters(recurse=False))
        tensors.save(module.buffers(recurse=False))
        whole.whole(module)

    def found(new: frozenset[effects.MutatedPlace]) -> None:
        tensors.save(_saved_places(new, original, places))

    try:
        with changes.watched(found):
            yield places, tensors
    finally:
        places.put_back()
        whole.put_back()
        tensors.put_back()


@contextmanager
def preserved(
    original: Any, changes: effects.Changes, args: Any, kwargs: Any
) -> Iterator[Callable[[], None]]:
    """Puts back at the end what calls change: states of modules, of random generators, and other places.

    Modules are the original and those among the arguments, with parameters, buffers and attributes.
    A function of several graphs tells what a graph changes when that graph is captured, just before it runs.

    Args:
        original: The scheduled function or module.
        changes: What else its calls change; what is found meanwhile is put back, too.
        args: Of the call.
        kwargs: Of the call.

    Yields:
        What puts the other places back in between, tensors left out, so that a call starts as the first did.
    """
    kept = _state_kept(original, changes, args, kwargs)
    with kept as (places, _), random_kept(args, kwargs, original):
        yield places.put_back


class GivenRun:
    """What one run of a measurement is called with.

    The run is over when the last reference to this goes: whoever measures holds one while it takes the time,
    and none after, so that what is put back then is not timed.

    Attributes:
        args: Of the call.
        kwargs: Of the call.

    Args:
        given: Both.
        over: Called when the run is over.
    """

    def __init__(self, given: tuple[Any, Any], over: Callable[[GivenRun], None]) -> None:
        self.args, self.kwargs = given
        self._over = over

    def __del__(self) -> None:
        self._over(self)


_TELLING = 2
"""So many runs tell which generators are drawn from: those that all of them drew from."""


class OwnRuns:
    """The runs of a measurement, beside which other threads go on: their work is not undone.

    Random states are put back after each run, of the generators that runs draw from, and of tensors only what
    runs wrote. Which these are is looked at in the first runs of each way to run: that takes longer than many
    a function.

    Args:
        places: What is no tensor, put back before each run.
        tensors: What runs may write.
        generators: What runs may draw from.
        watch: Is told where another thread drew random numbers between two runs.
    """

    def __init__(
        self, places: Saved, tensors: _Values, generators: Generators,
        watch: quiet.ActivityWatch,
    ) -> None:  # fmt: skip
        self._places, self._tensors, self._generators = places, tensors, generators
        self._watch = watch
        self._drawn: set[Hashable] | None = None  # None: nothing was looked at yet
        self._start = generators.states()
        self._left: dict[Hashable, Any] = {}  # as the last run found them
        self._running = 0  # the id of what is given; 0 between runs
        self._looks = False
        self._runs_looked_at = 0

    def put_back(self) -> None:
        """Puts places back, tensors and random states left out, so that a call starts as the first did."""
        self._places.put_back()

    def begin(self, given: tuple[Any, Any], *, look: bool) -> GivenRun:
        """A run begins.

        Args:
            given: Arguments and keyword arguments.
            look: Find out what it writes and draws.
        """
        self.end()
        self.put_back()
        made = GivenRun(given, self._over)
        self._running, self._looks = id(made), look
        if look or self._drawn:
            now = self._generators.states(None if look else self._drawn)
            if changed(self._to_put_back(), now):
                self._watch.disturb("another thread drew random numbers beside it")
            self._left = now
        if look:
            self._tensors.begin()
        return made

    def end(self) -> None:
        """The last run is over, if it is not yet."""
        if not self._running:
            return
        self._running = 0
        if self._looks:
            self._tensors.end()
            # The original's first runs tell: lanes may draw less, and another thread at any time.
            if self._runs_looked_at < _TELLING:
                drawn = changed(self._left, self._generators.states())
                self._drawn = drawn if self._drawn is None else self._drawn & drawn
            self._runs_looked_at += 1
        if saved := self._to_put_back():
            self._generators.put_back(saved)

    def _to_put_back(self) -> dict[Hashable, Any]:
        """States, before the last run, of the generators that runs draw from, as far as is known."""
        return {key: state for key, state in self._left.items() if key in (self._drawn or ())}

    def close(self) -> None:
        """There will be no more; without other threads random states are as before, whatever drew."""
        self.end()
        if self._tensors.alone and threading.active_count() == 1:
            self._generators.put_back(self._start)

    def _over(self, given: GivenRun) -> None:
        if self._running == id(given):
            self.end()


@contextmanager
def own_runs(
    original: Any, changes: effects.Changes, args: Any, kwargs: Any, watch: quiet.ActivityWatch,
    *, captured: bool = False,
) -> Iterator[OwnRuns]:  # fmt: skip
    """As ``preserved``, for a measurement: what other threads do meanwhile stays.

    Args:
        original: The scheduled function or module.
        changes: What else its calls change.
        args: Of the call.
        kwargs: Of the call.
        watch: Of this thread's turn to measure.
        captured: Graphs are all that it does, so ``changes`` tells which of its parameters are written;
            the others are not copied.

    Yields:
        What is told of each run.
    """
    with _state_kept(original, changes, args, kwargs, captured) as (places, tensors):
        runs = OwnRuns(places, tensors, Generators(args, kwargs, original), watch)
        try:
            yield runs
        finally:
            runs.close()


def _saved_places(
    places: Iterable[effects.MutatedPlace], original: Any, saved: Saved
) -> list[torch.Tensor]:
    """Saves what can be found; gives the tensors, whose values are still to be saved."""
    tensors: list[torch.Tensor] = []
    with (
        modes.apart()
    ):  # of a capture's: what is found may be made there, as a tensor over an array of NumPy's
        for place in places:
            with suppress(LookupError):
                tensors += effects.save([place], original, saved)
    return tensors
