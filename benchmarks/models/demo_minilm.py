"""MiniLM with its weights, scheduled in PyTorch: nearest neighbours of real sentences stay the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import dynaflow_xla as dfx
from models import pair_models
from models.sentences import SENTENCES, TOPICS

CALLS = 9


def neighbours(embeddings: Any) -> Any:
    """Index of the sentence most like each one; ``embeddings`` [B, D] have length one."""
    similar = embeddings @ embeddings.T
    return similar.fill_diagonal_(-1.0).argmax(-1)


def _medians_ms(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Medians of calls that take turns, so that a busier moment meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for call in range(CALLS + 1):  # the first is a warm-up
        for name, run in runs.items():
            t0 = time.perf_counter()
            run()
            if call:
                times[name].append((time.perf_counter() - t0) * 1e3)
    return {name: sorted(each)[CALLS // 2] for name, each in times.items()}


def study(console: Console, out: Path) -> dict[str, Any]:
    """Embeds the sentences with the original and the scheduled encoder, and compares.

    Returns:
        What the report says; ``ok`` is whether neighbours agree and are found within the topics.
    """
    encoder = pair_models.Embedder().eval()
    ids, mask = pair_models.tokenize(SENTENCES)
    both = dfx.schedule(encoder, in_axes=0)
    with torch.no_grad():
        want, got = encoder(ids, mask), both(ids, mask)
        report = dfx.verify(both, ids, mask)
        timeline = dfx.profile(both, ids, mask)
        timeline.to_html(out / "timeline_minilm.html")
        told = [x for x in dfx.explain(both, ids, mask).splitlines() if x.startswith("auto: ")]
        decision = told[0].removeprefix("auto: ") if told else "nothing decided"
        ms = _medians_ms({
            "plain": lambda: encoder(ids, mask), "scheduled": lambda: both(ids, mask),
        })  # fmt: skip
    nearest = neighbours(want)
    same = bool(torch.equal(nearest, neighbours(got)))
    each = len(next(iter(TOPICS.values())))
    near = sum(int(i) // each == number // each for number, i in enumerate(nearest))
    console.print(
        f"MiniLM in PyTorch: {len(SENTENCES)} sentences, nearest neighbours "
        f"{'the same' if same else 'DIFFERENT'} as unscheduled, {near} of one topic; largest difference "
        f"{report.max_abs:.1e}; {ms['scheduled']:.0f} ms scheduled, {ms['plain']:.0f} ms plain with "
        f"{torch.get_num_threads()} threads: {decision}"
    )
    for number in range(0, len(SENTENCES), 2 * each):
        console.print(f"  {SENTENCES[number]}\n    -> {SENTENCES[int(nearest[number])]}")
    return {
        "neighbours_equal": same, "within_topic": near, "sentences": len(SENTENCES),
        "max_abs_difference": report.max_abs, "medians_ms": ms,
        "decision": decision, "ok": same and near >= 0.9 * len(SENTENCES), "timeline": timeline.to_text(),
    }  # fmt: skip
