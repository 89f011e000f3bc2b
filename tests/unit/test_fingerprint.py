"""Fingerprints and namespaces: the same bytes in every process, as the golden file says (F43)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import xxhash

from prefixmesh.cache.fingerprint import DEFAULT_BLOCK_SIZE, FINGERPRINT_VERSION, block_fingerprints
from prefixmesh.cache.namespace import derive_namespace
from prefixmesh.ids import Namespace
from prefixmesh.tokens import pack
from tests.support.cache_kit import NS_A, NS_B

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "fingerprints.json"

ANOTHER_PROCESS = """
import json, sys
from prefixmesh.cache.fingerprint import block_fingerprints
from prefixmesh.cache.namespace import derive_namespace
from prefixmesh.tokens import pack
golden = json.load(open(sys.argv[1]))
print(json.dumps({
    "namespaces": [derive_namespace(bytes.fromhex(golden["key"]), **v["fields"]).hex() for v in golden["namespaces"]],
    "fingerprints": [
        [f"{f:016x}" for f in block_fingerprints(bytes.fromhex(v["namespace"]), pack(v["tokens"]), v["block_size"])]
        for v in golden["fingerprints"]
    ],
}))
"""


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(GOLDEN.read_text())
    return loaded


def test_namespaces_are_the_golden_ones(golden: dict[str, Any]) -> None:
    """A change of a digest would make routers and workers of two versions disagree in silence."""
    key = bytes.fromhex(golden["key"])
    for vector in golden["namespaces"]:
        assert derive_namespace(key, **vector["fields"]).hex() == vector["namespace"]


def test_fingerprints_are_the_golden_ones(golden: dict[str, Any]) -> None:
    """Router and worker share these vectors; a change of any needs a new FINGERPRINT_VERSION."""
    assert golden["fingerprint_version"] == FINGERPRINT_VERSION
    for vector in golden["fingerprints"]:
        namespace = bytes.fromhex(vector["namespace"])
        fingerprints = block_fingerprints(namespace, pack(vector["tokens"]), vector["block_size"])
        assert [f"{value:016x}" for value in fingerprints] == vector["fingerprints"]


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_another_process_makes_the_same_bytes(seed: str, golden: dict[str, Any]) -> None:
    """F43: under any PYTHONHASHSEED."""
    done = subprocess.run(
        [sys.executable, "-c", ANOTHER_PROCESS, str(GOLDEN)],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    made = json.loads(done.stdout)
    assert made["namespaces"] == [vector["namespace"] for vector in golden["namespaces"]]
    assert made["fingerprints"] == [vector["fingerprints"] for vector in golden["fingerprints"]]


def test_a_fingerprint_is_the_chain_of_all_before_it() -> None:
    """XXH3-64 over the previous fingerprint (the namespace, at first) and the block's packed tokens; written out here."""
    tokens = list(range(10))
    first = xxhash.xxh3_64_intdigest(NS_A + pack(tokens[:4]))
    second = xxhash.xxh3_64_intdigest(first.to_bytes(8, "little") + pack(tokens[4:8]))
    assert block_fingerprints(NS_A, pack(tokens), 4) == [first, second]


def test_only_whole_blocks_have_names() -> None:
    """One token short of a block is no block."""
    for length, blocks in ((0, 0), (63, 0), (64, 1), (127, 1), (128, 2)):
        assert len(block_fingerprints(NS_A, pack(range(length)))) == blocks
    assert DEFAULT_BLOCK_SIZE == 64


def test_a_change_anywhere_changes_every_name_from_there_on() -> None:
    """And none before it."""
    tokens = list(range(64))
    base = block_fingerprints(NS_A, pack(tokens), 16)
    for changed in (0, 15, 16, 40, 63):
        other = list(tokens)
        other[changed] += 1000
        made = block_fingerprints(NS_A, pack(other), 16)
        assert [a == b for a, b in zip(base, made, strict=True)] == [
            block < changed // 16 for block in range(4)
        ]


def test_equal_tokens_have_other_names_in_another_namespace() -> None:
    """F46: other event fingerprints for every pair of tuples that must not meet."""
    pairs = [
        ({"tenant": "ab", "caller_key": "c"}, {"tenant": "a", "caller_key": "bc"}),
        ({"adapter_digest": "x"}, {"caller_key": "x"}),
        ({"caller_key": "public"}, {}),
    ]
    packed = pack(range(128))
    for one, other in pairs:
        assert set(block_fingerprints(_namespace(one), packed)).isdisjoint(
            block_fingerprints(_namespace(other), packed)
        )
    assert set(block_fingerprints(NS_A, packed)).isdisjoint(block_fingerprints(NS_B, packed))


def _namespace(fields: dict[str, str]) -> Namespace:
    all_fields = {"tenant": "t", "adapter_digest": "", "model_revision": "r", "caller_key": ""} | fields
    return derive_namespace(
        bytes(32),
        tenant=all_fields["tenant"],
        adapter_digest=all_fields["adapter_digest"],
        model_revision=all_fields["model_revision"],
        caller_key=all_fields["caller_key"],
    )
