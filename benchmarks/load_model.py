"""Loading a model: seconds, and peak memory against the weights in their final type.

Each load runs in a fresh process, so that its peak is its own.

    python benchmarks/load_model.py [MODEL] [--repeats 3] [--json FILE]
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

DTYPES = ("bfloat16", "float32")


def load_once(model: str, dtype: str) -> None:
    """Load and print seconds, peak bytes above what torch alone takes, and bytes of the model's parameters in ``dtype``."""
    import torch

    from prefixmesh.model_files.model_config import read_model_config
    from prefixmesh.model_files.source import resolve_model
    from prefixmesh.worker.model.loader import load_weights

    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.perf_counter()
    files = resolve_model(model)
    config = read_model_config(files)
    weights = load_weights(files, config, kind, torch.device("cpu"))
    seconds = time.perf_counter() - begun
    peak_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    layers = sum(layer.num_bytes for layer in weights.layers)
    head = 0 if config.tie_word_embeddings else weights.lm_head.num_bytes
    parameters = weights.embedding.nbytes + layers + weights.final_norm.nbytes + head
    print(json.dumps([seconds, peak_bytes, parameters]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--once", choices=DTYPES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        load_once(options.model, options.once)
        return
    figures = {}
    for dtype in DTYPES:
        command = [sys.executable, __file__, options.model, "--once", dtype]
        runs = [
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            for _ in range(options.repeats)
        ]
        seconds, peak, size = (statistics.median(column) for column in zip(*runs, strict=True))
        figures[dtype] = {"seconds": seconds, "peak_over_weights": peak / size, "weights_bytes": size}
        print(
            f"{dtype:>9}  {seconds:6.2f} s   peak {peak / 2**20:6.0f} MiB = {peak / size:.2f} x weights of {size / 2**20:.0f} MiB"
        )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
