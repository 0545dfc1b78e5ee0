import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.training.permutation import derive_key, derive_keys, permute, unpermute

KEYS = st.integers(0, 2**64 - 1)
AROUND_POWERS = sorted({2**k + d for k in range(12) for d in (-1, 0, 1)} - {0})


@pytest.mark.parametrize("size", AROUND_POWERS)
def test_a_permutation_hits_every_number_once_around_powers_of_two(size):
    for key in (0, 1, 2**64 - 1):
        np.testing.assert_array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


@given(size=st.integers(1, 5000), key=KEYS)
def test_a_permutation_hits_every_number_once(size, key):
    assert len(np.unique(permute(np.arange(size), size, key))) == size
    assert permute(np.arange(size), size, key).max() == size - 1


@given(size=st.integers(1, 2**40), key=KEYS, data=st.data())
def test_unpermute_undoes_permute(size, key, data):
    index = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=50)), np.uint64)
    there = permute(index, size, key)
    assert there.max() < size
    np.testing.assert_array_equal(unpermute(there, size, key), index)


def test_every_element_may_have_its_own_size_and_key():
    sizes, keys = np.array([1, 2, 3, 1000, 2**40, 1001]), derive_keys(5, np.arange(6))
    alone = [permute(size - 1, size, key)[0] for size, key in zip(sizes, keys, strict=True)]
    np.testing.assert_array_equal(permute(sizes - 1, sizes, keys), alone)


def permute_slowly(index: int, size: int, key: int) -> int:
    """The same permutation in Python's integers, one at a time, as the obvious reading of the module's header."""

    def mix(x):
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    bits = max(6, (size - 1).bit_length()) if size > 1 else 0
    low_bits, high_bits = bits - bits // 2, bits // 2
    key = mix((key + size * 0x9E3779B97F4A7C15) % 2**64)
    while True:
        low, high = index % 2**low_bits, index >> low_bits
        for number in range(8):
            round_key = key + (number + 1) * 0x9E3779B97F4A7C15
            if number % 2:
                low ^= mix((high + round_key) % 2**64) % 2**low_bits
            else:
                high ^= mix((low + round_key) % 2**64) % 2**high_bits
        index = (high << low_bits) | low
        if index < size:
            return index


@given(size=st.integers(1, 2**40), key=KEYS, data=st.data())
def test_numpy_computes_what_plain_integers_compute(size, key, data):
    index = data.draw(st.integers(0, size - 1))
    assert permute([index], size, key)[0] == permute_slowly(index, size, key)


def test_the_permutation_is_frozen_for_ever():
    """A run that is resumed after an update of Packhorse or numpy must go on in the same order."""
    assert derive_key(0) == 0xE220A8397B1DCDAF  # the published first number of splitmix64 from seed 0
    assert derive_key(1, -2, 2**40) == 17873547223397263331
    golden = [
        (1, 7, [0]),
        (2, 7, [1, 0]),
        (7, 7, [6, 4, 2, 1, 3, 5, 0]),
        (1000, 2**64 - 1, [696, 655, 366, 671, 69, 300, 57, 155, 132, 32]),
        (65536, derive_key(3), [10344, 19067, 14283, 26534, 46264, 50651, 49106, 38657, 25445, 65216]),
        (2**40 - 1, 7, [251764739294, 1083537365288, 1017249902605, 476090572105, 841873543949]),
        (2**40, derive_key(4), [910005757981, 758878426691, 77299425530, 865780136857, 963724098197]),
    ]
    for size, key, numbers in golden:
        np.testing.assert_array_equal(permute(np.arange(len(numbers)), size, key), numbers)


def test_an_index_outside_is_refused():
    with pytest.raises(IndexError):
        permute([0, 5], 5, 1)
    with pytest.raises(IndexError):
        permute([-1], 5, 1)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_small_sets_see_all_their_permutations_equally_often(size):
    keys = derive_keys(1, np.repeat(np.arange(24_000), size))
    rows = permute(np.tile(np.arange(size), 24_000), size, keys).reshape(-1, size)
    counts = Counter(map(tuple, rows.tolist()))
    orders = list(itertools.permutations(range(size)))
    expected = 24_000 / len(orders)
    chi_square = sum((counts[order] - expected) ** 2 / expected for order in orders)
    freedom = len(orders) - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations; the keys are fixed


@pytest.mark.parametrize("size", [64, 100, 1000, 4097])
def test_an_index_lands_everywhere_equally_often_over_keys(size):
    draws = 200 * size if size < 1000 else 40 * size
    for index in (0, 1, size // 2, size - 1):
        counts = np.bincount(permute(index, size, derive_keys(index, np.arange(draws))).astype(int), minlength=size)
        chi_square = ((counts - draws / size) ** 2).sum() / (draws / size)
        assert abs(chi_square - (size - 1)) < 5 * (2 * (size - 1)) ** 0.5


def test_neighbouring_keys_sizes_and_words_give_unrelated_permutations():
    index = np.arange(4000)
    base = permute(index, 4000, derive_key(1, 0))
    others = [permute(index, 4000, derive_key(1, 1)), permute(index, 4000, derive_key(0, 1)), permute(index, 4001, 1)]
    for other in [*others, permute(index, 4000, derive_key(1, 0) + 1)]:
        assert (base == other).mean() < 0.005
        assert abs(np.corrcoef(base.astype(float), other.astype(float))[0, 1]) < 0.08  # five standard deviations
    assert (permute(index, 4000, 1) == permute(index, 4001, 1)).mean() < 0.005
