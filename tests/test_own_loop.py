"""A loop of one's own, without a Trainer: the loaders of the DataModule and any model of transformers."""

import itertools

import numpy as np
import pytest
import torch
import transformers

from conftest import make_texts, tiny_data, write_jsonl
from packhorse.errors import CacheIncompleteError, SettingsError
from packhorse.training import TokenDataModule, datamodule


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("own")


def open_data(folder, **settings) -> TokenDataModule:
    source = folder / "hills.jsonl"
    if not source.exists():
        write_jsonl(source, make_texts(300, words=30))
    values = {"source": str(source), "eval_share": 0.1, "micro_batch_size": 4, "engine": "hf", **settings}
    data = TokenDataModule(**tiny_data(folder, **values))
    data.prepare_data()
    data.setup("fit")
    return data


def drawn(loader) -> list[tuple[int, int]]:
    return [tuple(pair) for numbers in loader.sampler for pair in numbers.tolist()]


def test_pass_after_pass_goes_on_in_the_order_and_leaves_nothing_out(folder):
    data = open_data(folder)
    count = data.cache.num_sequences("train")
    loader = data.train_dataloader()
    first, second = drawn(loader), drawn(loader)
    assert count % 4
    assert len(first) == len(second) == count // 4 * 4 == 4 * len(loader)
    assert {number for _, number in (first + second)[:count]} == set(range(count))
    assert first != second


def test_a_loop_that_is_left_early_goes_on_with_the_next_batch(folder):
    undisturbed, loader = (open_data(folder).train_dataloader() for _ in range(2))
    whole = [batch["input_ids"] for _ in range(2) for batch in undisturbed]
    given = [batch["input_ids"] for batch in itertools.islice(loader, 3)]
    for batch in loader:
        given.append(batch["input_ids"])
        if len(given) == 5:
            break
    given += [next(iter(loader))["input_ids"]]
    rest = [batch["input_ids"] for batch in loader]
    assert len(rest) == len(loader)
    assert all(map(torch.equal, given + rest, whole[: 6 + len(loader)]))


def test_processes_share_each_batch(folder, monkeypatch):
    data, shares = open_data(folder, micro_batch_size=8), []
    alone = list(data.passes().sampler)
    data.settings = open_data(folder).settings
    for rank in range(2):
        monkeypatch.setattr(datamodule, "share_of", lambda _, rank=rank: (rank, 2))
        shares.append(list(data.passes().sampler))
    for whole, *parts in zip(alone, *shares, strict=True):
        assert np.array_equal(whole, np.concatenate(parts))


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_model_of_transformers_finds_its_labels_where_it_looks_for_them(folder, split):
    data = open_data(folder)
    loader = data.train_dataloader() if split == "train" else data.val_dataloader()
    batch = next(iter(loader))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": data.vocab_size}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    out = model(**batch)
    next_tokens = data.rows(split)[next(iter(loader.sampler if split == "eval" else data.passes().sampler))]["labels"]
    expected = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), next_tokens.flatten())
    assert torch.isclose(out.loss, expected)
    out.loss.backward()


def test_what_has_no_pass_is_refused_in_words(folder):
    with pytest.raises(CacheIncompleteError, match="not open yet"):
        TokenDataModule(**tiny_data(folder)).train_dataloader()
    mixed = open_data(folder)
    mixed.caches = {"a": mixed.cache, "b": mixed.cache}
    with pytest.raises(SettingsError, match="A mixture of caches has no length"):
        mixed.train_dataloader()
    with pytest.raises(SettingsError, match="fewer train sequences than one batch"):
        open_data(folder, micro_batch_size=100_000).train_dataloader()
    with pytest.raises(SettingsError, match="no evaluation text"):
        open_data(folder, eval_sequences=0).val_dataloader()
