"""What the tests share: small tokenizers and corpora that are made on the spot. Nothing here needs a network."""

import json
import os
import random
import tempfile
from pathlib import Path

# Before anything is imported that would look for the hub, or start threads that a fork does not survive.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Models here are tiny: threads that wait for each other on a busy machine cost a hundred times what they bring.
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import numpy as np
import pytest

from packhorse.cache import CacheSettings, update_cache
from packhorse.corpus.tokenizer import train_tokenizer

# A busy machine is not a fault of what is tested.
hypothesis.settings.register_profile("packhorse", deadline=None)
hypothesis.settings.load_profile("packhorse")

WORDS = (
    "the of and to in a is that for it was on are as with at be this from have or by one had not but what all were "
    "when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made "
    "over did naïve café Straße мир слово 世界 你好 🙂 don't it's def return import self.value x_1 == 3.14 1,000 (see) "
    "[0] http://a.b/c"
).split()


TINY_MODEL = {
    "config": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
    "infini_attention": {"segment_length": 8},
}
"""The `model:` group of a configuration."""


def tiny_data(folder: Path, **more) -> dict:
    """The `data:` group of a configuration, for the text in `corpus.jsonl` of a folder."""
    return {
        "source": str(folder / "corpus.jsonl"),
        "tokenizer": str(folder / "tokenizer"),
        "train_tokenizer": 300,
        "sequence_length": 32,
        "cache_dir": str(folder / "cache"),
        "workers": 0,
        "micro_batch_size": 2,
        **more,
    }


def small_chunks(folder: Path, tokenizer: Path, texts: list[str] | None = None, **more) -> CacheSettings:
    """Settings of a cache of many small chunks, built in this process."""
    texts = make_texts(160, seed=4, words=20) if texts is None else texts
    return CacheSettings(
        source=str(write_jsonl(folder / "a.jsonl", texts)),
        tokenizer=str(tokenizer),
        cache_dir=str(folder / "cache"),
        sequence_length=32,
        sequences_per_chunk=20,
        engine="hf",
        workers=0,
        **more,
    )


def make_texts(count: int, seed: int = 0, words: int = 40) -> list[str]:
    """Texts of many lengths, all different."""
    draw = random.Random(seed)
    texts = []
    for number in range(count):
        length = max(1, int(draw.lognormvariate(np.log(words), 0.9)))
        text = " ".join(draw.choices(WORDS, k=length))
        texts.append(f"{number}/{seed} {text}" + draw.choice(["", ".", "\n", "\n\n  end"]))
    return texts


def write_jsonl(path: Path, texts: list, mode: str = "w") -> Path:
    """One JSON object a line."""
    with path.open(mode, encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return path


def write_parquet(path: Path, texts: list, rows: int = 50, column: str = "text") -> Path:
    """A parquet file with row groups of `rows` rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({column: texts, "number": list(range(len(texts)))}), path, row_group_size=rows)
    return path


@pytest.fixture(scope="session")
def gpt2_like(tmp_path_factory) -> Path:
    """Byte-level BPE, as GPT-2's: no BOS, documents end with <|endoftext|>."""
    folder = tmp_path_factory.mktemp("gpt2-like")
    content = train_tokenizer(make_texts(400, seed=99), 600)
    for name, data in content.files.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture(scope="session")
def qwen_like(tmp_path_factory, gpt2_like) -> Path:
    """As Qwen's: the configuration names the end of a *turn* as EOS, and "<s>" is a word like any other."""
    folder = tmp_path_factory.mktemp("qwen-like")
    content = json.loads((gpt2_like / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    size = max(vocab.values()) + 1
    vocab["<s>"] = size
    added = content["added_tokens"][0]
    content["added_tokens"] = [
        {**added, "id": size + 1, "content": "<|im_start|>"},
        {**added, "id": size + 2, "content": "<|im_end|>"},
        added,
    ]
    content["normalizer"] = {"type": "NFC"}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def llama_like(tmp_path_factory) -> Path:
    """A SentencePiece-form BPE with byte fallback, as Llama 2's: its template puts BOS before a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers

    folder = tmp_path_factory.mktemp("llama-like")
    marked = [text.replace(" ", "▁") for text in make_texts(400, seed=98)]
    learner = Tokenizer(models.BPE(unk_token="<unk>"))
    specials = ["<unk>", "<s>", "</s>"]
    learner.train_from_iterator(
        marked,
        trainers.BpeTrainer(
            vocab_size=700,
            special_tokens=[*specials, *(f"<0x{byte:02X}>" for byte in range(256))],
            show_progress=False,
            limit_alphabet=150,
        ),
    )
    learned = json.loads(learner.to_str())["model"]
    merges = [tuple(merge) for merge in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(learned["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": {"content": "</s>"}, "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def build(tmp_path, gpt2_like):
    """Build a tiny cache in `tmp_path`, in this process and by the reference, unless told otherwise."""

    def build_with(source, **settings):
        defaults = {
            "tokenizer": str(gpt2_like),
            "cache_dir": str(tmp_path / "cache"),
            "sequence_length": 32,
            "sequences_per_chunk": 20,
            "eval_share": 0.1,
            "engine": "hf",
            "workers": 0,
        }
        return update_cache(CacheSettings(source=source, **{**defaults, **settings}), quiet=True)

    return build_with


def payloads(cache) -> list[str]:
    """What the chunks of a cache hold, by hash."""
    from packhorse.cache.record import read_record

    return [read_record(cache.folder, chunk).payload_sha256 for chunk in range(cache.snapshot.num_chunks)]


def all_tokens(cache, split: str = "train") -> np.ndarray:
    """All sequences of one side of the split."""
    return cache.read(np.arange(cache.num_sequences(split)), split=split).tokens


def file_bytes(folder: Path) -> dict[str, bytes]:
    """Relative path -> content of all chunk files of a cache."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted((folder / "chunks").rglob("*.chunk"))}


def documents_in(cache) -> list[list[int]]:
    """The ids of every document of a cache, in the order of chunks and documents, put together from their pieces."""
    length, overlap = cache.sequence_length, cache.recipe.overlap
    documents = []
    for number in range(cache.snapshot.num_chunks):
        chunk = cache.chunk(number)
        pieces: dict[int, list[list[int]]] = {}
        for row in range(chunk.header.num_sequences):
            tokens, place = chunk.tokens(row), 0
            for size, document in zip(chunk.piece_lengths(row), chunk.piece_documents(row), strict=True):
                pieces.setdefault(int(document), []).append(tokens[place : place + size].tolist())
                place += int(size)
        assert sorted(pieces) == list(range(chunk.header.num_documents))
        for document in sorted(pieces):
            own = pieces[document]
            if cache.recipe.packing in ("best_fit", "window"):
                own.sort(key=lambda piece: len(piece) < length)
            documents.append(own[0] + [i for piece in own[1:] for i in piece[overlap:]])
    return documents


def texts_in(cache) -> list[str]:
    """The texts of every document of a cache, without BOS and EOS."""
    ends = {cache.recipe.bos_id, cache.recipe.eos_id}
    return [cache.decode([i for i in ids if i not in ends]) for ids in documents_in(cache)]


@pytest.fixture
def fast_folder(tmp_path):
    """A folder in memory, where that is possible: for tests that build hundreds of caches."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="packhorse-") as folder:
        yield Path(folder)
