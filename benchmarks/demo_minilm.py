"""MiniLM with its weights, scheduled in PyTorch: nearest neighbours of real sentences stay the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pair_models
import torch
from rich.console import Console
from sentences import SENTENCES, TOPICS

import dynaflow_xla as dfx

CALLS = 9


def neighbours(embeddings: Any) -> Any:
    """Index of the sentence most like each one; ``embeddings`` [B, D] have length one."""
    similar = embeddings @ embeddings.T
    return similar.fill_diagonal_(-1.0).argmax(-1)


def _median_ms(run: Callable[[], Any]) -> float:
    run()
    times = []
    for _ in range(CALLS):
        t0 = time.perf_counter()
        run()
        times.append((time.perf_counter() - t0) * 1e3)
    return sorted(times)[CALLS // 2]


def study(console: Console, out: Path) -> dict[str, Any]:
    """Embeds the sentences with the original and the encoder in two nano-batches, and compares.

    Returns:
        What the report says; ``ok`` is whether neighbours agree and are found within the topics.
    """
    encoder = pair_models.Embedder().eval()
    ids, mask = pair_models.tokenize(SENTENCES)
    both = dfx.schedule(encoder, strategy=dfx.NanoBatch(2), in_axes=0)
    with torch.no_grad():
        want, got = encoder(ids, mask), both(ids, mask)
        report = dfx.verify(both, ids, mask)
        timeline = dfx.profile(both, ids, mask)
        timeline.to_html(out / "timeline_minilm.html")
        ms = {
            "plain": _median_ms(lambda: encoder(ids, mask)),
            "scheduled": _median_ms(lambda: both(ids, mask)),
        }
    nearest = neighbours(want)
    same = bool(torch.equal(nearest, neighbours(got)))
    each = len(next(iter(TOPICS.values())))
    near = sum(int(i) // each == number // each for number, i in enumerate(nearest))
    console.print(
        f"MiniLM in PyTorch: {len(SENTENCES)} sentences, nearest neighbours "
        f"{'the same' if same else 'DIFFERENT'} as unscheduled, {near} of one topic; largest difference "
        f"{report.max_abs:.1e}; {ms['scheduled']:.0f} ms scheduled, {ms['plain']:.0f} ms plain with "
        f"{torch.get_num_threads()} threads"
    )
    for number in range(0, len(SENTENCES), 2 * each):
        console.print(f"  {SENTENCES[number]}\n    -> {SENTENCES[int(nearest[number])]}")
    return {
        "neighbours_equal": same, "within_topic": near, "sentences": len(SENTENCES),
        "max_abs_difference": report.max_abs, "medians_ms": ms,
        "ok": same and near >= 0.9 * len(SENTENCES), "timeline": timeline.to_text(),
    }  # fmt: skip
