"""PyTorch's own samples of its operators (OpInfo, some 700 entries), each through ``dfx.schedule``.

``python -P tests/support/opinfo_sweep.py [--of TABLE] [--training] [--errors] [--only REGEX]`` prints a
line for each operator, with its outcome:

* equal: values (with ``--training`` gradients, too) are the original's;
* original: they are because the original runs, with a warning;
* refused: an error of dynaflow_xla;
* lenient: the original refuses how ``out=`` is given; PyTorch's captured graphs do not look at that;
* raw: another error, where the original has none;
* wrong: other values, types or shapes;
* hang, crash: the process that tried it had to be stopped, or died.

The operators run in a process of their own, which a watchdog ends where an operator takes too long.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import re
import select
import subprocess
import sys
import time
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

import dynaflow_xla as dfx

TABLES = ("op", "hop", "autograd_function", "custom_op")
"""PyTorch's tables: its operators, those of higher order, autograd functions and operators of one's own."""

WAYS = ("sequential", "branches", "nano", "halves", "inplace")
"""How an operator is scheduled: alone, beside another branch, its rows all but one and one, in halves; and
the form that writes into its argument, alone."""

OUTCOMES = ("hang", "crash", "wrong", "raw", "refused", "lenient", "original", "equal")
"""Worst first."""

GOOD = ("refused", "lenient", "original", "equal")

NO_VALUES = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty",
             "new_empty_strided"}  # fmt: skip
"""Operators that return whatever is in memory."""

_DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)


@dataclass(frozen=True)
class Tried:
    """What came of one sample of an operator under one schedule."""

    operator: str
    way: str
    outcome: str
    reason: str = ""
    sample: int = -1


@dataclass(frozen=True)
class Call:
    """A function with the arguments of a call."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: bool = True
    inplace: Callable[..., Any] | None = None


def without_expecttest() -> None:
    """Lets PyTorch's samples be imported without a package that is for its own tests alone."""
    try:
        import expecttest  # noqa: F401
    except ModuleNotFoundError:
        module: Any = types.ModuleType("expecttest")
        module.TestCase = unittest.TestCase
        sys.modules["expecttest"] = module


def database(of: str = "op") -> list[Any]:
    """All operators of one of PyTorch's tables of samples."""
    without_expecttest()
    if of != "op":
        module = importlib.import_module(f"torch.testing._internal.{of}_db")
        return list(getattr(module, f"{of}_db"))
    from torch.testing._internal import common_methods_invocations as samples

    # Puts the generator's state back after a call, which no graph can do; here each call is seeded.
    samples.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return list(samples.op_db)


def name_of(op: Any) -> str:
    """Name of an operator and its variant."""
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def _dtype(op: Any) -> torch.dtype | None:
    known = op.supported_dtypes("cpu")
    return next((t for t in (*_DTYPES, *sorted(known, key=str)) if t in known), None)


def calls(op: Any, *, training: bool = False, most: int = 3) -> Iterator[tuple[int, Call]]:
    """Some samples of an operator that the original can run: the first, the last, those between."""
    dtype = _dtype(op)
    if dtype is None or (training and not (dtype.is_floating_point or dtype.is_complex)):
        return
    torch.manual_seed(0)
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=training))
    step = max((len(samples) - 1) / max(most - 1, 1), 1)
    for number in dict.fromkeys(round(i * step) for i in range(most)):
        if number < len(samples):
            given = samples[number]
            args = (given.input, *given.args)
            yield (
                number,
                Call(
                    name_of(op), op.op, args, given.kwargs, op.name not in NO_VALUES, op.get_inplace()
                ),
            )  # fmt: skip


def fails(op: Any) -> Iterator[tuple[int, Call, str]]:
    """Calls that are wrong, with what the original says of them."""
    if op.error_inputs_func is None:
        return
    torch.manual_seed(0)
    for number, wrong in enumerate(op.error_inputs("cpu")):
        given = wrong.sample_input
        call = Call(name_of(op), op.op, (given.input, *given.args), given.kwargs)
        try:
            _result(call.function, call, (), training=False)
        except Exception as error:
            yield number, call, type(error).__name__


def fresh(value: Any) -> Any:
    """The same arguments with tensors of their own."""

    def one(x: Any) -> Any:
        return x.detach().clone().requires_grad_(x.requires_grad) if is_tensor(x) else x

    return pytree.tree_map(one, value)


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def tensors(value: Any) -> list[Any]:
    return [x for x in pytree.tree_leaves(value) if is_tensor(x)]


def _result(function: Any, call: Call, extra: tuple[Any, ...], *, training: bool) -> list[Any]:
    """Flat results and gradients, from fresh arguments and a fixed seed."""
    args, kwargs = fresh((call.args, call.kwargs))
    torch.manual_seed(1)
    if not training:
        with torch.no_grad():
            out = list(pytree.tree_leaves(function(*extra, *args, **kwargs)))
        return out + tensors((args, kwargs))  # which may have been written
    out = list(pytree.tree_leaves(function(*extra, *args, **kwargs)))
    wanted = [x for x in tensors((args, kwargs)) if x.requires_grad]
    made = [x for x in out if is_tensor(x) and x.requires_grad]
    if not made or not wanted:
        return out
    torch.manual_seed(2)
    seeds = [torch.randn(x.shape, dtype=x.dtype) for x in made]  # whatever their strides
    found = torch.autograd.grad(made, wanted, seeds, allow_unused=True)
    # What an unused result alone needs has zeros where the original has no gradient.
    return out + [
        torch.zeros_like(x) if g is None else g for g, x in zip(found, wanted, strict=True)
    ]


def difference(got: list[Any], want: list[Any], values: bool, close: bool) -> str:
    """How results differ; "" if they do not."""
    if len(got) != len(want):
        return f"{len(got)} results for {len(want)}"
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        if is_tensor(a) != is_tensor(b):
            return f"result {number}: {type(a).__name__} for {type(b).__name__}"
        if not is_tensor(b):
            if a != b and a == a:
                return f"result {number}: {a!r} for {b!r}"
            continue
        kinds = [(x.dtype, tuple(x.shape), x.layout, x.requires_grad) for x in (a, b)]
        if kinds[0] != kinds[1]:
            return f"result {number}: {kinds[0]} for {kinds[1]}"
        if not values:
            continue
        loose = {"rtol": 1e-4, "atol": 1e-4} if close and b.dtype in _DTYPES[::3] else {}
        try:
            torch.testing.assert_close(a, b, equal_nan=True, **loose)
        except AssertionError as error:
            return f"result {number}: {' '.join(str(error).split())}"
    return ""


def _axes(value: Any, rows: int, first: Any) -> Any:
    """Axis 0 of each tensor with so many rows (of one tensor only, where ``first`` is given)."""
    if isinstance(value, list | tuple):
        found = [_axes(x, rows, first) for x in value]
        return type(value)(found) if type(value) in (list, tuple) else None
    if isinstance(value, dict):
        return {key: _axes(x, rows, first) for key, x in value.items()}
    batched = is_tensor(value) and value.ndim > 0 and value.shape[0] == rows
    return 0 if batched and (first is None or value is first) else None


def batched(call: Call) -> list[Any]:
    """Ways to say where the batch is: all tensors with as many rows as the first, the first alone."""
    found = tensors((call.args, call.kwargs))
    if not found or found[0].ndim == 0 or found[0].shape[0] < 2:
        return []
    rows = found[0].shape[0]
    ways = [_axes((call.args, call.kwargs), rows, first) for first in (None, found[0])]
    return ways[:1] if ways[0] == ways[1] else ways


Schedule = Callable[..., Any]


def _schedules(call: Call, way: str) -> Iterator[tuple[Schedule, Any, tuple[Any, ...]]]:
    """Makers of scheduled functions by ``out_axes``, the original, what goes before the arguments."""

    def alone(*args: Any, **kwargs: Any) -> Any:
        return call.function(*args, **kwargs)

    def beside(other: Any, /, *args: Any, **kwargs: Any) -> Any:
        made = call.function(*args, **kwargs)
        return made, torch.cumsum(torch.sort(other).values, 0)

    if way in ("sequential", "inplace"):
        yield lambda _: dfx.schedule(alone, dfx.Sequential(), backend="torch"), alone, ()
    elif way == "branches":
        other = torch.linspace(0, 7, 31).sin()
        two = dfx.Branches()
        yield lambda _: dfx.schedule(beside, two, lanes=2, backend="torch"), beside, (other,)
    else:
        for axes in batched(call):
            rows = tensors((call.args, call.kwargs))[0].shape[0]
            split = dfx.NanoBatch(2) if way == "halves" else dfx.NanoBatch([rows - 1, 1])
            made = functools.partial(
                dfx.schedule, alone, split, in_axes=axes, backend="torch"
            )  # fmt: skip
            yield lambda out, made=made: made(out_axes=out), alone, ()


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:1500]


def attempt(call: Call, way: str, *, training: bool) -> Tried | None:
    """Runs a call scheduled and as it is; None where it does not lend itself to that."""
    if way == "inplace":
        if call.inplace is None or training:
            return None
        call = replace(call, function=call.inplace)
    before = _result_or_none(call, training)
    if before is None:
        return None
    worst: Tried | None = None
    for schedule, plain, extra in _schedules(call, way):
        want = _result(plain, call, extra, training=training) if extra else before
        tried = _run(call, way, schedule(0), extra, want, training=training)
        for out in (dfx.Sum(), dfx.Mean()):  # what a refusal proposes has to work
            if (
                tried.outcome == "refused"
                and f"out_axes=dfx.{type(out).__name__}()" in tried.reason
            ):
                again = _run(call, way, schedule(out), extra, want, training=training)
                tried = tried if again.outcome == "refused" else again
        if tried.outcome not in GOOD:
            return tried
        if worst is None or OUTCOMES.index(tried.outcome) > OUTCOMES.index(worst.outcome):
            worst = tried  # of several ways to say where the batch is, one that works
    return worst


def _result_or_none(call: Call, training: bool) -> list[Any] | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _result(call.function, call, (), training=training)
        except Exception:
            return None


def _run(
    call: Call, way: str, scheduled: Any, extra: tuple[Any, ...], want: list[Any], *, training: bool
) -> Tried:
    done = Tried(call.name, way, "equal")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            got = _result(scheduled, call, extra, training=training)
            if any("from the next call on" in str(w.message) for w in told):
                got = _result(scheduled, call, extra, training=training)  # now it is split
        except dfx.DynaflowError as error:
            return replace(
                done, outcome="refused", reason=f"{type(error).__name__}: {one_line(error)}"
            )
        except Exception as error:
            return replace(done, outcome="raw", reason=f"{type(error).__name__}: {one_line(error)}")
    notes = [one_line(w.message) for w in told if issubclass(w.category, dfx.FallbackWarning)]  # type: ignore[arg-type]
    different = difference(got, want, call.values, way in ("nano", "halves"))
    if different:
        return replace(done, outcome="wrong", reason=" | ".join((different, *notes)))
    if any("so the original runs" in note for note in notes):
        return replace(done, outcome="original", reason=notes[0])
    return replace(done, reason=" | ".join(notes))


def attempt_error(call: Call, wanted: str, way: str) -> Tried | None:
    """A call that the original refuses: equal if it is refused scheduled, and not by a fault of ours."""
    for schedule, _, extra in _schedules(call, way):
        done = Tried(call.name, way, "equal")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                _result(schedule(0), call, extra, training=False)
            except dfx.DynaflowError as error:
                return replace(
                    done,
                    outcome="refused",
                    reason=f"{wanted}; {type(error).__name__}: {one_line(error)}",
                )
            except Exception as error:
                if type(error).__name__ == wanted:
                    return done
                return replace(
                    done,
                    outcome="raw",
                    reason=f"{wanted}; {type(error).__name__}: {one_line(error)}",
                )
        outcome = "lenient" if "out" in call.kwargs else "wrong"
        return replace(done, outcome=outcome, reason=f"no error, the original: {wanted}")
    return None


def operator(
    op: Any,
    *,
    ways: Sequence[str] = WAYS,
    training: bool = False,
    errors: bool = False,
    most: int = 3,
    told: Callable[[str], None] = lambda at: None,
) -> Iterator[Tried]:
    """All that is tried of one operator."""
    torch._dynamo.reset()
    if errors:
        for number, call, wanted in fails(op):
            told(f"wrong call {number}")
            for way in ways[:1]:
                if (tried := attempt_error(call, wanted, way)) is not None:
                    yield replace(tried, sample=number)
        return
    for number, call in calls(op, training=training, most=most):
        for way in ways:
            told(f"sample {number}, {way}")
            if (tried := attempt(call, way, training=training)) is not None:
                yield replace(tried, sample=number)


# -- processes ------------------------------------------------------------------------------------


def serve(
    entries: Sequence[Any], names: Sequence[str], attempts: Callable[..., Iterator[Tried]]
) -> None:
    """Tries what comes in: a line says the entry of a table by its number, and how."""
    import logging

    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what operators print is no answer

    def say(**what: Any) -> None:
        out.write(json.dumps(what) + "\n")

    say(names=names)
    for line in sys.stdin:
        asked = json.loads(line)
        number = asked.pop("number")
        try:
            for tried in attempts(entries[number], told=lambda at: say(at=at), **asked):
                say(**vars(tried))
        except Exception as error:
            say(**vars(Tried(names[number], "", "raw", f"the sweep itself: {error!r}")))
        say(end=True)


class Sweep:
    """Tries operators in a process of its own, which is ended if one takes too long.

    Args:
        limit: Seconds for each sample and way.
        of: One of ``TABLES``.
        script: What the process runs, with ``--serve``.
    """

    def __init__(self, limit: float = 120, of: str = "op", script: str = __file__) -> None:
        self.limit = limit
        self._command = [sys.executable, "-P", os.path.abspath(script), "--serve", "--of", of]
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self.names: list[str] = []
        self._start()

    def _start(self) -> Any:
        self._buffer = b""
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        answer = self._line(300)
        if isinstance(answer, str):
            self.close()
            raise RuntimeError(f"the process that tries the operators does not start: {answer}")
        self.names = answer["names"]
        return self._process

    def _line(self, limit: float) -> Any:
        """The next answer; "hang" or "crash" if there is none."""
        assert self._process is not None and self._process.stdout is not None
        end = time.monotonic() + limit
        while b"\n" not in self._buffer:
            left = max(end - time.monotonic(), 0)
            ready, _, _ = select.select([self._process.stdout], [], [], left)
            if not ready:
                return "hang"
            got = os.read(self._process.stdout.fileno(), 65536)
            if not got:
                return "crash"
            self._buffer += got
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def run(self, number: int, **how: Any) -> Iterator[Tried]:
        """What comes of one operator; ``how`` as in ``operator``."""
        process = self._process or self._start()
        process.stdin.write(json.dumps({"number": number, **how}).encode() + b"\n")
        process.stdin.flush()
        at = ""
        while True:
            answer = self._line(self.limit)
            if isinstance(answer, str):
                yield Tried(self.names[number], at, answer, f"within {self.limit:.0f} s")
                self.close()
                return
            if "at" in answer:
                at = answer["at"]
            elif "end" in answer:
                return
            else:
                yield Tried(**answer)

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def parser_of(description: str, ways: Sequence[str]) -> argparse.ArgumentParser:
    """What a sweep can be asked for, whatever it tries."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--ways", default=",".join(ways), help="of " + ", ".join(ways))
    parser.add_argument("--shard", default="0/1", help="I/N: every N-th entry, from the I-th on")
    parser.add_argument("--samples", type=int, default=3, help="of each entry")
    parser.add_argument("--limit", type=float, default=120, help="seconds for a sample")
    parser.add_argument("--json", default="", help="a file for all that was tried")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser


def report(sweep: Sweep, options: argparse.Namespace, **how: Any) -> None:
    """Prints the table, and keeps what was tried in a file of JSON lines if asked to."""
    index, of = map(int, options.shard.split("/"))
    how |= {"most": options.samples, "ways": options.ways.split(",")}
    counts: Counter[str] = Counter()
    tries: Counter[str] = Counter()
    for number in range(index, len(sweep.names), of):
        name = sweep.names[number]
        if re.search(options.only, name) is None:
            continue
        found = list(sweep.run(number, **how))
        tries.update(t.outcome for t in found)
        order = sorted(found, key=lambda t: OUTCOMES.index(t.outcome))
        counts[order[0].outcome if order else "no sample"] += 1
        print(f"{name:50} {Counter(t.outcome for t in order).most_common()}", flush=True)
        for (way, outcome), reason in {(t.way, t.outcome): t.reason for t in order}.items():
            if outcome != "equal":
                print(f"    {outcome:9} {way:12} {reason[:300]}", flush=True)
        if options.json:
            with open(options.json, "a") as file:
                file.writelines(json.dumps(vars(t)) + "\n" for t in found)
    sweep.close()
    print(f"entries, by their worst: {dict(counts)}")
    print(f"samples: {dict(tries)}")


def main() -> None:
    """The command."""
    parser = parser_of(__doc__, WAYS)
    parser.add_argument("--training", action="store_true", help="gradients, too")
    parser.add_argument("--errors", action="store_true", help="calls that the original refuses")
    parser.add_argument("--of", default="op", choices=TABLES, help="which table")
    options = parser.parse_args()
    if options.serve:
        table = database(options.of)
        serve(table, [name_of(op) for op in table], operator)
        return
    sweep = Sweep(options.limit, options.of)
    report(sweep, options, training=options.training, errors=options.errors)


if __name__ == "__main__":
    main()
