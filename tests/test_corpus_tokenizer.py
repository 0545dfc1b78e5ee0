"""Laws of tokenizers: known by their content, honest about BOS, EOS and PAD, refused when they would not repeat."""

import json
import shutil

import pytest

from conftest import make_texts
from packhorse.corpus.engines import make_engine
from packhorse.corpus.tokenizer import locate_tokenizer, read_tokenizer, train_tokenizer
from packhorse.errors import TokenizerError


def edited(folder, target, change, config=None):
    """A copy of a tokenizer with something changed in its tokenizer.json."""
    shutil.copytree(folder, target)
    content = json.loads((target / "tokenizer.json").read_text())
    content = change(content) or content
    (target / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False))
    if config is not None:
        (target / "tokenizer_config.json").write_text(json.dumps(config))
    return read_tokenizer(target).facts


def id_of(folder, token) -> int:
    return make_vocab(folder)[token]


def make_vocab(folder) -> dict[str, int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(with_added_tokens=True)


def test_gpt2_like_has_no_bos_and_ends_documents_with_its_end_of_text(gpt2_like):
    facts = read_tokenizer(gpt2_like).facts
    end = id_of(gpt2_like, "<|endoftext|>")
    assert (facts.bos_id, facts.eos_id, facts.pad_id, facts.adds_bos) == (None, end, end, False)
    assert facts.vocab_size == max(make_vocab(gpt2_like).values()) + 1


def test_llama_like_puts_bos_before_and_eos_after(llama_like):
    facts = read_tokenizer(llama_like).facts
    assert facts.adds_bos
    assert (facts.bos_id, facts.eos_id) == (id_of(llama_like, "<s>"), id_of(llama_like, "</s>"))


def test_qwen_like_ends_text_with_end_of_text_and_not_with_the_end_of_a_turn(qwen_like):
    facts = read_tokenizer(qwen_like).facts
    assert facts.eos_id == facts.pad_id == id_of(qwen_like, "<|endoftext|>")
    assert not facts.adds_bos


def test_a_plain_vocabulary_entry_is_never_taken_for_bos(qwen_like):
    assert "<s>" in make_vocab(qwen_like)
    assert read_tokenizer(qwen_like).facts.bos_id is None


def test_add_bos_token_false_in_the_configuration_turns_bos_off(llama_like, tmp_path):
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}
    facts = edited(llama_like, tmp_path / "t", lambda content: None, config)
    assert not facts.adds_bos
    assert facts.bos_id == id_of(llama_like, "<s>")


@pytest.mark.parametrize("value", [5, ["<|endoftext|>"], {"content": 7}, {}, None, "no such token"])
def test_a_name_that_is_none_in_the_configuration_is_passed_over(gpt2_like, tmp_path, value):
    shutil.copy(gpt2_like / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": value, "pad_token": value}))
    facts = read_tokenizer(tmp_path).facts
    assert (facts.eos_id, facts.pad_id) == (read_tokenizer(gpt2_like).facts.eos_id,) * 2


def test_the_reference_copy_says_the_same_as_the_original(llama_like, qwen_like, gpt2_like, tmp_path):
    for number, folder in enumerate((llama_like, qwen_like, gpt2_like)):
        content = read_tokenizer(folder)
        copy = tmp_path / str(number)
        copy.mkdir()
        for name, data in content.files.items():
            (copy / name).write_bytes(data)
        assert read_tokenizer(copy).facts == content.facts


def reverse_keys(content):
    return dict(reversed(content.items()))


def merges_as_strings(content):
    content["model"]["merges"] = [" ".join(m) if isinstance(m, list) else m for m in content["model"]["merges"]]


def merges_as_pairs(content):
    content["model"]["merges"] = [m.split(" ") if isinstance(m, str) else m for m in content["model"]["merges"]]


def truncate(content):
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}


def pad(content):
    content["padding"] = {
        **{"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None},
        **{"pad_id": 0, "pad_type_id": 0, "pad_token": "!"},
    }


@pytest.mark.parametrize("change", [reverse_keys, merges_as_strings, merges_as_pairs, truncate, pad])
def test_the_fingerprint_does_not_see_what_does_not_change_ids(gpt2_like, tmp_path, change):
    facts = edited(gpt2_like, tmp_path / "t", change)
    assert facts == read_tokenizer(gpt2_like).facts


def other_merge_order(content):
    merges = content["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


def another_word(content):
    content["model"]["vocab"]["zzzz"] = max(content["model"]["vocab"].values()) + 1


def lower_case(content):
    content["normalizer"] = {"type": "Lowercase"}


def drop_special(content):
    content["added_tokens"] = []


@pytest.mark.parametrize("change", [other_merge_order, another_word, lower_case, drop_special])
def test_the_fingerprint_sees_another_tokenizer(gpt2_like, tmp_path, change):
    assert edited(gpt2_like, tmp_path / "t", change).fingerprint != read_tokenizer(gpt2_like).facts.fingerprint


def test_truncation_and_padding_left_in_the_file_are_never_obeyed(gpt2_like, tmp_path):
    text = "the of and to in a is that for it was on are as with at be " * 5
    shutil.copytree(gpt2_like, tmp_path / "t")
    content = json.loads((tmp_path / "t/tokenizer.json").read_text())
    truncate(content)
    pad(content)
    (tmp_path / "t/tokenizer.json").write_text(json.dumps(content))
    plain, spoilt = (read_tokenizer(folder) for folder in (gpt2_like, tmp_path / "t"))
    for name in ("hf", "fastokens"):
        lengths = [len(make_engine(name, c.json, True, "")[0].encode([text])[0]) for c in (plain, spoilt)]
        assert lengths[0] == lengths[1] > 64


def test_dropout_is_refused(gpt2_like, tmp_path):
    with pytest.raises(TokenizerError, match="dropout"):
        edited(gpt2_like, tmp_path / "t", lambda content: content["model"].update(dropout=0.1))


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"model": {}}', b"\xff\xfe", b'{"model": {"vocab": {"a": 0}}}'])
def test_a_damaged_tokenizer_is_a_tokenizer_error(gpt2_like, tmp_path, damage):
    shutil.copytree(gpt2_like, tmp_path / "t")
    (tmp_path / "t/tokenizer.json").write_bytes(damage)
    with pytest.raises(TokenizerError):
        read_tokenizer(locate_tokenizer(str(tmp_path / "t")))


def test_every_truncation_of_a_tokenizer_is_a_tokenizer_error(gpt2_like, tmp_path):
    data = (gpt2_like / "tokenizer.json").read_bytes()
    for size in range(0, len(data) - 1, 997):
        (tmp_path / "tokenizer.json").write_bytes(data[:size])
        with pytest.raises(TokenizerError):
            read_tokenizer(tmp_path)


def test_a_damaged_configuration_is_a_tokenizer_error(gpt2_like, tmp_path):
    shutil.copytree(gpt2_like, tmp_path / "t")
    (tmp_path / "t/tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        read_tokenizer(tmp_path / "t")


@pytest.mark.parametrize("name", ["./nothing/here", "/nothing/here", "no-such/tokenizer", "gone.json", "a/b/c"])
def test_a_missing_tokenizer_is_a_tokenizer_error_with_its_name(name):
    with pytest.raises(TokenizerError, match=name.rpartition("/")[2]):
        read_tokenizer(locate_tokenizer(name))


def test_a_file_that_is_no_tokenizer_json_is_refused(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\x00")
    with pytest.raises(TokenizerError, match=r"not a tokenizer\.json"):
        locate_tokenizer(str(tmp_path / "tokenizer.model"))


def test_training_gives_the_same_tokenizer_for_the_same_texts():
    texts = make_texts(60)
    first, second = (train_tokenizer(texts, 300) for _ in range(2))
    assert first == second
    assert first.facts.vocab_size == 300
    assert first.facts.eos_id is not None
