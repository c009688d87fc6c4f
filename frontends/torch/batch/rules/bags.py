"""Rules of bags of embeddings: ids as a matrix, whose bags PyTorch numbers from the first row on."""

from __future__ import annotations

from typing import Any

from dynaflow_xla.batch.algebra import nonlinear, product
from dynaflow_xla.batch.states import (
    SAME,
    Counted,
    NoRule,
    Partial,
    Position,
    Refuse,
    Rows,
    State,
    is_plain_same,
)
from dynaflow_xla.frontends.torch.batch.walking.probes import rows_by_shape
from dynaflow_xla.frontends.torch.batch.walking.registry import COUNTS, rule
from dynaflow_xla.frontends.torch.batch.walking.walk import Site

_BAG = ("_embedding_bag", "_embedding_bag_forward_only")
_BACKWARD = (
    "_embedding_bag_backward", "_embedding_bag_dense_backward",
    "_embedding_bag_per_sample_weights_backward",
)  # fmt: skip
COUNTS.update((*_BAG, *_BACKWARD))


def _ids(site: Site) -> Rows:
    """The ids, ``inner`` for each row, one row after the other.

    Raises:
        Refuse: they belong to bags in another way.
        NoRule: the bags do not depend on the batch, or the ids are no rows.
    """
    ids, weights = site.state(site.args["indices"]), site.args.get("per_sample_weights")
    offsets = site.state(site.args["offsets"]) if "offsets" in site.args else None
    if not isinstance(ids, Rows):
        if isinstance(offsets, Rows):
            raise Refuse(
                "finds the ids of a bag by offsets into the ids of all. Give the ids as a matrix, a row a bag"
            )
        raise NoRule
    if ids.axis != 0 or ids.outer != 1 or ids.power:
        raise NoRule
    if weights is not None and site.state(weights) != Rows(0, 1, ids.inner):
        raise NoRule
    if offsets is not None:
        step = 1 if isinstance(offsets, Position) else getattr(offsets, "step", 0)
        if not isinstance(offsets, Counted | Position) or step != ids.inner:
            raise Refuse("cuts the ids into bags that are no rows of the batch")
    return ids


@rule(*_BAG)
def _bag(site: Site) -> list[State]:
    weight = site.state(site.args["weight"])
    if isinstance(weight, Rows):
        raise Refuse("takes rows of the batch by their number")
    if not is_plain_same(weight) or site.args["include_last_offset"]:
        raise NoRule
    _ids(site)
    made: list[State] = []
    for number, value in enumerate(site.op.payload.outputs):
        shapes = site.walker.shapes.get(-1 if value is None else value)
        rows = None if shapes is None else rows_by_shape(shapes)
        if rows is None:
            made.append(SAME)
        else:
            # The second result says of each id which bag it is in.
            made.append(Counted(0, 1, rows.inner) if number == 1 else rows)
    return made


@rule(*_BACKWARD)
def _bag_backward(site: Site) -> State:
    if site.args.get("scale_grad_by_freq"):
        raise Refuse("divides by how often an id is in the batch")
    if site.args.get("sparse"):
        raise NoRule
    ids = _ids(site)
    bags = site.state(site.args["offset2bag"])
    empty = site.shape(site.args["offset2bag"]) == (
        0,
    )  # then they are counted anew, by the offsets
    if empty and "offsets" in site.args:
        bags = Counted(0, 1, ids.inner)
    if not isinstance(bags, Counted) or (bags.axis, bags.step, bags.inner) != (0, 1, ids.inner):
        raise NoRule
    given: list[Any] = [site.args.get(n) for n in ("bag_size", "maximum_indices", "weight")]
    grad = site.state(site.args["grad"])
    if not isinstance(grad, Rows) or grad.axis != 0:
        raise NoRule
    # What a row's bag is made of, whatever its length.
    nonlinear([s if not isinstance(s, Rows) else Rows(s.axis) for s in map(site.state, given)])
    if site.op.kind == "_embedding_bag_per_sample_weights_backward":
        return Rows(0, 1, ids.inner, product(grad, SAME).power)  # type: ignore[union-attr]
    site.fixed(site.args["num_weights"])
    return Partial(grad.power, site.origin)
