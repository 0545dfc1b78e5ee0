"""Laws of engines: the ids are the reference's, or the engine is not used and that is said."""

import numpy as np
import pytest

from conftest import documents_in, make_texts
from packhorse.corpus import engines
from packhorse.corpus.engines import PROBES, Fastokens, Reference, Slow, Verified, make_engine
from packhorse.corpus.tokenizer import read_tokenizer
from packhorse.errors import EngineMismatch, TokenizerError

MIXED = [
    *make_texts(200, seed=5),
    *PROBES,
    "a" * 5_000,
    " " * 3_000,
    "\n" * 500,
    "".join(chr(c) for c in range(0x20, 0x3000, 7)),
    "<|endoftext|>" * 5 + "<s></s>",
]


def same(a, b) -> bool:
    return np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1])


@pytest.mark.parametrize("split_special_tokens", [True, False])
@pytest.mark.parametrize("name", ["gpt2_like", "qwen_like"])
def test_fastokens_gives_the_ids_of_the_reference(name, split_special_tokens, request):
    text = read_tokenizer(request.getfixturevalue(name)).json
    fast, reference = (kind(text, split_special_tokens).encode(MIXED) for kind in (Fastokens, Reference))
    assert same(fast, reference)
    engine, message = make_engine("auto", text, split_special_tokens, "")
    assert (engine.name, message) == ("fastokens", None)


def test_a_sentencepiece_form_gets_the_ids_of_the_reference_whatever_is_chosen(llama_like):
    text = read_tokenizer(llama_like).json
    engine, message = make_engine("auto", text, True, "")
    name = engine.name
    if name == "hf":
        assert "fastokens is not used" in message
    else:
        assert same(Fastokens(text, True).encode(MIXED), Reference(text, True).encode(MIXED))


@pytest.mark.parametrize("engine", [Reference, Fastokens])
def test_special_tokens_written_in_a_text_are_text_unless_asked_for(gpt2_like, engine):
    content = read_tokenizer(gpt2_like)
    written = ["before <|endoftext|> after"]
    assert content.facts.eos_id not in engine(content.json, True).encode(written)[0]
    assert content.facts.eos_id in engine(content.json, False).encode(written)[0]


@pytest.mark.parametrize("engine", [Reference, Fastokens])
def test_engines_take_texts_without_tokens_and_no_texts_at_all(gpt2_like, engine):
    made = engine(read_tokenizer(gpt2_like).json, True)
    for texts, ends in (([], []), ([""], [0]), (["", ""], [0, 0])):
        ids, got = made.encode(texts)
        assert len(ids) == 0
        assert got.tolist() == ends


def lying(on: str):
    """fastokens, but with one wrong id in each text that contains `on`."""

    class Lying(Fastokens):
        def encode(self, texts):
            ids, ends = super().encode(texts)
            ids = ids.copy()
            for i, text in enumerate(texts):
                if on in text:
                    ids[ends[i] - 1] ^= 1
            return ids, ends

    return Lying


def test_an_engine_that_is_wrong_on_a_probe_is_not_used_and_that_is_said(gpt2_like, monkeypatch):
    monkeypatch.setattr(engines, "load_fastokens", lying("Привет"))
    engine, message = make_engine("auto", read_tokenizer(gpt2_like).json, True, "")
    assert engine.name == "hf"
    assert "other ids than the reference" in message
    assert "Привет" in message


def test_an_engine_that_is_wrong_on_one_of_its_first_documents_is_caught(gpt2_like, monkeypatch):
    monkeypatch.setattr(engines, "load_fastokens", lying("only here"))
    engine, _ = make_engine("auto", read_tokenizer(gpt2_like).json, True, "")
    texts = ["fine"] * (engines.FIRST_DOCUMENTS - 1) + ["only here"]
    with pytest.raises(EngineMismatch, match="only here"):
        [engine.encode(texts[i : i + 5]) for i in range(0, len(texts), 5)]


@pytest.mark.parametrize("problem", [ImportError("no wheel"), RuntimeError("unknown regex")])
def test_an_engine_that_cannot_read_the_tokenizer_is_not_used(gpt2_like, monkeypatch, problem):
    def fail(*_):
        raise problem

    monkeypatch.setattr(engines, "load_fastokens", fail)
    engine, message = make_engine("auto", read_tokenizer(gpt2_like).json, True, "")
    assert engine.name == "hf"
    assert str(problem) in message


def test_an_engine_asked_for_by_name_is_not_silently_replaced(gpt2_like, monkeypatch):
    monkeypatch.setattr(engines, "load_fastokens", lying("Hello"))
    with pytest.raises(TokenizerError, match="engine: auto"):
        make_engine("fastokens", read_tokenizer(gpt2_like).json, True, "")


def test_verified_looks_at_the_first_document_and_at_one_in_every_so_many(gpt2_like, monkeypatch):
    monkeypatch.setattr(engines, "SAMPLE_EVERY", 10)
    monkeypatch.setattr(engines, "FIRST_DOCUMENTS", 1)
    text = read_tokenizer(gpt2_like).json
    for wrong in range(31):
        texts = [f"document {i}" + (" wrong" if i == wrong else "") for i in range(31)]
        for step in (1, 4, 31):
            engine = Verified(lying("wrong")(text, True), Reference(text, True))
            batches = [texts[i : i + step] for i in range(0, 31, step)]
            if wrong % 10 == 0:
                with pytest.raises(EngineMismatch) as caught:
                    [engine.encode(batch) for batch in batches]
                assert caught.value.text == texts[wrong]
                assert caught.value.engine.startswith("fastokens ")
            else:
                [engine.encode(batch) for batch in batches]


@pytest.fixture(scope="module")
def slow_tokenizer(tmp_path_factory):
    """ByT5's tokenizer needs no vocabulary file and exists in Python only."""
    from transformers import ByT5Tokenizer

    folder = tmp_path_factory.mktemp("byt5")
    ByT5Tokenizer().save_pretrained(folder)
    return folder


def test_a_tokenizer_that_exists_in_python_only_is_read_and_encodes(slow_tokenizer, tmp_path):
    content = read_tokenizer(slow_tokenizer)
    assert content.facts.kind == "slow"
    assert content.json == ""
    assert content == read_tokenizer(slow_tokenizer)
    for name, data in content.files.items():
        (tmp_path / name).write_bytes(data)
    ids, ends = Slow(str(tmp_path), True).encode(["ab", "", "é</s>"])
    assert ids.tolist() == [b + 3 for b in "abé</s>".encode()]
    assert ends.tolist() == [2, 2, 8]


def test_a_python_only_tokenizer_builds_a_cache(slow_tokenizer, build):
    texts = make_texts(12, words=8)
    cache = build(texts, tokenizer=str(slow_tokenizer), engine="auto")
    eos = cache.recipe.eos_id
    assert documents_in(cache) == [[*(b + 3 for b in text.encode()), eos] for text in texts]
    assert cache.decode(documents_in(cache)[0][:-1]) == texts[0]
