"""``make bench``: all CPU cases, functions of models, and the pairs of models in JAX and PyTorch."""

from runner import main

if __name__ == "__main__":
    raise SystemExit(main())
