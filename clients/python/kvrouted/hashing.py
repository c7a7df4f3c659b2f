"""Block hashes of tokens, bit for bit as the daemon computes them. Needs the package `xxhash` (`kvrouted[hash]`).

A prompt sent as local hashes costs 8 bytes a block instead of 4 a token, and the daemon is spared the hashing.
Which scheme a space has, the daemon says in its hello: `Client.hello().spaces`.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Sequence

from .errors import InvalidRequest, KvroutedError
from .messages import Scheme, Tokens, Window

#: The seed of a prompt with neither LoRA nor salt, and of every sequence hash.
SEED_BASE = 1337
_U64 = 2**64 - 1
_TOKEN_BYTES = 4


def _xxh3() -> Callable[..., int]:
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError as error:
        raise KvroutedError("hashing needs the package xxhash: pip install 'kvrouted[hash]'") from error
    digest: Callable[..., int] = xxh3_64_intdigest
    return digest


def token_bytes(tokens: Tokens) -> bytes:
    """Token ids as little-endian u32."""
    if isinstance(tokens, (bytes, bytearray, memoryview)):
        packed = bytes(tokens)
        if len(packed) % _TOKEN_BYTES:
            raise InvalidRequest(f"{len(packed)} bytes of tokens: a token has {_TOKEN_BYTES}")
        return packed
    try:
        # "I" is 4 bytes wherever Python runs on Unix.
        packed_array = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise InvalidRequest(f"tokens are integers of 0 to 2^32-1: {error}") from error
    if sys.byteorder == "big":
        packed_array.byteswap()
    return packed_array.tobytes()


def seed(lora: str | None = None, salt: str | None = None) -> int:
    """The seed of prompts under a LoRA adapter and a cache salt. An empty name is none."""
    xxh3 = _xxh3()
    value = SEED_BASE
    if lora:
        value += xxh3(lora.encode(), 0)
    if salt:
        value += xxh3(salt.encode(), 1)
    return value & _U64


def block_count(token_count: int, scheme: Scheme) -> int:
    """The number of whole blocks in a number of tokens. A bigram block needs the token after its last."""
    if scheme.block_size == 0:
        return 0
    return max(token_count - (scheme.window is Window.BIGRAM), 0) // scheme.block_size


def local_hashes(
    tokens: Tokens,
    scheme: Scheme,
    *,
    lora: str | None = None,
    salt: str | None = None,
    media: Sequence[tuple[int, int]] = (),
) -> list[int]:
    """The local hash of every whole block. Tokens that do not fill a block are left out.

    `media` are (block index, object hash) in any order.
    """
    xxh3 = _xxh3()
    packed = memoryview(token_bytes(tokens))
    with_seed = seed(lora, salt)
    stride = scheme.block_size * _TOKEN_BYTES
    window = stride + (_TOKEN_BYTES if scheme.window is Window.BIGRAM else 0)
    blocks = block_count(len(packed) // _TOKEN_BYTES, scheme)
    if not media:
        return [xxh3(packed[at : at + window], with_seed) for at in range(0, blocks * stride, stride or 1)]
    objects: dict[int, list[int]] = {}
    for block, hash_of in media:
        objects.setdefault(block, []).append(hash_of)
    hashes = []
    for block in range(blocks):
        found = sorted(objects.get(block, ()))
        tail = struct.pack(f"<{len(found)}Q", *found)
        hashes.append(xxh3(bytes(packed[block * stride : block * stride + window]) + tail, with_seed))
    return hashes


def sequence_hashes(locals_: Sequence[int]) -> list[int]:
    """The chain over local hashes: each block's name in the context of all before it."""
    xxh3 = _xxh3()
    chain = list(locals_[:1])
    for local in locals_[1:]:
        chain.append(xxh3(struct.pack("<QQ", chain[-1], local), SEED_BASE))
    return chain
