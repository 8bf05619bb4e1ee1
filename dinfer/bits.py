"""Sets of neurons as bits: neuron ``i`` is bit ``i % 64`` of word ``i // 64``; bits past the last neuron are 0."""

import numpy as np


def pack(members: np.ndarray) -> np.ndarray:
    """Words of boolean ``members`` [..., neurons]: uint64 [..., ceil(neurons / 64)], little-endian."""
    neurons = members.shape[-1]
    padding = [(0, 0)] * (members.ndim - 1) + [(0, -neurons % 64)]
    packed = np.packbits(np.pad(members.astype(bool), padding), axis=-1, bitorder="little")
    return packed.view("<u8")


def unpack(words: np.ndarray, neurons: int) -> np.ndarray:
    """Boolean members [..., neurons] of uint64 ``words`` [..., words]."""
    as_bytes = np.ascontiguousarray(words).view(np.uint8)
    return np.unpackbits(as_bytes, axis=-1, count=neurons, bitorder="little").astype(bool)


def count(words: np.ndarray) -> np.ndarray:
    """Members of each set: int64 [...] of uint64 ``words`` [..., words]."""
    return np.bitwise_count(words).sum(axis=-1, dtype=np.int64)


def ids(words: np.ndarray, neurons: int) -> np.ndarray:
    """Sorted neuron ids of one set: int32 [members] of uint64 ``words`` [words]."""
    return np.flatnonzero(unpack(words, neurons)).astype(np.int32)


def from_ids(members: np.ndarray, neurons: int) -> np.ndarray:
    """Words [ceil(neurons / 64)] of one set given by neuron ids."""
    flags = np.zeros(neurons, bool)
    flags[members] = True
    return pack(flags)
