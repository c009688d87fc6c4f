"""The main job on real input: a bi-LSTM on digits, a numerical model with two branches, MiniLM.

Trains a bidirectional LSTM classifier on scikit-learn's digits, plain and scheduled, with equal
losses; schedules its inference and a sort/eigh model, verifies both, times them against plain jit on
the default client and on a client with one thread; embeds sentences with MiniLM in PyTorch, plain and
scheduled; and writes a report and timelines to ``out/``. Everything has the default strategy, which
measures and keeps the original where nothing beats it; what it decided is told in a line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import environment, measure
from models import demo_minilm
from models.cases import lstm, lstm_parameters, top_k_eigh, top_k_eigh_arguments
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import dynaflow_xla as dfx

OUT = Path("out")
WIDTH = 64
ROUNDS = 30
MIN_ACCURACY = 0.95


def logits(parameters: Any, images: jax.Array) -> jax.Array:
    """Rows of an image are time steps: ``images`` [B, 8, 8] to class scores [B, 10]."""
    xs = jnp.swapaxes(images, 0, 1)
    both = [
        lstm(parameters["forward"], xs, reverse=False)[-1],
        lstm(parameters["backward"], xs, reverse=True)[0],
    ]
    return jnp.concatenate(both, axis=-1) @ parameters["head"] + parameters["bias"]


def predict(parameters: Any, images: jax.Array) -> jax.Array:
    """Class of each image, int32 [B]."""
    return jnp.argmax(logits(parameters, images), axis=-1).astype(jnp.int32)


def loss(parameters: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross entropy of a batch."""
    scores = logits(parameters, images)
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


def decision(fast: Any, *args: Any) -> str:
    """What the default strategy decided for these arguments, and why, in one line."""
    lines = dfx.explain(fast, *args).splitlines()
    told = (line for line in lines if line.startswith("auto: "))
    return next(told, "auto: nothing decided").removeprefix("auto: ")


def train(images: Any, labels: Any) -> tuple[Any, dict[str, Any]]:
    """Trains twice, epoch by epoch in turns: with plain JAX, and with the whole step scheduled.

    Returns:
        The parameters of the scheduled run; the losses of both runs and seconds of each step.
    """
    keys = jax.random.split(jax.random.key(0), 3)
    parameters = {
        "forward": lstm_parameters(keys[0], 8, WIDTH),
        "backward": lstm_parameters(keys[1], 8, WIDTH),
        "head": jax.random.normal(keys[2], (2 * WIDTH, 10)) / np.sqrt(2 * WIDTH),
        "bias": jnp.zeros(10),
    }
    optimizer = optax.adam(5e-3)

    def step(parameters: Any, state: Any, x: Any, y: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(parameters, x, y)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(parameters, updates), state, value

    steps = {"plain": jax.jit(step), "scheduled": dfx.schedule(jax.jit(step))}
    states = {name: (parameters, optimizer.init(parameters)) for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    # Decides: the progress display has a thread of its own, beside which nothing is measured.
    steps["scheduled"](*states["scheduled"], images[:64], labels[:64])
    rng = np.random.default_rng(0)
    for _ in track(range(20), description="training the bi-LSTM twice"):
        order = rng.permutation(len(images))
        batches = [order[i : i + 64] for i in range(0, len(order) - 63, 64)]
        # A whole epoch each: in a user's loop no other program's threads are still awake.
        for name, step in steps.items():
            for batch in batches:
                x, y = images[batch], labels[batch]
                t0 = time.perf_counter()
                *states[name], value = step(*states[name], x, y)
                losses[name].append(float(value))
                seconds[name].append(time.perf_counter() - t0)
    found = {
        "losses": losses,
        "seconds": {name: s[1:] for name, s in seconds.items()},
        "decision": decision(steps["scheduled"], *states["scheduled"], x, y),
    }
    return states["scheduled"][0], found


def check_training(found: dict[str, Any], console: Console) -> dict[str, Any]:
    """Compares the two runs; rounding differs, and training amplifies it."""
    plain, scheduled = (np.array(found["losses"][name]) for name in ("plain", "scheduled"))
    medians = {name: float(np.median(s)) * 1e3 for name, s in found["seconds"].items()}
    summary = {
        "steps": len(plain),
        "medians_ms": medians,
        "ratio": medians["scheduled"] / medians["plain"],
        "largest_loss_difference": float(np.abs(plain - scheduled).max()),
        "losses_equal": bool(np.allclose(plain, scheduled, rtol=1e-2, atol=1e-3)),
        **found,
    }
    console.print(
        f"training: {len(plain)} steps, loss {plain[0]:.3f} to {scheduled[-1]:.4f}, largest difference "
        f"between plain and scheduled {summary['largest_loss_difference']:.1e}; a step takes "
        f"{medians['scheduled']:.2f} ms scheduled, {medians['plain']:.2f} ms plain "
        f"(ratio {summary['ratio']:.2f}): {found['decision']}"
    )
    return summary


def study(name: str, fn: Any, args: tuple[Any, ...], *, lapack: bool = False) -> dict[str, Any]:
    """Schedules, verifies and times one function; writes its timelines."""
    plain = jax.jit(fn)
    fast = dfx.schedule(plain)
    fast(*args)  # decides
    report = dfx.verify(fast, *args)
    timeline = dfx.profile(fast, *args)
    timeline.plot(OUT / f"timeline_{name}.png")
    timeline.to_perfetto(OUT / f"timeline_{name}.json")
    runs = {
        "jit": measure.blocking(plain, args),
        "jit_one_thread": measure.one_thread(fn, args),
        "scheduled": measure.blocking(fast, args),
    }
    # LAPACK's threads spin on after a call; see measure.paired.
    rest_ms, sample_ms = (150.0, 20.0) if lapack else (0.0, 2.0)
    samples, _ = measure.paired(runs, ROUNDS, rest_ms=rest_ms, sample_ms=sample_ms)
    # A profile is the fastest of a few runs, so the original beside it is its fastest run too.
    timeline.to_html(OUT / f"timeline_{name}.html", original_ms=float(min(samples["jit"])))
    medians = {key: float(np.median(values)) for key, values in samples.items()}
    return {
        "name": name,
        "medians_ms": medians,
        "ratio": medians["scheduled"] / min(medians["jit"], medians["jit_one_thread"]),
        "max_abs_difference": report.max_abs,
        "overlap_ms": timeline.overlap_ns(0, 1) / 1e6 if timeline.lanes > 1 else 0.0,
        "decision": decision(fast, *args),
        "explain": dfx.explain(fast, *args),
        "timeline": timeline.to_text(),
        "samples_ms": samples,
    }


def main() -> int:
    """Runs the demonstration; 1 if the classifier or a check fails."""
    OUT.mkdir(exist_ok=True)
    console = Console(width=120)
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) / 16.0).astype(np.float32)
    x_train, x_test, y_train, y_test = train_test_split(
        images, labels.astype(np.int32), test_size=0.25, random_state=0, stratify=labels
    )
    parameters, found = train(x_train, y_train)
    training = check_training(found, console)
    if not training["losses_equal"]:
        console.print("[red]the losses of plain and scheduled training must be equal[/red]")
        return 1

    fast = dfx.schedule(jax.jit(predict))
    want, got = jax.jit(predict)(parameters, x_test), fast(parameters, x_test)
    accuracy = float((np.asarray(got) == y_test).mean())
    same = bool((np.asarray(want) == np.asarray(got)).all())
    console.print(
        f"test set: {len(y_test)} images, accuracy {accuracy:.3f}, "
        f"predictions {'equal' if same else 'DIFFERENT'}"
    )
    if accuracy < MIN_ACCURACY or not same:
        console.print(f"[red]accuracy must be >= {MIN_ACCURACY} and the predictions equal[/red]")
        return 1

    studies = [
        study("bilstm", predict, (parameters, jnp.asarray(x_test))),
        study("topk_eigh", top_k_eigh, top_k_eigh_arguments(), lapack=True),
    ]
    minilm = demo_minilm.study(console, OUT)
    if not minilm["ok"]:
        console.print("[red]nearest neighbours must stay the same, and within topics[/red]")
        return 1
    table = Table(title="median milliseconds; ratio against the better baseline")
    for column in ("model", "jit", "jit, 1 thread", "scheduled", "ratio", "overlap", "max diff"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in studies:
        ms = row["medians_ms"]
        table.add_row(
            row["name"], f"{ms['jit']:.2f}", f"{ms['jit_one_thread']:.2f}", f"{ms['scheduled']:.2f}",
            f"{row['ratio']:.2f}", f"{row['overlap_ms']:.2f}", f"{row['max_abs_difference']:.1e}",
        )  # fmt: skip
    console.print(table)
    for row in studies:
        console.print(f"{row['name']}: {row['decision']}", highlight=False, markup=False)
    for row in studies:
        console.print(row["explain"], highlight=False, markup=False)
    made = {
        "environment": environment.stamp(),
        "accuracy": accuracy,
        "training": training,
        "studies": studies,
        "minilm": minilm,
    }
    (OUT / "results.json").write_text(json.dumps(made, indent=1))
    lines = [
        f"# Scheduled training and inference\n\nTest accuracy {accuracy:.3f}; predictions equal: {same}.\n",
        f"Training: {training['steps']} steps, ratio {training['ratio']:.2f} ({training['decision']}), "
        f"medians {training['medians_ms']}, largest difference of a loss "
        f"{training['largest_loss_difference']:.1e}.\n",
    ]
    for row in studies:
        lines.append(
            f"## {row['name']}\n\nratio {row['ratio']:.2f}, medians {row['medians_ms']}\n\n"
            f"{row['decision']}\n"
        )
        lines.append(f"![timeline](timeline_{row['name']}.png)\n")
        lines.append(f"[The same to zoom into, with reasons](timeline_{row['name']}.html)\n")
        lines.append(f"```\n{row['explain']}\n\n{row['timeline']}\n```\n")
    lines.append(
        f"## MiniLM in PyTorch\n\nnearest neighbours of {minilm['sentences']} sentences equal: "
        f"{minilm['neighbours_equal']}, medians {minilm['medians_ms']}; {minilm['decision']}\n\n"
        f"[Timeline](timeline_minilm.html)\n\n```\n{minilm['timeline']}\n```\n"
    )
    (OUT / "report.md").write_text("\n".join(lines))
    console.print("written: out/report.md, out/results.json, out/timeline_*.png and .json")
    console.print(
        "open in a browser: out/timeline_bilstm.html, out/timeline_topk_eigh.html, timeline_minilm.html"
    )
    return 0


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    sys.exit(main())
