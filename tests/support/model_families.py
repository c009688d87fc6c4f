"""Small models of many families of transformers, with random weights, each with the arguments of a call.

``python tests/support/model_families.py`` prints what ``Auto`` does with each, as a table.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

import dynaflow_xla as dfx
from dynaflow_xla.tuning import autotune, budget

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, **TOKENS,
}  # fmt: skip
GROUPED = {**TEXT, "num_key_value_heads": 2}
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 16, "patch_size": 4, "num_channels": 3,
}  # fmt: skip
STAGES = {"image_size": 32, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}


def _ids(batch: int = 4, steps: int = 9) -> torch.Tensor:
    return torch.randint(3, 64, (batch, steps))


def _images(size: int = 16) -> dict[str, Any]:
    return {"pixel_values": torch.randn(4, 3, size, size)}


def _text() -> dict[str, Any]:
    return {"input_ids": _ids()}


def _both() -> dict[str, Any]:
    return {"input_ids": _ids(), "decoder_input_ids": _ids(4, 5)}


def _masked() -> dict[str, Any]:
    return {"input_ids": _ids(), "attention_mask": torch.ones(4, 9, dtype=torch.long)}


def _pairs() -> dict[str, Any]:
    return {**_masked(), **_images()}


def _waves() -> dict[str, Any]:
    return {"input_values": torch.randn(4, 400)}


_WAVES = {
    **TEXT, "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "do_stable_layer_norm": False,
}  # fmt: skip
_SEQ2SEQ = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "max_position_embeddings": 64, "decoder_start_token_id": 1, **TOKENS,
}  # fmt: skip
_TWO = {
    "text_config": TEXT, "vision_config": VISION, "projection_dim": 16
}  # fmt: skip

# name -> class of the model, settings of its configuration, arguments
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any], Callable[[], dict[str, Any]]]] = {
    "ALBERT": ("AlbertModel", {**TEXT, "embedding_size": 16}, _text),
    "BART": ("BartModel", _SEQ2SEQ, _both),
    "BERT": ("BertForMaskedLM", TEXT, _masked),
    "BLOOM": (
        "BloomForCausalLM",
        {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        _text,
    ),
    "CLIP": ("CLIPModel", _TWO, _pairs),
    "ConvNeXt": ("ConvNextModel", {**STAGES, "patch_size": 4}, lambda: _images(32)),
    "DeBERTa-v2": ("DebertaV2Model", TEXT, _masked),
    "DINOv2": ("Dinov2Model", VISION, _images),
    "DistilBERT": (
        "DistilBertModel",
        {
            "vocab_size": 64,
            "dim": 32,
            "hidden_dim": 48,
            "n_layers": 2,
            "n_heads": 4,
            "pad_token_id": 0,
        },
        _masked,
    ),
    "ELECTRA": ("ElectraModel", {**TEXT, "embedding_size": 16}, _masked),
    "Falcon": ("FalconForCausalLM", TEXT, _text),
    "Gemma 2": ("Gemma2ForCausalLM", {**GROUPED, "head_dim": 8, "sliding_window": 8}, _text),
    "GPT-2": (
        "GPT2LMHeadModel",
        {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, **TOKENS},
        _text,
    ),
    "GPT-NeoX": ("GPTNeoXForCausalLM", TEXT, _text),
    "Hubert": ("HubertModel", _WAVES, _waves),
    "Llama": ("LlamaForCausalLM", GROUPED, _text),
    "Mamba": (
        "MambaForCausalLM",
        {"vocab_size": 64, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, **TOKENS},
        _text,
    ),
    "Mamba-2": (
        "Mamba2ForCausalLM",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "state_size": 8,
            "num_hidden_layers": 2,
            "head_dim": 8,
            "num_heads": 8,
            "n_groups": 2,
            "chunk_size": 4,
            **TOKENS,
        },
        _text,
    ),
    "Marian": ("MarianModel", _SEQ2SEQ, _both),
    "Mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 8}, _text),
    "Mixtral": (
        "MixtralForCausalLM",
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
        _text,
    ),
    "MobileNetV2": (
        "MobileNetV2Model",
        {"image_size": 32, "depth_multiplier": 0.35},
        lambda: _images(32),
    ),
    "MPNet": ("MPNetModel", TEXT, _masked),
    "OLMo 2": ("Olmo2ForCausalLM", GROUPED, _text),
    "OLMoE": ("OlmoeForCausalLM", {**GROUPED, **EXPERTS}, _text),
    "OPT": (
        "OPTForCausalLM",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "word_embed_proj_dim": 32,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            **TOKENS,
        },
        _text,
    ),
    "Phi-3": ("Phi3ForCausalLM", GROUPED, _text),
    "Qwen2": ("Qwen2ForCausalLM", GROUPED, _text),
    "Qwen3-MoE": (
        "Qwen3MoeForCausalLM",
        {**GROUPED, **EXPERTS, "moe_intermediate_size": 16, "head_dim": 8},
        _text,
    ),
    "ResNet": (
        "ResNetModel",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8, "layer_type": "basic"},
        lambda: _images(32),
    ),
    "RoBERTa": ("RobertaModel", {**TEXT, "pad_token_id": 0}, _masked),
    "SegFormer": (
        "SegformerModel",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
        },
        lambda: _images(32),
    ),
    "SigLIP": ("SiglipModel", {"text_config": TEXT, "vision_config": VISION}, _pairs),
    "Swin": (
        "SwinModel",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 4,
        },
        _images,
    ),
    "T5": (
        "T5Model",
        {
            "vocab_size": 64,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            **TOKENS,
        },
        _both,
    ),
    "ViT": ("ViTModel", VISION, _images),
    "VideoMAE": (
        "VideoMAEModel",
        {**VISION, "num_frames": 4, "tubelet_size": 2},
        lambda: {"pixel_values": torch.randn(2, 4, 3, 16, 16)},
    ),
    "Wav2Vec2": ("Wav2Vec2Model", _WAVES, _waves),
    "Whisper": (
        "WhisperModel",
        {**_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 20},
        lambda: {"input_features": torch.randn(4, 8, 40), "decoder_input_ids": _ids(4, 5)},
    ),
    "XLM-R": ("XLMRobertaModel", TEXT, _masked),
}


def model(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model of a family, in evaluation mode, and the keyword arguments of a call."""
    import transformers

    cls_name, settings, arguments = FAMILIES[name]
    cls = getattr(transformers, cls_name)
    made = cls(cls.config_class(**settings)).eval()
    if hasattr(made, "set_experts_implementation"):
        made.set_experts_implementation("batched_mm")
    return made, arguments()


class Few(dfx.Auto):
    """With one candidate of each kind."""

    def candidates(self, lanes: int, *, batched: bool = False) -> list[dfx.Strategy]:
        """See ``Auto``."""
        return [dfx.Branches(lanes=lanes), *([dfx.NanoBatch(2)] if batched else [])]


def decided(name: str) -> Any:
    """What ``Auto`` decides for a family without gradients, where every candidate is called once.

    How fast the machine is makes no difference: no time passes on the budget's clock. The scheduled
    model is checked against the original.
    """

    def once(runs: Mapping[str, Callable[[], None]], **_: Any) -> autotune.Medians:
        for run in runs.values():
            run()
        return autotune.Medians({name: [1.0 if name == "original" else 0.5] for name in runs})

    made, arguments = model(name)
    fast: Any = dfx.schedule(made, Few(budget_s=60.0, min_cost_ns=0.0), lanes=2)
    measure, autotune.measure = autotune.measure, once  # type: ignore[assignment]
    clock, budget.clock = budget.clock, lambda: 0.0
    try:
        with torch.no_grad():
            want, got = made(**arguments), fast(**arguments)
            choice = fast._dfx_core.decision((), arguments)
    finally:
        autotune.measure, budget.clock = measure, clock
    for w, g in zip(pytree.tree_leaves(want), pytree.tree_leaves(got), strict=True):
        if isinstance(w, torch.Tensor):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)
    return choice


def _why(choice: Any) -> str:
    """Why candidates are not measured, in short."""
    if not choice.medians_ms and not choice.left_out:
        return str(choice.reason)
    reasons: dict[str, list[str]] = {}
    for candidate, reason in choice.left_out.items():
        short = re.sub(r"^'\w+' cannot be split into nano-batches \(.*?\): ", "", reason)
        short = re.sub(r" at /\S+/(\w+\.py:\d+).*", r" at \1 mixes rows", short)
        reasons.setdefault(short, []).append(candidate)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())


def main() -> None:
    """Prints the table of docs/torch.md."""
    import transformers

    measured = 0
    rows = []
    for name in FAMILIES:
        torch.manual_seed(0)
        try:
            choice = decided(name)
            tried = ", ".join(c for c in choice.medians_ms if c != "original")
            why = _why(choice)
        except Exception as error:
            tried, why = "", f"{type(error).__name__}: {str(error).splitlines()[0]}"
        measured += bool(tried)
        rows.append(f"| {name} | `{FAMILIES[name][0]}` | {tried or 'no'} | {why} |")
        print(rows[-1], file=sys.stderr, flush=True)
        torch.compiler.reset()
    print(
        f"transformers {transformers.__version__}, torch {torch.__version__}: Auto measures {measured} of"
    )
    print(f"{len(FAMILIES)} families.\n")
    print(
        "| family | model | measured beside the original | not measured, and why |\n|---|---|---|---|"
    )
    print("\n".join(rows))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DYNAFLOW_XLA_CACHE_DIR"] = folder  # no decision of earlier runs
        warnings.simplefilter("ignore")
        main()
