"""Rows of collectives, recurrent layers, random numbers, and operators that hold programs."""

from __future__ import annotations

from typing import Any

from batch_cases.table import Row, Stand
from batch_cases.values import Operand

X = Operand((4, 3))
LAYER = (Operand((5, 2, 3), axes=(1,)), *[Operand((1, 2, 3), axes=(1,))] * 2)
WEIGHTS_OF = {
    kind: (Operand((n, 3), axes=()), Operand((n, 3), axes=()))
    for kind, n in (("rnn", 3), ("gru", 9), ("lstm", 12))
}
WEIGHTS = WEIGHTS_OF["lstm"]


def _both(torch: Any, x: Any) -> Any:
    """Two processes, of which the other one has twice the values."""
    return torch.cat([x, 2 * x])


def _cell(kind: str) -> Any:
    return lambda t, x, h, w, v: getattr(t.ns("dynaflow_xla"), kind).default(x, h, w, v)


ROWS: list[Row] = [
    Row(
        "a sum over processes",
        (X,),
        torch={
            "_c10d_functional.all_reduce": Stand(
                lambda t, x: t.ns("_c10d_functional").all_reduce.default(x, "sum", "0"),
                lambda torch, x: x + 2 * x,
            ),
            "_c10d_functional.all_reduce_coalesced": Stand(
                lambda t, x: t.ns("_c10d_functional").all_reduce_coalesced.default([x], "avg", "0"),
                lambda torch, x: [x + 0.5 * x],
            ),
            "_c10d_functional.wait_tensor": Stand(
                lambda t, x: t.ns("_c10d_functional").wait_tensor.default(x), lambda torch, x: x
            ),
            "_c10d_functional.broadcast": Stand(
                lambda t, x: t.ns("_c10d_functional").broadcast.default(x, 0, "0"),
                lambda torch, x: x,
            ),
        },
    ),
    Row(
        "the largest of processes",
        (X,),
        torch={
            "_c10d_functional.all_reduce": Stand(
                lambda t, x: t.ns("_c10d_functional").all_reduce.default(x, "max", "0"),
                lambda torch, x: torch.maximum(x, 2 * x),
            )
        },
    ),
    Row(
        "a product over processes",
        (X,),
        torch={
            "_c10d_functional.all_reduce": Stand(
                lambda t, x: t.ns("_c10d_functional").all_reduce.default(x, "product", "0"),
                lambda torch, x: 2 * x * x,
            )
        },
    ),
    *[
        Row(
            f"{what} that processes exchange",
            (X,),
            torch={
                "_c10d_functional.all_to_all_single": Stand(
                    lambda t, x, n, part=part: t.ns("_c10d_functional").all_to_all_single.default(
                        x, [part(n)] * 2, [part(n)] * 2, "0"
                    ),
                    lambda torch, x, n, part=part: _both(torch, torch.split(x, [part(n)] * 2)[0]),
                )
            },
        )
        for what, part in (("parts", lambda n: 2), ("runs", lambda n: n))
    ],
    Row(
        "values of all processes",
        (X,),
        torch={
            "_c10d_functional.all_gather_into_tensor": Stand(
                lambda t, x: t.ns("_c10d_functional").all_gather_into_tensor.default(x, 2, "0"),
                _both,
            )
        },
    ),
    *[
        Row(
            f"a part of the {how} over processes",
            (X,),
            torch={
                "_c10d_functional.reduce_scatter_tensor": Stand(
                    lambda t, x, how=how: t.ns("_c10d_functional").reduce_scatter_tensor.default(
                        x, how, 2, "0"
                    ),
                    lambda torch, x, how=how: (
                        x + 2 * x if how == "sum" else torch.maximum(x, 2 * x)
                    )[: x.shape[0] // 2],
                )
            },
        )
        for how in ("sum", "max")
    ],
    Row(
        "a recurrent layer",
        (*LAYER, *WEIGHTS),
        together=(0, 1, 2),
        torch={
            "dynaflow_xla.rnn_layer": lambda t, x, h, c, w, v: t.ns(
                "dynaflow_xla"
            ).rnn_layer.default("lstm", x, [h, c], [w, v], False, False, False, False)
        },
    ),
    Row(
        "a gradient of a recurrent layer",
        (Operand((5, 2, 3), axes=(1,)), *LAYER, *WEIGHTS),
        torch={
            "dynaflow_xla.rnn_layer_backward": lambda t, g, x, h, c, w, v: t.ns(
                "dynaflow_xla"
            ).rnn_layer_backward.default(
                [g, None, None], [True] * 5, "lstm", x, [h, c], [w, v], False, True, False, True
            )
        },
        together=(0, 1, 2, 3),
    ),
    Row(
        "a recurrent cell",
        (Operand((2, 3)), Operand((2, 3)), *WEIGHTS_OF["gru"]),
        torch={"dynaflow_xla.gru_cell": _cell("gru_cell")},
        together=(0, 1),
    ),
    Row(
        "a plain recurrent cell",
        (Operand((2, 3)), Operand((2, 3)), *WEIGHTS_OF["rnn"]),
        torch={
            "dynaflow_xla.rnn_tanh_cell": _cell("rnn_tanh_cell"),
            "dynaflow_xla.rnn_relu_cell": _cell("rnn_relu_cell"),
        },
        together=(0, 1),
    ),
    Row(
        "a recurrent cell with two states",
        (Operand((2, 3)), Operand((2, 3)), Operand((2, 3)), *WEIGHTS_OF["lstm"]),
        torch={
            "dynaflow_xla.lstm_cell": lambda t, x, h, c, w, v: t.ns(
                "dynaflow_xla"
            ).lstm_cell.default(x, [h, c], w, v)
        },
        together=(0, 1, 2),
    ),
]
