"""Laws of pass keys: exact lengths, the key where it is said to be, the same ids in text and answer."""

import random
from pathlib import Path

import numpy as np
import pytest

from packhorse.corpus.passkey import EXAMPLES, FILLER, PasskeyDocuments, PasskeyText, draw_key
from packhorse.corpus.tokenizer import read_tokenizer
from packhorse.errors import SettingsError

SMALL = Path(__file__).parents[1] / "configs" / "passkey_tokenizer.json"


@pytest.fixture(params=["gpt2_like", "llama_like", "small"])
def tokenizer(request) -> Path:
    return SMALL if request.param == "small" else request.getfixturevalue(request.param)


@pytest.fixture
def text(tokenizer) -> PasskeyText:
    return PasskeyText(read_tokenizer(tokenizer))


@pytest.mark.parametrize("depth", [0, 0.3, 0.5, 1])
@pytest.mark.parametrize("more", [0, 1, 17, 300])
def test_a_text_has_its_length_and_its_key_where_it_says(text, depth, more):
    key = "53817"
    length = text.shortest(key) + more
    laid = text.lay(length, depth, key)
    answer = laid.ids[laid.answer_start :].tolist()
    assert len(laid.ids) == length
    assert answer == text.phrase(key)
    assert laid.ids[laid.fact_end - len(answer) : laid.fact_end].tolist() == answer, "the key's last mention"
    question = text.question()
    assert laid.ids[laid.answer_start - len(question) : laid.answer_start].tolist() == question


def test_depth_moves_the_key_from_the_beginning_to_the_end_and_stands_between_sentences(text):
    ends = [text.lay(1_000, depth / 20, "53817").fact_end for depth in range(21)]
    assert ends == sorted(ends)
    assert len(set(ends)) == 21
    room = 1_000 - text.shortest("53817")
    assert ends[20] - ends[0] == room
    longest = max(len(text.phrase(sentence)) for sentence in FILLER)
    for number, end in enumerate(ends):
        assert abs(end - ends[0] - room * number / 20) <= longest / 2
    sentences = {tuple(text.phrase(sentence)) for sentence in FILLER}
    for depth in (0.21, 0.5, 0.83):
        laid = text.lay(1_000, depth, "53817")
        before = laid.ids[: laid.fact_end - len(text.fact("53817"))].tolist()
        assert any(tuple(before[-len(sentence) :]) == sentence for sentence in sentences)


def test_a_text_that_is_too_short_is_refused_with_the_length_it_needs(text):
    needed = text.shortest("53817")
    with pytest.raises(SettingsError, match=f"needs {needed} tokens"):
        text.lay(needed - 1, 0.5, "53817")


def test_solved_examples_stand_before_the_text_and_ask_for_something_else(text):
    laid = text.lay(600, 0.5, "53817", examples=("11111", "22222"))
    assert len(laid.ids) == 600
    content = " ".join(map(str, laid.ids))
    for name, key in zip(EXAMPLES, ("11111", "22222"), strict=False):
        asked = text.question(name) + text.phrase(key)
        assert " ".join(map(str, asked)) in content
    assert laid.ids[laid.answer_start :].tolist() == text.phrase("53817")


def test_documents_end_as_the_cache_ends_them_and_have_exact_lengths(tokenizer):
    documents = list(PasskeyDocuments(str(tokenizer), count=30, length=300))
    eos = read_tokenizer(tokenizer).facts.eos_id
    assert {len(ids) for ids in documents} == {300}
    assert {ids[-1] for ids in documents} == {eos}
    assert len({ids.tobytes() for ids in documents}) == 30


def test_documents_of_many_lengths_ask_several_times():
    source = PasskeyDocuments(str(SMALL), count=200, length=256, shortest=64, questions=4)
    lengths = [len(ids) for ids in source]
    assert min(lengths) >= 64
    assert max(lengths) <= 256
    assert len(set(lengths)) > 50
    question = PasskeyText(read_tokenizer(SMALL)).question()
    asked = {sum(ids[i : i + len(question)].tolist() == question for i in range(len(ids))) for ids in source}
    assert asked == {1, 2, 3, 4}


def test_the_same_settings_give_the_same_documents_and_fingerprint_and_others_do_not():
    def make(**settings):
        return PasskeyDocuments(**{"tokenizer": str(SMALL), "count": 5, "length": 100, **settings})

    one, other = make(), make()
    assert one.fingerprint == other.fingerprint
    assert all(np.array_equal(*pair) for pair in zip(one, other, strict=True))
    others = [make(seed=1), make(count=6), make(length=101), make(digits=4), make(shortest=90), make(questions=2)]
    assert len({source.fingerprint for source in [one, *others]}) == 7


def test_the_cache_takes_the_documents_as_they_are(build):
    settings = {"tokenizer": str(SMALL), "count": 50, "length": 128}
    source = {"class_path": "packhorse.corpus.passkey.PasskeyDocuments", "init_args": settings}
    cache = build(source, tokenizer=str(SMALL), sequence_length=128)
    assert cache.utilisation == 1.0, "a document a sequence, without a token of padding"
    assert cache.num_sequences("train") + cache.num_sequences("eval") == 50
    documents = {ids.tobytes() for ids in PasskeyDocuments(**settings)}
    rows = cache.read(np.arange(cache.num_sequences("train"))).tokens.astype(np.int64)
    assert all(row.tobytes() in documents for row in rows)


def test_the_small_tokenizer_has_a_word_for_everything_and_one_for_each_digit():
    text = PasskeyText(read_tokenizer(SMALL))
    unknown = text.ids("unheard")
    laid = text.lay(200, 0.5, "0123456789", examples=("1", "2", "3"))
    assert not set(laid.ids.tolist()) & set(unknown)
    assert len(set(text.phrase("0123456789"))) == 10


def test_keys_have_their_digits_and_no_leading_zero():
    draw = random.Random(0)
    for digits in (1, 2, 7):
        keys = {draw_key(draw, digits) for _ in range(200)}
        assert {len(key) for key in keys} == {digits}
        assert digits == 1 or not any(key.startswith("0") for key in keys)
