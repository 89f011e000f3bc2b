"""Fingerprints and namespaces: the same bytes in every process, as the golden file says (F43)."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import xxhash

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.fingerprint import DEFAULT_BLOCK_SIZE, FINGERPRINT_VERSION, block_fingerprints
from prefixmesh.cache.namespace import derive_namespace, public_namespace, tail_namespace
from prefixmesh.cache.public import key_fingerprints, public_boundary
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.ids import Fingerprint, Namespace
from prefixmesh.tokens import pack
from tests.support.cache_kit import NS_A, NS_B

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "fingerprints.json"

ANOTHER_PROCESS = """
import json, sys
from tests.unit.test_fingerprint import made_from
print(json.dumps(made_from(json.load(open(sys.argv[1])))))
"""


def made_from(golden: dict[str, Any]) -> dict[str, Any]:
    """Every value of the golden file that is computed, computed here from those that are given."""
    key = bytes.fromhex(golden["key"])
    secret = FleetSecret(bytes.fromhex(golden["fleet_secret"]))
    return {
        "namespaces": [derive_namespace(key, **vector["fields"]).hex() for vector in golden["namespaces"]],
        "fingerprints": [
            _hexadecimal(
                block_fingerprints(_bytes(vector, "namespace"), pack(vector["tokens"]), vector["block_size"])
            )
            for vector in golden["fingerprints"]
        ],
        "fleet_namespace_key": secret.namespace_key().hex(),
        "fleet_namespaces": [
            derive_namespace(
                secret.namespace_key(),
                tenant=vector["tenant"],
                adapter_digest="",
                model_revision=vector["model_revision"],
                caller_key=vector["caller_key"],
                isolation=vector["isolation"],
            ).hex()
            for vector in golden["fleet_namespaces"]
        ],
        "public_namespaces": [
            public_namespace(key, **vector["fields"]).hex() for vector in golden["public_namespaces"]
        ],
        "tail_namespaces": [
            tail_namespace(_bytes(vector, "namespace"), Fingerprint(int(vector["boundary"], 16))).hex()
            for vector in golden["tail_namespaces"]
        ],
        "public_prefixes": [_public_prefix(vector) for vector in golden["public_prefixes"]],
    }


def expected_of(golden: dict[str, Any]) -> dict[str, Any]:
    """What ``made_from`` must make."""
    public = ("boundary_tokens", "boundary", "tail", "fingerprints")
    return {
        "namespaces": [vector["namespace"] for vector in golden["namespaces"]],
        "fingerprints": [vector["fingerprints"] for vector in golden["fingerprints"]],
        "fleet_namespace_key": golden["fleet_namespace_key"],
        "fleet_namespaces": [vector["namespace"] for vector in golden["fleet_namespaces"]],
        "public_namespaces": [vector["namespace"] for vector in golden["public_namespaces"]],
        "tail_namespaces": [vector["tail"] for vector in golden["tail_namespaces"]],
        "public_prefixes": [{name: vector[name] for name in public} for vector in golden["public_prefixes"]],
    }


def _public_prefix(vector: dict[str, Any]) -> dict[str, Any]:
    tokens, block_size = pack(vector["tokens"]), vector["block_size"]
    prefix = public_boundary(
        _bytes(vector, "public_namespace"),
        pack(vector["tokens"][: vector["pinned_tokens"]]),
        page_size=vector["page_size"],
        block_size=block_size,
    )
    assert prefix is not None
    key = prefix.key(_bytes(vector, "namespace"), tokens)
    return {
        "boundary_tokens": prefix.boundary_tokens,
        "boundary": f"{prefix.fingerprint:016x}",
        "tail": key.tail.hex(),
        "fingerprints": _hexadecimal(key_fingerprints(key, block_size)),
    }


def _bytes(vector: dict[str, Any], name: str) -> Namespace:
    return Namespace(bytes.fromhex(vector[name]))


def _hexadecimal(fingerprints: list[Fingerprint]) -> list[str]:
    return [f"{value:016x}" for value in fingerprints]


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(GOLDEN.read_text())
    return loaded


def test_what_is_made_is_what_the_golden_file_says(golden: dict[str, Any]) -> None:
    """Router and worker share these vectors. A change of any would make two versions disagree in silence, and needs a new
    FINGERPRINT_VERSION."""
    assert golden["fingerprint_version"] == FINGERPRINT_VERSION
    made, expected = made_from(golden), expected_of(golden)
    for name, values in expected.items():
        assert made[name] == values, name
        assert values, name


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
    assert json.loads(done.stdout) == expected_of(golden)


def test_a_fingerprint_is_the_chain_of_all_before_it() -> None:
    """XXH3-64 over the previous fingerprint (the namespace, at first) and the block's packed tokens; written out here."""
    tokens = list(range(10))
    first = xxhash.xxh3_64_intdigest(NS_A + pack(tokens[:4]))
    second = xxhash.xxh3_64_intdigest(first.to_bytes(8, "little") + pack(tokens[4:8]))
    assert block_fingerprints(NS_A, pack(tokens), 4) == [first, second]


def test_a_tail_begins_its_own_chain_from_its_own_namespace() -> None:
    """Written out: the public blocks' chain, a personalised BLAKE2b over namespace and boundary, and the chain from there."""
    tokens = list(range(14))
    public = block_fingerprints(NS_B, pack(tokens[:8]), 4)
    digest = hashlib.blake2b(digest_size=16, person=b"prefixmesh/tail")
    digest.update(NS_A + public[-1].to_bytes(8, "little"))
    tail = [xxhash.xxh3_64_intdigest(digest.digest() + pack(tokens[8:12]))]
    key = RadixKey(NS_B, pack(tokens), 8, tail_namespace(NS_A, public[-1]))
    assert key.tail == digest.digest()
    assert key_fingerprints(key, 4) == public + tail


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
