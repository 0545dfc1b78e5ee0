"""Laws of `passkey`, `generate` and `benchmark`: a checkpoint is enough, whatever form it has."""

import importlib.util
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from packhorse.cli import main
from packhorse.corpus.tokenizer import train_tokenizer
from packhorse.errors import CheckpointError, SettingsError, TokenizerError
from packhorse.evaluation.generation import GenerationSettings, generate_text
from packhorse.evaluation.passkey import PasskeySettings
from packhorse.models import InfiniLlamaConfig, InfiniLlamaForCausalLM
from packhorse.training.evaluate import benchmark, generate, passkey, spell
from packhorse.training.restore import CheckpointSettings, restore

SMALL = Path(__file__).parents[1] / "configs" / "passkey_tokenizer.json"
FEW = ["--depths", "2", "--samples", "2", "--batch-size", "2"]


@pytest.fixture
def model() -> InfiniLlamaForCausalLM:
    torch.manual_seed(0)
    config = InfiniLlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        initializer_range=0.3,
        infini_attention={"segment_length": 16, "balance_init_type": "randn"},
    )
    return InfiniLlamaForCausalLM(config).eval()


@pytest.fixture
def folder(model, tmp_path) -> Path:
    """As `save_pretrained` leaves it, with a tokenizer beside."""
    model.save_pretrained(tmp_path / "model")
    shutil.copy(SMALL, tmp_path / "model" / "tokenizer.json")
    return tmp_path / "model"


@pytest.fixture
def run(model, tmp_path) -> Path:
    """The checkpoint of a run, as the LanguageModule leaves it."""
    path = tmp_path / "runs" / "mine" / "version_0" / "checkpoints" / "step=00000003.ckpt"
    path.parent.mkdir(parents=True)
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    own = {"config": model.config.to_dict(), "tokenizer": {"tokenizer.json": SMALL.read_bytes()}}
    torch.save({"state_dict": weights, "packhorse": own}, path)
    return path


def test_fit_leaves_a_checkpoint_that_needs_neither_yaml_nor_cache(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(SMALL.parent)
    config = ["--config", "configs/passkey_small.yaml", "--data.max_documents=300", "--data.workers=0"]
    few = ["--data.micro_batch_size=2", "--trainer.max_steps=2", "--trainer.val_check_interval=2"]
    assert main(["fit", *config, *few, "--model.schedule.warmup_steps=1"]) == 0
    shutil.rmtree(tmp_path / "runs" / "cache")
    (tmp_path / "configs").unlink()
    capsys.readouterr()
    assert main(["passkey", "--ckpt_path", "latest", "--lengths", "80", *FEW]) == 0
    assert "memory shuffled" in capsys.readouterr().out
    assert (tmp_path / "runs/passkey/passkey-small-version_0-step=00000002/passkey.json").is_file()
    assert main(["generate", "--ckpt_path", "runs/passkey-small", "The pass key is", "--max_new_tokens=3"]) == 0
    assert 1 <= len(capsys.readouterr().out.split()) <= 3


@pytest.mark.parametrize(
    "words",
    [
        ["--ckpt_path", "MODEL", "--lengths", "70", "90"],
        ["--checkpoint-path", "MODEL", "--context-length", "70,90"],
        ["--ckpt-path=MODEL", "--context_length=[70, 90]"],
        ["--checkpoint_path=MODEL", "--num_digits", "5", "--num-shots=0", "--context-lengths", "70", "90"],
    ],
)
def test_a_transformers_folder_is_asked_in_every_spelling(folder, tmp_path, capsys, words):
    words = [word.replace("MODEL", str(folder)) for word in words]
    assert main(["passkey", *words, *FEW, "--save_path", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert str(tmp_path / "out" / "passkey.png") in out
    result = json.loads((tmp_path / "out" / "passkey.json").read_text())
    assert {cell["length"] for cell in result["by_depth"]} == {70, 90}
    assert result["checkpoint"] == str(folder)


def test_without_matplotlib_there_is_everything_but_the_picture(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    out = ["--lengths", "70", *FEW, "--output", str(tmp_path / "out")]
    assert main(["passkey", "--ckpt_path", str(folder), *out]) == 0
    assert "packhorse[eval]" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["passkey.json"]


def test_a_run_and_a_folder_hold_the_same_model(run, folder, model, tmp_path):
    ids = torch.randint(0, 50, (1, 40))
    for name in (str(run), str(tmp_path / "runs" / "mine"), "latest", str(folder)):
        restored = restore(CheckpointSettings(ckpt_path=name, runs=tmp_path / "runs"))
        assert torch.equal(restored.model(ids).logits, model(ids).logits)
        assert restored.decode(restored.encode("The sea is wide.")) == "The sea is wide ."
        assert not restored.model.training


def test_weights_are_cast_and_gates_stay_wide(run, tmp_path):
    restored = restore(CheckpointSettings(ckpt_path=str(run), dtype="bfloat16"))
    dtypes = {name.rpartition("self_attn.")[2]: p.dtype for name, p in restored.model.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if name.startswith("gate")} == {torch.float32}
    assert dtypes["q_proj.weight"] == torch.bfloat16


def test_what_is_no_checkpoint_of_ours_is_refused(run, folder, tmp_path):
    def refuses(error, match, **settings):
        with pytest.raises(error, match=match):
            restore(CheckpointSettings(**{"ckpt_path": str(run), **settings}))

    whole = torch.load(run)
    refuses(SettingsError, "does not exist", ckpt_path=str(tmp_path / "none.ckpt"))
    (folder / "tokenizer.json").unlink()
    refuses(TokenizerError, "brings no tokenizer", ckpt_path=str(folder))
    (run.parent / "shards.ckpt").mkdir()
    refuses(CheckpointError, "consolidate", ckpt_path=str(run.parent / "shards.ckpt"))
    torch.save({"state_dict": {}}, run)
    refuses(CheckpointError, "not of a Packhorse run")
    torch.save({**whole, "state_dict": {"model.lm_head.weight": torch.zeros(50, 32)}}, run)
    refuses(CheckpointError, "do not fit")
    run.write_bytes(b"damaged")
    refuses(CheckpointError, "damaged")


def test_a_tokenizer_that_is_larger_than_the_model_is_refused(run, tmp_path):
    for name, data in train_tokenizer(["a few words"], 300).files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(TokenizerError, match="ids up to"):
        restore(CheckpointSettings(ckpt_path=str(run), tokenizer=str(tmp_path / "tokenizer.json")))


def test_prompts_come_as_arguments_from_a_file_or_from_standard_input(folder, tmp_path, capsys, monkeypatch):
    options = ["--ckpt_path", str(folder), "--max-new-tokens", "4"]

    def written(*words) -> list[str]:
        assert main(["generate", *options, *words]) == 0
        return capsys.readouterr().out.rstrip("\n").split("\n\n")

    both = written("The sea is", "The hills")
    assert len(both) == 2
    assert written("--prompts", "The sea is", "The hills") == both
    (tmp_path / "prompt.txt").write_text("The hills")
    assert written("--file", str(tmp_path / "prompt.txt")) == both[1:]
    monkeypatch.setattr("sys.stdin", io.StringIO("The sea is"))
    assert written() == both[:1]
    assert main(["generate", *options, "--file", str(tmp_path / "none.txt")]) == 2
    assert main(["generate", *options, "The sea", "--temperature=-1"]) == 2


def test_what_is_generated_is_what_transformers_generates(model):
    prompt = torch.randint(0, 50, (1, 40))
    expected = model.generate(prompt, max_new_tokens=30, do_sample=False, eos_token_id=None)[0, 40:].tolist()

    def write(**settings) -> list[int]:
        pieces = generate_text(
            model,
            prompt[0].tolist(),
            lambda ids: "".join(map(chr, ids)),
            GenerationSettings(max_new_tokens=30, **settings),
            chunk_tokens=7,
        )
        return [ord(character) for character in "".join(pieces)]

    assert write() == expected
    assert write(temperature=1.0, top_p=1e-9) == expected, "only the likeliest token is left"
    drawn = [write(temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_writing_stops_at_the_end_of_the_text_and_never_within_a_character(model):
    prompt = [1, 2, 3]
    ids = [
        ord(piece) for piece in generate_text(model, prompt, lambda ids: "".join(map(chr, ids)), GenerationSettings())
    ]
    eos = next(i for number, i in enumerate(ids) if i not in ids[:number] and number > 1)
    stopped = generate_text(model, prompt, lambda ids: "".join(map(chr, ids)), GenerationSettings(), eos_id=eos)
    assert [ord(piece) for piece in stopped] == ids[: ids.index(eos)]
    halves = generate_text(
        model,
        prompt,
        lambda ids: "é" * (len(ids) // 2) + "\ufffd" * (len(ids) % 2),
        GenerationSettings(max_new_tokens=4),
    )
    assert list(halves) == ["é", "é"]


def test_words_without_an_option_are_prompts_and_others_are_left_to_the_parser():
    assert spell(["a, b", "--file", "x"], generate) == ["--file=x", '--prompts=["a, b"]']
    assert spell(["--tasks", "a", "b"], benchmark) == ['--tasks=["a", "b"]']
    assert spell(["--context-length", "1", "2", "--runs", "x"], passkey) == ["--lengths=[1,2]", "--runs=x"]
    assert spell(["--unheard-of", "3"], passkey) == ["--unheard_of=3"]
    assert PasskeySettings(lengths=[100]).shares[::10] == [0, 0.5, 1]


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_without_lm_eval_a_benchmark_says_what_to_install(folder, capsys):
    assert main(["benchmark", "--ckpt_path", str(folder), "--tasks", "hellaswag"]) == 2
    assert "packhorse[eval]" in capsys.readouterr().err


def test_lm_eval_scores_a_task_of_our_own(folder, tmp_path, capsys, monkeypatch):
    """Runs where the extra `eval` is installed; needs no network."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    rows = [{"question": "The sea is", "choices": ["wide", "green"], "answer": i % 2} for i in range(6)]
    (tmp_path / "tasks").mkdir()
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "seas",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "tasks" / "seas.yaml").write_text(json.dumps(task))
    options = ["--tasks", "seas", "--include_path", str(tmp_path / "tasks"), "--output", str(tmp_path / "out.json")]
    assert main(["benchmark", "--ckpt_path", str(folder), *options]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["results"]["seas"]["acc"] == 0.5, "one answer for all"
    assert "seas: " in capsys.readouterr().out
    assert main(["benchmark", "--ckpt_path", str(folder), "--tasks", "unheard_of"]) == 2


def test_export_makes_a_folder_that_transformers_loads_with_its_tokenizer(run, model, tmp_path, capsys):
    folder = tmp_path / "exported"
    assert main(["export", "--ckpt_path", str(run), "--folder", str(folder)]) == 0
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(40)[None] % 50
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert restore(CheckpointSettings(ckpt_path=str(folder))).tokenizer.json == SMALL.read_text()
    assert main(["export", "--ckpt_path", str(run), "--folder", str(folder)]) == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["nonsense", "cuda:99", "xpu:7"])
def test_a_device_that_is_not_there_is_refused_with_status_2(run, capsys, device):
    assert main(["generate", "--ckpt_path", str(run), "--device", device, "The sea"]) == 2
    assert f"The device {device} cannot be used" in capsys.readouterr().err


def test_a_file_where_a_folder_shall_be_made_is_refused_and_kept(run, tmp_path, capsys):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    for folder in (file, file / "deeper" / "still"):
        assert main(["export", "--ckpt_path", str(run), "--folder", str(folder)]) == 2
        assert main(["passkey", "--ckpt_path", str(run), "--lengths", "70", *FEW, "--output", str(folder)]) == 2
        assert capsys.readouterr().err.count(f"{file} is a file") == 2
    assert file.read_text() == "mine"
