"""transformers' models from small configurations, scheduled, against their best plain setting.

    python benchmarks/cpu/transformers_models.py [--only CLIP,T5] [--rounds 15]

Plain settings are eager with all threads and with one, and ``torch.compile`` of the whole. Scheduled
are ``Sequential``, ``Branches`` and ``Auto``, eager; ``Branches`` and ``Auto`` with compiled regions, too;
ViT also in two nano-batches, beside half its batch on one core, which is as much as they can gain.
Outputs are verified first. A model that is in the result file already is measured again only if it is named.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

import torch
import transformers
from common import environment, measure, records
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit

import dynaflow_xla as dfx

COMMON = dict(
    vocab_size=1000, hidden_size=256, intermediate_size=1024, num_hidden_layers=3,
    num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=128, pad_token_id=0,
)  # fmt: skip
ENCODER_DECODER = dict(
    vocab_size=1000, d_model=256, encoder_layers=3, decoder_layers=3, encoder_ffn_dim=1024,
    decoder_ffn_dim=1024, encoder_attention_heads=8, decoder_attention_heads=8, pad_token_id=0,
    bos_token_id=0, eos_token_id=2, decoder_start_token_id=2,
)  # fmt: skip
BUSY_CORES = 0.1
"""Cores of other processes from which on a row says so."""
Made = tuple[nn.Module, tuple[Any, ...]]


class Result(nn.Module):
    """One tensor of a model's result, as a function of positional tensors."""

    def __init__(self, model: nn.Module, inputs: tuple[str, ...], output: str) -> None:
        super().__init__()
        self.model, self.inputs, self.output = model, inputs, output
        self.fixed = {} if "pixel_values" == inputs[-1] else {"use_cache": False}

    def forward(self, *tensors: Any) -> Any:
        given = dict(zip(self.inputs, tensors, strict=True))
        return getattr(self.model(**given, **self.fixed), self.output)


def _ids(rows: int, length: int) -> Any:
    return torch.randint(3, 1000, (rows, length))


def _language(kind: str, **more: Any) -> Made:
    config = getattr(transformers, f"{kind}Config")(**COMMON | more)
    model = getattr(transformers, f"{kind}Model")(config)
    made = Result(model, ("input_ids",), "last_hidden_state")
    if kind == "Bert":
        made.fixed = {}
    return made, (_ids(4, 64),)


def _clip() -> Made:
    text = dict(
        vocab_size=1000, hidden_size=256, intermediate_size=1024, num_hidden_layers=4,
        num_attention_heads=8, max_position_embeddings=32,
    )  # fmt: skip
    vision = text | dict(image_size=64, patch_size=8)
    config = transformers.CLIPConfig(text_config=text, vision_config=vision)
    made = Result(transformers.CLIPModel(config), ("input_ids", "pixel_values"), "logits_per_image")
    return made, (_ids(8, 32), torch.randn(8, 3, 64, 64))


def _t5() -> Made:
    config = transformers.T5Config(
        vocab_size=1000, d_model=256, d_kv=32, d_ff=1024, num_layers=3, num_heads=8
    )
    inputs = ("input_ids", "decoder_input_ids")
    made = Result(transformers.T5Model(config), inputs, "last_hidden_state")
    return made, (_ids(8, 64), _ids(8, 32))


def _bart() -> Made:
    config = transformers.BartConfig(**ENCODER_DECODER, max_position_embeddings=128)
    inputs = ("input_ids", "decoder_input_ids")
    made = Result(transformers.BartModel(config), inputs, "last_hidden_state")
    return made, (_ids(4, 64), _ids(4, 32))


def _whisper() -> Made:
    config = transformers.WhisperConfig(
        **ENCODER_DECODER, num_mel_bins=40, max_source_positions=150, max_target_positions=64
    )
    inputs = ("input_features", "decoder_input_ids")
    made = Result(transformers.WhisperModel(config), inputs, "last_hidden_state")
    return made, (torch.randn(2, 40, 300), _ids(2, 32))


def _vit() -> Made:
    config = transformers.ViTConfig(
        hidden_size=192, intermediate_size=768, num_hidden_layers=4, num_attention_heads=6,
        image_size=64, patch_size=8,
    )  # fmt: skip
    made = Result(transformers.ViTModel(config), ("pixel_values",), "last_hidden_state")
    return made, (torch.randn(8, 3, 64, 64),)


def _mamba() -> Made:
    config = transformers.MambaConfig(
        vocab_size=1000, hidden_size=128, state_size=8, num_hidden_layers=2
    )
    model = transformers.MambaModel(config)
    return Result(model, ("input_ids",), "last_hidden_state"), (_ids(4, 32),)


MODELS: dict[str, Callable[[], Made]] = {
    "CLIP": _clip,
    "T5": _t5,
    "BART": _bart,
    "Mixtral": lambda: _language("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "OLMoE": lambda: _language("Olmoe", num_experts=4, num_experts_per_tok=2),
    "Whisper": _whisper,
    "ViT": _vit,
    "Mamba": _mamba,
    "Llama": lambda: _language("Llama"),
    "BERT": lambda: _language("Bert"),
}
SCHEDULED: dict[str, dict[str, Any]] = {
    "sequential": {"strategy": "sequential"},
    "branches": {"strategy": "branches"},
    "auto": {"strategy": "auto"},
    "branches, compiled": {"strategy": "branches", "compiler": "inductor"},
    "auto, compiled": {"strategy": "auto", "compiler": "auto"},
    "nano-batches": {"strategy": dfx.NanoBatch(2)},
    "nano-batches, compiled": {"strategy": dfx.NanoBatch(2), "compiler": "inductor"},
}
SPLIT = ("ViT",)
"""Models that are measured in two nano-batches, too."""


HALF = "half the batch on one core, torch.compile"
"""What two nano-batches on two cores take at least, were nothing lost beside each other."""


def measured(make: Callable[[], Made], rounds: int, ways: list[str]) -> dict[str, Any]:
    """Samples of every way, and each schedule's ratio to the fastest plain setting of its kind."""
    # All models here are one class to Dynamo, which compiles so many of a class and runs the rest eagerly.
    torch.compiler.reset()
    torch.manual_seed(0)
    model, args = make()
    model.eval()
    cores = torch.get_num_threads()
    with torch.no_grad():
        want = model(*args)
        compiled = torch.compile(model, dynamic=False)
        plain = {"eager": model, "eager, one thread": model, "torch.compile": compiled}
        runs: dict[str, Callable[[], Any]] = {
            name: (lambda fn=fn: fn(*args)) for name, fn in plain.items()
        }
        lanes, differs = {}, {}
        for name in ways:
            fast = dfx.schedule(model, lanes=cores, **SCHEDULED[name])
            got = fast(*args)
            torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)
            differs[name] = float((got - want).abs().max())
            lanes[name] = dfx.explain(fast, *args).splitlines()[0]
            runs[name] = lambda fast=fast: fast(*args)
        torch.testing.assert_close(compiled(*args), want, rtol=2e-3, atol=2e-3)
        contexts = {"eager, one thread": lambda: measure.torch_threads(1)}
        if any("nano" in name for name in ways):
            half = torch.compile(model, dynamic=False, options={"cpp.threads": 1})
            first = [x[: len(x) // 2].clone() for x in args]
            runs[HALF] = lambda: half(*first)
            contexts[HALF] = contexts["eager, one thread"]
            with contexts[HALF]():
                torch.testing.assert_close(
                    half(*first), want[: len(want) // 2], rtol=2e-3, atol=2e-3
                )
        with measure.Contention() as contention:
            samples, calls = measure.paired(
                runs,
                rounds,
                contexts=contexts,
                rest_ms=20.0,
                **measure.STEADY | {"sample_ms": 100.0},
            )
    eager = ["eager", "eager, one thread"]
    return {
        **samples.as_dict(), "calls_per_sample": calls, "plans": lanes, "max_abs": differs,
        "contention": contention.as_dict(),
        "statistics_ms": {k: measure.statistics(v) for k, v in samples.items()},
        "ratio": {
            name: measure.ratio(
                samples, name, [*eager, "torch.compile"] if "compiled" in name else eager
            )
            for name in ways
        },
    }  # fmt: skip


def main() -> int:
    """Measures, prints and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help=f"comma-separated names of {', '.join(MODELS)}")
    parser.add_argument("--ways", help="comma-separated parts of names of schedules")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=records.RESULTS / "transformers.json")
    given = parser.parse_args()
    unknown = set((given.only or "").split(",")) - set(MODELS) - {""}
    if unknown:
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    rows = json.loads(given.out.read_text())["models"] if given.out.exists() else {}
    todo = given.only.split(",") if given.only else [name for name in MODELS if name not in rows]
    ways = [n for n in SCHEDULED if not given.ways or any(w in n for w in given.ways.split(","))]
    table = Table("model", "way", "median ms", "ratio", "95 %")
    for name in todo:
        started, stamp = time.perf_counter(), environment.stamp()
        try:
            here = [way for way in ways if name in SPLIT or "nano" not in way]
            with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
                row = measured(MODELS[name], given.rounds, here)
        except (
            dfx.errors.DynaflowError, RuntimeError, AssertionError, FailOnRecompileLimitHit,
        ) as error:  # fmt: skip
            row = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
            table.add_row(name, row["failed"], "", "", "")
        rows[name] = row | {"environment": stamp, "seconds": time.perf_counter() - started}
        if row.get("contention", {}).get("others_cores", 0.0) > BUSY_CORES:
            table.add_row(
                name, f"[red]others: {row['contention']['others_cores']:.2f} cores", "", "", ""
            )
        for way, of in row.get("statistics_ms", {}).items():
            to = row["ratio"].get(way)
            middle, spread = ("", "") if to is None else (
                f"{to['ratio']:.2f}", f"{to['low']:.2f}-{to['high']:.2f}")  # fmt: skip
            table.add_row(name, way, f"{of['median']:.3g}", middle, spread)
        record = {
            "format": 1, "benchmark": "transformers", "environment": stamp, "rounds": given.rounds,
            "models": rows,
        }  # fmt: skip
        records.save(record, given.out)
    Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
