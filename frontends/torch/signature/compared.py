"""Splits that are not proved: the first call runs both ways, and is compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dynaflow_xla.batch import evidence
from dynaflow_xla.batch.joins import AUTOMATIC, Wanted
from dynaflow_xla.errors import EngineError, SeparabilityError, VerificationError
from dynaflow_xla.frontends.torch.backend import Entry
from dynaflow_xla.frontends.torch.batch import handed, proof as proving
from dynaflow_xla.frontends.torch.capture.captured import Captured
from dynaflow_xla.frontends.torch.compare import as_array, compare


@dataclass
class MadeEntry:
    """The plan for some sizes.

    Attributes:
        entry: What runs.
        fit: The proof of its split; None: the batch stays whole.
        sizes: Rows of the nano-batches.
        assume: Whether nothing is asked of the proof.
        compared: Whether it is known to do what the original does.
        joins: What runs once for several nano-batches.
        whole: What runs while calls cannot show whether the split is right.
    """

    entry: Entry
    fit: proving.Fit | None = None
    sizes: tuple[int, ...] = ()
    assume: bool = False
    compared: bool = True
    joins: Wanted = AUTOMATIC
    whole: Entry | None = None


def silent(captured: Captured, made: MadeEntry, inputs: Sequence[Any]) -> list[str]:
    """Names of batched inputs that say nothing, or [] if a comparison on these decides."""
    assert made.fit is not None
    graph, specs = captured.graph, made.fit.in_specs
    read = {*graph.consumers(), *graph.outputs}
    batched = []
    for value, name, given in zip(graph.inputs, graph.input_names, inputs, strict=True):
        axis, x = specs.get(value), handed.whole(given)
        if value in read and isinstance(axis, int) and isinstance(x, torch.Tensor):
            is_data = x.is_floating_point() or x.is_complex()
            batched.append(evidence.Batched(name, is_data, as_array(x), axis))
    return evidence.silent(batched, made.sizes)


def compare_first(
    captured: Captured, made: MadeEntry, inputs: Sequence[Any], warn: Callable[[str], None]
) -> None:
    """Runs whole and split, and compares: for what could not be proved.

    Raises:
        SeparabilityError: the results differ.
    """
    assert made.fit is not None
    inputs = [handed.whole(x) for x in inputs]
    given = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    state = torch.get_rng_state()
    with torch.no_grad():
        wants = captured.module(*given)
    written = [given[captured.graph.inputs.index(w)] for w, _ in captured.epilogue]
    given = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    torch.set_rng_state(state)
    try:
        gots = [handed.whole(got) for got in made.entry(list(given))]
    except EngineError as error:
        raise _unequal(captured, made, f"run in nano-batches, {error}") from error
    torch.set_rng_state(state)
    written_too = [given[captured.graph.inputs.index(w)] for w, _ in captured.epilogue]
    pairs = zip([*wants, *written], [*gots, *written_too], strict=True)
    for number, (want, got) in enumerate(pairs):
        if not isinstance(want, torch.Tensor):
            continue
        try:
            compare(f"result {number}", want, got)
        except VerificationError as error:
            raise _unequal(captured, made, f"compared with the whole batch, {error}") from None
    made.compared = True
    found = "; ".join(map(str, made.fit.proof.findings[:3]))
    warn(
        f"{captured.graph.name!r} is split although it is not proved that rows are independent "
        f"({found}); its results on the first call are those of the whole batch"
    )


def _unequal(captured: Captured, made: MadeEntry, seen: str) -> SeparabilityError:
    """The error of a split that was not proved, and does not do what the whole batch does."""
    assert made.fit is not None
    try:
        made.fit.proof.raise_if_refused()
    except SeparabilityError as refused:
        return SeparabilityError(f"{refused}\n{seen}")
    return SeparabilityError(f"{captured.graph.name!r} cannot be split: {seen}")
