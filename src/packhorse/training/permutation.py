"""Index -> index: a keyed pseudo-random bijection on [0, size), without a table.

A Feistel network shuffles the next power of two; whoever lands outside `size` is sent through again until he is inside
(cycle walking: at most two turns on average, more for sizes below 32), so that [0, size) is left to itself. In small:

    index       0  1  2  3  4  5
    network     3  6  0  7  5  1          6 -> 4 and 7 -> 2
    permuted    3  4  0  2  5  1

Promises: O(1) memory; the same numbers on every platform and numpy version, for ever, because training runs go on in
this order after years. It is uint64 arithmetic that wraps around and nothing else; a golden test holds it.
"""

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 8
_LEAST_BITS = np.uint64(6)
_ROUND_CONSTANTS = np.arange(1, _ROUNDS + 1, dtype=np.uint64) * _GOLDEN
_POWERS_OF_TWO = np.uint64(1) << np.arange(64, dtype=np.uint64)


def permute(index: np.ndarray, size: np.ndarray | int, key: np.ndarray | int) -> np.ndarray:
    """Where the bijection of `key` on [0, size) sends each index; uint64, one-dimensional.

    `size` and `key` may be arrays: then every element has a bijection of its own. Each index must be below its size.
    """
    return _walk(index, size, key, range(_ROUNDS))


def unpermute(index: np.ndarray, size: np.ndarray | int, key: np.ndarray | int) -> np.ndarray:
    """The inverse: `unpermute(permute(i, size, key), size, key) == i`."""
    return _walk(index, size, key, range(_ROUNDS - 1, -1, -1))


def derive_key(*words: int) -> int:
    """One 64-bit key out of several integers; their order counts."""
    key = np.zeros(1, np.uint64)
    for word in words:
        key = _mix((key ^ np.uint64(word % 2**64)) + _GOLDEN)
    return int(key[0])


def derive_keys(key: int, words: np.ndarray) -> np.ndarray:
    """One 64-bit key for every element of `words`."""
    return _mix(np.uint64(key) + words.astype(np.uint64) * _GOLDEN)


def _walk(index, size, key, rounds: range) -> np.ndarray:
    index, size, key = np.broadcast_arrays(
        *(np.atleast_1d(np.asarray(x).astype(np.uint64)) for x in (index, size, key))
    )
    if index.size and (index >= size).any():
        raise IndexError(f"index {index.max()} has no place in a permutation of {size.max()}")
    key = _mix(key + size * _GOLDEN)  # else 999 and 1,000 would be permuted nearly alike
    # The bit length of size - 1, split into a low and a high half; at least 3 + 3 bits, because halves of one or two
    # bits have so few functions that some permutations of five numbers would come up twice as often as others.
    bits = np.searchsorted(_POWERS_OF_TWO, size - np.uint64(1), side="right").astype(np.uint64)
    bits = np.maximum(bits, _LEAST_BITS * (size > 1))
    halves = np.stack([bits - bits // np.uint64(2), bits // np.uint64(2)])
    out = _feistel(index, halves, key, rounds)
    outside = np.flatnonzero(out >= size)
    while outside.size:
        out[outside] = _feistel(out[outside], halves[:, outside], key[outside], rounds)
        outside = outside[out[outside] >= size[outside]]
    return out


def _feistel(index, halves, key, rounds: range) -> np.ndarray:
    # Each round changes one half by a hash of the other, so the same rounds backwards undo it, whatever the hash is.
    low_mask, high_mask = (np.uint64(1) << halves) - np.uint64(1)
    low, high = index & low_mask, index >> halves[0]
    for number in rounds:
        if number % 2:
            low ^= _mix(high + (key + _ROUND_CONSTANTS[number])) & low_mask
        else:
            high ^= _mix(low + (key + _ROUND_CONSTANTS[number])) & high_mask
    return (high << halves[0]) | low


def _mix(x: np.ndarray) -> np.ndarray:
    """Hash 64 bits: splitmix64's finaliser (https://prng.di.unimi.it/splitmix64.c).

    Always on arrays: numpy warns when a scalar wraps around.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
