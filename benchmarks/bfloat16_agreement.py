"""How far bfloat16 answers depend on what shares the batch: the tolerance of "same seed, same tokens".

Logits of the same positions, computed whole and alone, against: in chunks, behind a hit, decoded alone, in a batch, and over a
shared prefix through a cascade. Then answers to prompts and seeds, each alone without a cache and all together with one.

    python benchmarks/bfloat16_agreement.py [--sequences 32] [--tokens 512] [--last 16] [--seeds 4] [--json FILE]
"""

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np
import torch

from prefixmesh import tokens
from prefixmesh.bench.agreement import (
    BFLOAT16_MARGIN,
    WAYS,
    Texts,
    compare,
    logits_of,
    shared_prefix,
    whole,
)
from prefixmesh.config import EngineConfig
from prefixmesh.model_files.source import resolve_model
from prefixmesh.text.tokenizer import load_tokenizer
from prefixmesh.worker.engine import EngineCore
from prefixmesh.worker.engine_builder import build_engine
from prefixmesh.worker.messages import EngineSampling, Submit, TokensOut
from prefixmesh.worker.model.open_model import open_model
from prefixmesh.worker.sampling import margins, sample_on_host

ROOT = Path(__file__).parent.parent
TEXTS = ("README.md", "LICENSE", "docs/cache.md", "docs/models.md", "docs/engine.md", "docs/sampling.md")
SAMPLING = {
    "drawn from all": {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "drawn from few": {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.0},
}
ANSWERS = "drawn from few"
HELD = ("widest_margin", "drawn from all: widest_margin")
"""What the tolerance holds; where a filter ends, another token may be kept at any margin."""

NAMESPACE = b"agreement".ljust(16, b"\0")


def text_ids(model: str, sequences: int, length: int) -> np.ndarray:
    """[sequences, length] ids of the repository's own texts, from as many places."""
    tokenizer = load_tokenizer(resolve_model(model))
    text = "\n".join((ROOT / name).read_text() for name in TEXTS)
    ids = np.array(tokenizer.encode(text, allow_special=False, add_bos=False), dtype=np.int32)
    starts = np.linspace(0, len(ids) - length - 1, sequences).astype(int)
    return np.stack([ids[start : start + length] for start in starts])


def compare_draws(reference: np.ndarray, other: np.ndarray, kind: str, seeds: int) -> dict[str, float]:
    """How many seeded choices differ, and the widest margin (by the reference) at which one does."""
    size = reference.shape[-1]
    one, two = (torch.from_numpy(logits.reshape(-1, size)) for logits in (reference, other))
    indices = list(range(len(one)))
    differing, widest = 0, 0.0
    for seed in range(seeds):
        params = [sampling(kind, seed, 1)] * len(one)
        chosen = [np.array(sample_on_host(logits, params, indices).token_ids) for logits in (one, two)]
        places = np.flatnonzero(chosen[0] != chosen[1]).tolist()
        differing += len(places)
        found = margins(one[places], [params[place] for place in places], places)
        widest = max([widest, *found])
    return {"differing_share": differing / (seeds * len(one)), "widest_margin": widest}


def sampling(kind: str, seed: int, max_tokens: int) -> EngineSampling:
    return EngineSampling(**SAMPLING[kind], seed=seed, max_tokens=max_tokens, stop_token_ids=())


def compare_logits(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """By way, what it changes."""
    files = resolve_model(options.model)
    ids = text_ids(options.model, options.sequences, options.tokens)
    config = EngineConfig(
        model=options.model,
        dtype=options.dtype,
        device="cpu",
        max_total_tokens=ids.size,
        threads=options.threads,
    )
    runner = open_model(files, config).runner
    found = {}

    def tell(name: str, reference: np.ndarray, other: np.ndarray) -> None:
        changed = dataclasses.asdict(compare(reference, other))
        for kind in SAMPLING:
            for key, value in compare_draws(reference, other, kind, options.seeds).items():
                changed[f"{kind}: {key}"] = value
        found[name] = changed
        print(f"{name:>18}  " + "  ".join(f"{key} {value:.4g}" for key, value in changed.items()), flush=True)

    texts = Texts.of(ids, options.last)
    reference = logits_of(runner, texts, whole(texts))
    for name, way in WAYS.items():
        tell(name, reference, logits_of(runner, texts, way(texts)))
    shared = options.tokens * 3 // 4
    ids[:, :shared] = ids[0, :shared]
    own = Texts.of(ids, options.last)
    reference = logits_of(runner, own, whole(own))
    together = Texts.of(ids, options.last, shared)
    tell("through a cascade", reference, logits_of(runner, together, shared_prefix(together)))
    return found


def answers(
    core: EngineCore, prompts: np.ndarray, seeds: int, length: int, *, together: bool
) -> list[list[int]]:
    """The answer to each prompt and seed."""
    got: dict[str, list[int]] = {}

    def finish() -> None:
        while core.has_work:
            for event in core.step(0.0):
                if isinstance(event, TokensOut):
                    got[event.request_id] += event.token_ids

    for number, prompt in enumerate(prompts):
        for seed in range(seeds):
            name = f"{number}/{seed}"
            got[name] = []
            packed = tokens.pack(prompt.tolist())
            core.submit(
                Submit(
                    request_id=name,
                    namespace=NAMESPACE,
                    tokens=packed,
                    sampling=sampling(ANSWERS, seed, length),
                ),
                0.0,
            )
            if not together:
                finish()
    finish()
    return list(got.values())


def compare_answers(options: argparse.Namespace) -> dict[str, float]:
    """How many answers differ between alone without a cache and together with one, and from which token on."""
    prompts = text_ids(options.model, options.prompts, options.prompt_tokens)
    ids = []
    for kind in ("off", "radix"):
        config = EngineConfig(
            model=options.model, dtype=options.dtype, device="cpu", prefix_cache=kind, max_total_tokens=16_384,
            threads=options.threads,
        )  # fmt: skip
        ids.append(
            answers(
                build_engine(config), prompts, options.seeds, options.answer_tokens, together=kind != "off"
            )
        )
    same = [
        next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), options.answer_tokens)
        for one, other in zip(*ids, strict=True)
    ]
    differing = [tokens for tokens in same if tokens < options.answer_tokens]
    return {
        "answers": len(same),
        "answer_tokens": options.answer_tokens,
        "differing_share": len(differing) / len(same),
        "tokens_until_they_differ": float(np.mean(differing)) if differing else 0.0,
        "differing_per_token": len(differing) / (sum(same) + len(differing)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    for flag, default in {
        "--sequences": 32, "--tokens": 512, "--last": 16, "--seeds": 4,
        "--prompts": 8, "--prompt-tokens": 200, "--answer-tokens": 24, "--threads": 0,
    }.items():  # fmt: skip
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {"margin": BFLOAT16_MARGIN, "dtype": options.dtype, "logits": compare_logits(options)}
    found["answers"] = compare_answers(options)
    print(json.dumps(found["answers"], indent=2))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    widest = max(way[key] for way in found["logits"].values() for key in HELD)
    return int(options.dtype == "bfloat16" and widest > BFLOAT16_MARGIN)


if __name__ == "__main__":
    raise SystemExit(main())
