"""Compares and sends a state: digests, and bytes from the source to the ranks that lack them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dad._lib import _core
from dad.errors import DadInternalError

_CHUNK_BYTES = 64 << 20  # of one message
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)


def digest(tree: Any, as_array: Callable[[Any], np.ndarray | None] = lambda leaf: None) -> str:
    """The digest of nested dicts, lists and tuples of arrays, numbers and strings; the same for the same
    bits. For any other object its class counts, because Python does not promise that equal objects have equal
    bytes.

    as_array: the memory of a tensor of a framework; None for anything else.
    """
    found = hashlib.blake2b(digest_size=16)

    def visit(node: Any) -> None:
        if isinstance(node, Mapping):
            found.update(b"{%d" % len(node))
            for key, value in sorted(node.items(), key=lambda item: repr(item[0])):
                found.update(repr(key).encode() + b":")
                visit(value)
        elif isinstance(node, list | tuple):
            found.update(b"[%d" % len(node))
            for value in node:
                visit(value)
        elif isinstance(node, set | frozenset):
            visit(sorted(map(repr, node)))
        elif isinstance(node, _PLAIN):
            found.update(repr(node).encode() + b",")
        else:
            array = node if isinstance(node, np.ndarray) else as_array(node)
            if array is None or array.dtype.hasobject:
                found.update(f"<{type(node).__module__}.{type(node).__qualname__}>".encode())
            else:
                memory = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                value = _core.digest(memory) if memory.size else 0
                found.update(f"{array.dtype.str}{array.shape}{value:x}".encode())

    visit(tree)
    return found.hexdigest()


def send(source: int, rank: int, parts: Sequence[bytes]) -> bytes:
    """Called on all ranks: the source has bytes for each rank. Returns what it sent to this one. Raises
    DadInternalError if the bytes differ from what was sent."""
    sums = [hashlib.blake2b(part, digest_size=16).digest() for part in parts]
    heads = [len(part).to_bytes(8, "little") + sums[i] for i, part in enumerate(parts)]
    size = _core.size()
    longest = max(map(len, parts), default=0)
    heads = [longest.to_bytes(8, "little") + head for head in heads]
    head = _core.send_bytes("elastic.head", heads if rank == source else [b""] * size, 0)[source]
    longest, length = (int.from_bytes(head[i : i + 8], "little") for i in (0, 8))
    received = bytearray()
    for begin in range(0, longest, _CHUNK_BYTES):
        chunks = [part[begin : begin + _CHUNK_BYTES] for part in parts] if rank == source else [b""] * size
        received += _core.send_bytes("elastic.state", chunks, 0)[source]
    data = bytes(received)
    if len(data) != length or hashlib.blake2b(data, digest_size=16).digest() != head[16:]:
        raise DadInternalError(f"rank {rank}: the state that rank {source} has sent was changed on its way")
    return data


def sum_over_ranks(vector: np.ndarray, rank: int, size: int) -> np.ndarray:
    """Called on all ranks: the sum of their vectors, in rank order, with the same bits everywhere."""
    if size == 1:
        return vector
    pieces = np.array_split(vector, size)
    received = _core.send_bytes("elastic.pieces", [piece.tobytes() for piece in pieces], 0)
    total = np.zeros_like(pieces[rank])
    for piece in received:
        total += np.frombuffer(piece, vector.dtype)
    gathered = _core.gather_bytes("elastic.sums", total.tobytes(), 0)
    return np.concatenate([np.frombuffer(piece, vector.dtype) for piece in gathered])
