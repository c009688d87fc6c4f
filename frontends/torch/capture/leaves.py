"""Where autograd's graph of results begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch


def leaves_of(
    made: Sequence[torch.Tensor], known: Sequence[torch.Tensor] = ()
) -> Iterator[torch.Tensor]:
    """Tensors that gradients of results go to, each once; none that is known, nor what is behind it."""
    mine = {id(t) for t in known}
    done = {t.grad_fn for t in known if t.grad_fn is not None}
    for t in made:
        if t.grad_fn is None and t.requires_grad and id(t) not in mine:
            mine.add(id(t))
            yield t
    todo = [t.grad_fn for t in made if t.grad_fn is not None]
    while todo:
        node = todo.pop()
        if node in done:
            continue
        done.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in mine:
            mine.add(id(leaf))
            yield leaf
        todo += [n for n, _ in node.next_functions if n is not None]
