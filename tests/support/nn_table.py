"""Every public class of ``torch.nn`` and function of ``torch.nn.functional``: does the proof cover it?

``python -P tests/support/nn_table.py`` prints the table, in inference and in training (where the loss is
made outside, forward and backward graphs are proved; nothing is compared numerically). A test holds it
against ``REFUSED``.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import dynaflow_xla as dfx

B = 4


@dataclass(frozen=True)
class Case:
    """A module or function with inputs whose rows lie along ``axis``; ``total``: its result is one number."""

    make: Callable[[], Any]
    inputs: Callable[[], tuple[Any, ...]]
    axis: int = 0
    total: bool = False


def x(*shape: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(B, *shape),)


def xs(*shapes: tuple[int, ...]) -> Callable[[], tuple[Any, ...]]:
    return lambda: tuple(torch.randn(B, *shape) for shape in shapes)


def classes(*shape: int, of: int = 5) -> Any:
    return torch.randint(0, of, (B, *shape))


def signs(*shape: int) -> Any:
    return torch.randint(0, 2, (B, *shape)) * 2.0 - 1


V, P, S3 = x(6), x(4, 6, 6), x(2, 4, 4, 4)
"""A vector, planes and boxes for each row."""

_VECTORS = [
    "CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity",
    "LeakyReLU", "LogSigmoid", "Mish", "PReLU", "RReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid",
    "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink", "Dropout", "AlphaDropout", "GLU",
    "Flatten",
]  # fmt: skip
_PLANES: dict[str, tuple[Any, ...]] = {
    "AdaptiveAvgPool2d": (2,), "AdaptiveMaxPool2d": (2,), "AvgPool2d": (2,), "MaxPool2d": (2,),
    "LPPool2d": (2, 2), "ReflectionPad2d": (1,), "ReplicationPad2d": (1,), "ZeroPad2d": (1,),
    "CircularPad2d": (1,), "ConstantPad2d": (1, 2.0), "Conv2d": (4, 8, 3),
    "ConvTranspose2d": (4, 8, 3), "ChannelShuffle": (2,), "PixelShuffle": (2,),
    "PixelUnshuffle": (2,), "BatchNorm2d": (4,), "InstanceNorm2d": (4,), "GroupNorm": (2, 4),
    "Dropout2d": (), "FeatureAlphaDropout": (), "Softmax2d": (), "LocalResponseNorm": (2,),
    "Unfold": (2,), "UpsamplingBilinear2d": (None, 2), "UpsamplingNearest2d": (None, 2),
    "CrossMapLRN2d": (2,), "FractionalMaxPool2d": (2, 3), "Upsample": (None, 2),
    "SyncBatchNorm": (4,),
}  # fmt: skip
_LINES: dict[str, tuple[Any, ...]] = {
    "AdaptiveAvgPool1d": (2,), "AdaptiveMaxPool1d": (2,), "AvgPool1d": (2,), "MaxPool1d": (2,),
    "LPPool1d": (2, 2), "ReflectionPad1d": (1,), "ReplicationPad1d": (1,), "ZeroPad1d": (1,),
    "CircularPad1d": (1,), "ConstantPad1d": (1, 2.0), "Conv1d": (4, 8, 3), "Dropout1d": (),
    "ConvTranspose1d": (4, 8, 3), "BatchNorm1d": (4,), "InstanceNorm1d": (4,),
}  # fmt: skip
_BOXES: dict[str, tuple[Any, ...]] = {
    "AdaptiveAvgPool3d": (2,), "AdaptiveMaxPool3d": (2,), "AvgPool3d": (2,), "MaxPool3d": (2,),
    "LPPool3d": (2, 2), "ReflectionPad3d": (1,), "ReplicationPad3d": (1,), "ZeroPad3d": (1,),
    "CircularPad3d": (1,), "ConstantPad3d": (1, 2.0), "Conv3d": (2, 3, 3), "Dropout3d": (),
    "ConvTranspose3d": (2, 3, 3), "BatchNorm3d": (2,), "InstanceNorm3d": (2,),
    "FractionalMaxPool3d": (2, 2),
}  # fmt: skip


class _First(nn.Module):
    """The first of several results, or what a module makes of one input in two ways."""

    def __init__(self, inner: Any, twice: bool = False) -> None:
        super().__init__()
        self.inner, self.twice = inner, twice

    def forward(self, *args: Any) -> Any:
        made = self.inner(*args * 3) if self.twice else self.inner(*args)
        return made[0] if isinstance(made, tuple) else made


class _Unpooled(nn.Module):
    def __init__(self, pool: Any, unpool: Any) -> None:
        super().__init__()
        self.pool, self.unpool = pool, unpool

    def forward(self, given: Any) -> Any:
        return self.unpool(*self.pool(given))


def _of(names: dict[str, tuple[Any, ...]], inputs: Any) -> dict[str, Case]:
    def one(name: str, args: tuple[Any, ...]) -> Case:
        return Case(lambda: getattr(nn, name)(*args), inputs)

    return {name: one(name, args) for name, args in names.items()}


def _losses() -> dict[str, Case]:
    unit = lambda *s: torch.rand(B, *s)  # noqa: E731
    pairs: dict[str, Callable[[], tuple[Any, ...]]] = {
        "MSELoss": xs((6,), (6,)), "L1Loss": xs((6,), (6,)), "SmoothL1Loss": xs((6,), (6,)),
        "HuberLoss": xs((6,), (6,)), "BCEWithLogitsLoss": lambda: (torch.randn(B, 6), unit(6)),
        "BCELoss": lambda: (torch.rand(B, 6) * 0.8 + 0.1, unit(6)),
        "CrossEntropyLoss": lambda: (torch.randn(B, 5), classes()),
        "NLLLoss": lambda: (torch.randn(B, 5).log_softmax(1), classes()),
        "NLLLoss2d": lambda: (torch.randn(B, 5, 3, 3).log_softmax(1), classes(3, 3)),
        "KLDivLoss": lambda: (torch.randn(B, 5).log_softmax(1), unit(5)),
        "PoissonNLLLoss": lambda: (torch.randn(B, 6), unit(6)),
        "GaussianNLLLoss": lambda: (torch.randn(B, 6), torch.randn(B, 6), unit(6) + 0.1),
        "SoftMarginLoss": lambda: (torch.randn(B, 6), signs(6)),
        "HingeEmbeddingLoss": lambda: (torch.randn(B, 6), signs(6)),
        "CosineEmbeddingLoss": lambda: (torch.randn(B, 6), torch.randn(B, 6), signs()),
        "MarginRankingLoss": lambda: (torch.randn(B), torch.randn(B), signs()),
        "MultiMarginLoss": lambda: (torch.randn(B, 5), classes()),
        "MultiLabelMarginLoss": lambda: (torch.randn(B, 5), classes(5)),
        "MultiLabelSoftMarginLoss": lambda: (torch.randn(B, 5), unit(5).round()),
        "TripletMarginLoss": xs((6,), (6,), (6,)),
        "TripletMarginWithDistanceLoss": xs((6,), (6,), (6,)),
    }  # fmt: skip
    return {
        name: Case(lambda name=name: getattr(nn, name)(), inputs, total=True)  # type: ignore[misc]
        for name, inputs in pairs.items()
    }


MODULES: dict[str, Case] = {
    **_of(dict.fromkeys(_VECTORS, ()), V),
    **_of(_PLANES, P),
    **_of(_LINES, x(4, 8)),
    **_of(_BOXES, S3),
    **_losses(),
    "Threshold": Case(lambda: nn.Threshold(0.1, 2.0), V),
    "LayerNorm": Case(lambda: nn.LayerNorm(6), x(3, 6)),
    "RMSNorm": Case(lambda: nn.RMSNorm(6), x(3, 6)),
    "Linear": Case(lambda: nn.Linear(6, 3), x(3, 6)),
    "Bilinear": Case(lambda: nn.Bilinear(6, 5, 3), xs((6,), (5,))),
    "CosineSimilarity": Case(lambda: nn.CosineSimilarity(), xs((6,), (6,))),
    "PairwiseDistance": Case(lambda: nn.PairwiseDistance(), xs((6,), (6,))),
    "Embedding": Case(lambda: nn.Embedding(5, 6), lambda: (classes(3),)),
    "EmbeddingBag": Case(lambda: nn.EmbeddingBag(5, 6), lambda: (classes(3),)),
    "Softmax": Case(lambda: nn.Softmax(-1), V),
    "LogSoftmax": Case(lambda: nn.LogSoftmax(-1), V),
    "Softmin": Case(lambda: nn.Softmin(-1), V),
    "Unflatten": Case(lambda: nn.Unflatten(1, (2, 3)), V),
    "Fold": Case(lambda: nn.Fold((3, 3), 2), x(8, 4)),
    "MaxUnpool1d": Case(
        lambda: _Unpooled(nn.MaxPool1d(2, return_indices=True), nn.MaxUnpool1d(2)), x(4, 8)
    ),
    "MaxUnpool2d": Case(
        lambda: _Unpooled(nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)), P
    ),
    "MaxUnpool3d": Case(
        lambda: _Unpooled(nn.MaxPool3d(2, return_indices=True), nn.MaxUnpool3d(2)), S3
    ),
    "RNN": Case(lambda: _First(nn.RNN(6, 5, batch_first=True)), x(3, 6)),
    "GRU": Case(lambda: _First(nn.GRU(6, 5, batch_first=True)), x(3, 6)),
    "LSTM": Case(lambda: _First(nn.LSTM(6, 5, batch_first=True)), x(3, 6)),
    "RNNCell": Case(lambda: nn.RNNCell(6, 5), V),
    "GRUCell": Case(lambda: nn.GRUCell(6, 5), V),
    "LSTMCell": Case(lambda: _First(nn.LSTMCell(6, 5)), V),
    "MultiheadAttention": Case(
        lambda: _First(nn.MultiheadAttention(6, 2, batch_first=True), twice=True), x(3, 6)
    ),
    "TransformerEncoderLayer": Case(
        lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), x(3, 6)
    ),
    "TransformerDecoderLayer": Case(
        lambda: nn.TransformerDecoderLayer(6, 2, 8, batch_first=True), xs((3, 6), (2, 6))
    ),
}  # fmt: skip

_HOLDS = "holds or derives from other modules"
APART = {
    **dict.fromkeys(("Module", "Sequential", "ModuleDict", "ModuleList", "ParameterDict",
                     "ParameterList", "Container", "DataParallel", "TransformerEncoder",
                     "TransformerDecoder", "Transformer", "RNNBase", "RNNCellBase"), _HOLDS),
    "AdaptiveLogSoftmaxWithLoss": "its shapes depend on the labels: no graph of it can be captured",
    "CTCLoss": "reads its lengths in Python: no graph of it can be captured",
    "LinearCrossEntropyLoss": "takes its weight from outside; see functional.linear_cross_entropy",
}  # fmt: skip
"""What has no case of its own, and why."""

_STATISTICS = "takes its statistics over the batch"
_FIXED = "must be a size of its own"
_NO_GRAPH = "no graph of"
REFUSED = {
    **dict.fromkeys((("training", f"BatchNorm{n}d") for n in (1, 2, 3)), _STATISTICS),
    ("training", "SyncBatchNorm"): _STATISTICS,
    ("training", "RReLU"): "draws random numbers that depend on data",
    **dict.fromkeys((("training", "FractionalMaxPool2d"), ("inference", "FractionalMaxPool3d")), _FIXED),
    **dict.fromkeys(
        ((mode, name) for mode in ("inference", "training")
         for name in ("Identity", "CrossMapLRN2d", "GaussianNLLLoss")), _NO_GRAPH
    ),
    ("training", "FractionalMaxPool3d"): _NO_GRAPH,
}  # fmt: skip
"""What is refused or runs as the original, with a part of the reason: by mode and class."""


def uncovered() -> list[str]:
    """Public module classes that have neither a case nor a reason why not."""
    known = MODULES.keys() | APART.keys()
    return [
        name
        for name, made in vars(nn).items()
        if inspect.isclass(made) and issubclass(made, nn.Module)
        and name not in known and not name.startswith("Lazy")
    ]  # fmt: skip


def outcome(case: Case, training: bool) -> str:
    """ "proved", "compared" (no rule for something), or why it is refused."""
    model = case.make()
    model.train(training)
    out_axes: Any = dfx.Mean() if case.total else case.axis
    fast = dfx.schedule(
        model,
        dfx.NanoBatch([3, 1], joins=False),
        in_axes=case.axis,
        out_axes=out_axes,
        backend="torch",
    )
    inputs = case.inputs()
    inputs[0].requires_grad_(training and inputs[0].is_floating_point())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            with torch.set_grad_enabled(training):
                torch.manual_seed(0)
                out = fast(*inputs)
                torch.manual_seed(0)
                want = model(*inputs)
                torch.testing.assert_close(out, want)
                if training and out.requires_grad:
                    weights = torch.randn_like(out)
                    agree(model, inputs, out, want, weights)
        except dfx.DynaflowError as error:
            return str(error)
    notes = [str(w.message) for w in told if issubclass(w.category, dfx.FallbackWarning)]
    return f"not proved: {notes[0]}" if notes else "proved"


def agree(model: Any, inputs: Any, out: Any, want: Any, weights: Any) -> None:
    """Gradients of the scheduled and of the original call."""
    leaves = [t for t in (*inputs, *model.parameters()) if t.requires_grad]
    got, wanted = (
        torch.autograd.grad(result, leaves, weights, allow_unused=True) for result in (out, want)
    )
    for a, b in zip(got, wanted, strict=True):
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def main() -> None:
    """Prints the table."""
    counts: Counter[tuple[str, str]] = Counter()
    for name, case in MODULES.items():
        for mode in ("inference", "training"):
            torch._dynamo.reset()
            said = outcome(case, mode == "training")
            if said != "proved":
                print(f"{mode:9} {name}: {' '.join(said.splitlines()[:2])}")
            kind = "proved" if said == "proved" else "not split" if _NO_GRAPH in said else "refused"
            counts[mode, kind] += 1
    for name, why in APART.items():
        print(f"          {name}: {why}")
    for (mode, kind), number in sorted(counts.items()):
        print(f"{mode:9} {kind}: {number} of {len(MODULES)}")
    wrapped = {name for name in functions() if not name.endswith("_")}
    print(f"functions of torch.nn.functional: {len(wrapped)}, which the modules call")


def functions() -> list[str]:
    """Public functions of ``torch.nn.functional``."""
    return [
        name
        for name, made in vars(functional).items()
        if not name.startswith("_") and callable(made) and not inspect.isclass(made)
        and getattr(made, "__module__", None) in (None, functional.__name__, "torch._C._nn")
    ]  # fmt: skip


if __name__ == "__main__":
    main()
