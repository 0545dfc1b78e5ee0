"""Laws of the pass key evaluation: what counts as found, without memory, with another's, in pieces of any size."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from packhorse.corpus.passkey import PasskeyText
from packhorse.corpus.tokenizer import read_tokenizer
from packhorse.errors import SettingsError
from packhorse.evaluation.generation import GenerationSettings, generate_text
from packhorse.evaluation.memory import ShuffledCache, memory_modes, read_with
from packhorse.evaluation.passkey import PasskeySettings, evaluate_passkey, find_keys, wilson
from packhorse.evaluation.report import result_lines, write_heat_map, write_json
from packhorse.evaluation.spans import span_name, span_of
from packhorse.models import InfiniCache, InfiniLlamaConfig, InfiniLlamaForCausalLM

SMALL = Path(__file__).parents[1] / "configs" / "passkey_tokenizer.json"
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}


@pytest.fixture(autouse=True)
def _one_thread_and_no_gradients():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture
def text() -> PasskeyText:
    return PasskeyText(read_tokenizer(SMALL))


def make_model(**settings) -> InfiniLlamaForCausalLM:
    settings = {"segment_length": 16, "balance_init_type": "randn", **settings}
    return InfiniLlamaForCausalLM(InfiniLlamaConfig(**SIZES, infini_attention=settings)).eval()


class Oracle(torch.nn.Module):
    """Answers the right keys; with `wrong`, gets so many of each answer's first tokens wrong."""

    def __init__(self, model, batch, wrong=0):
        super().__init__()
        self.model, self.config, self.device = model, model.config, model.device
        self.batch, self.wrong, self.read = batch, wrong, 0

    def forward(self, input_ids, past_key_values, logits_to_keep):
        self.read += input_ids.shape[1]
        tokens = torch.stack([torch.from_numpy(laid.ids) for laid in self.batch])
        tokens = torch.cat([tokens, tokens[:, :1]], 1)[:, self.read - logits_to_keep + 1 : self.read + 1].clone()
        start = -1 - (len(self.batch[0].ids) - self.batch[0].answer_start)
        tokens[:, start : start + self.wrong] += 1
        return type("Out", (), {"logits": torch.nn.functional.one_hot(tokens % 50, 50).float()})


@pytest.mark.parametrize("chunk", [1, 7, 50, 100, 4_096])
@pytest.mark.parametrize("wrong", [0, 1, 5])
def test_hits_are_the_answers_tokens_that_are_the_likeliest(text, chunk, wrong):
    batch = [text.lay(100, 0.5, key) for key in ("53817", "11112")]
    hits = find_keys(Oracle(make_model(), batch, wrong), batch, "on", chunk)
    for row in hits:
        assert row.tolist() == [False] * wrong + [True] * (5 - wrong)


@pytest.mark.parametrize("mode", ["on", "off", "shuffled"])
def test_pieces_of_any_size_give_the_same(text, mode):
    model = make_model(memory_update="delta")
    batch = [text.lay(150, depth, key) for depth, key in ((0.1, "53817"), (0.9, "11112"), (0.5, "90909"))]
    expected = torch.stack(find_keys(model, batch, mode, 1_000))
    for chunk in (1, 16, 37, 149, 150):
        assert torch.equal(torch.stack(find_keys(model, batch, mode, chunk)), expected)


def test_an_exact_match_is_what_greedy_generation_would_write(text):
    """Teacher-forced hits tell it without generating: checked on prompts whose continuation is taken as the key."""
    model = make_model()
    laid = text.lay(150, 0.5, "53817")
    prompt = laid.ids[: laid.answer_start].tolist()
    written = list(
        generate_text(model, prompt, lambda ids: "".join(map(chr, ids)), GenerationSettings(max_new_tokens=5))
    )
    laid.ids[laid.answer_start :] = [ord(piece) for piece in written]
    hits = find_keys(model, [laid, text.lay(150, 0.5, "53817")], "on", 64)
    assert hits[0].all()
    laid.ids[laid.answer_start] += 1
    assert not find_keys(model, [laid, laid], "on", 64)[0][0]


def test_memory_off_is_the_model_without_its_memory_and_is_put_back():
    model, ids = make_model(), torch.randint(0, 50, (2, 70))
    before = model(ids).logits
    with read_with(model, "off") as cache:
        off = model(ids, past_key_values=cache).logits
    model_off = make_model(turn_on_memory=False)
    model_off.load_state_dict(model.state_dict())
    torch.testing.assert_close(off, model_off(ids).logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(model(ids).logits, before), "the memory is on again"
    assert (off - before)[:, 16:].abs().amax() > 1e-2


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_shuffled_rows_hear_their_neighbour_and_nobody_else(rule):
    model, ids = make_model(memory_update=rule, first_segment="bypass"), torch.randint(0, 50, (3, 70))
    on = model(ids, past_key_values=InfiniCache(model.config)).logits
    shuffled = model(ids, past_key_values=ShuffledCache(model.config)).logits
    torch.testing.assert_close(shuffled[:, :16], on[:, :16], rtol=1e-5, atol=1e-5)
    assert (shuffled - on)[:, 16:].abs().amax(-1).min() > 1e-4
    same = ids[:1].expand(3, -1)
    copies = model(same, past_key_values=ShuffledCache(model.config)).logits
    torch.testing.assert_close(copies, on[:1].expand_as(copies), rtol=1e-5, atol=1e-5)  # a copy's memory is one's own


def test_one_text_alone_is_never_shuffled(text):
    """It would be answered by its own memory, and look as if the memory of another served as well."""
    model = make_model()
    with pytest.raises(ValueError, match="two or more"):
        model(torch.randint(0, 50, (1, 70)), past_key_values=ShuffledCache(model.config))
    for samples, batch_size in ((3, 2), (5, 2), (2, 50)):
        settings = PasskeySettings(lengths=[60], depths=1, samples=samples, batch_size=batch_size)
        assert evaluate_passkey(model, text, settings).cells[60, 0.5, "shuffled"].trials == samples


def test_a_result_counts_every_text_by_depth_and_by_distance(text):
    model = make_model()
    settings = PasskeySettings(lengths=[80, 160], depths=3, samples=7, batch_size=3, chunk_tokens=50)
    seen = []
    result = evaluate_passkey(model, text, settings, lambda done, total: seen.append((done, total)))
    assert result.modes == ("on", "off", "shuffled")
    assert set(result.cells) == {(n, d, m) for n in (80, 160) for d in (0, 0.5, 1) for m in result.modes}
    assert {score.trials for score in result.cells.values()} == {7}
    trials = {(n, span): score.trials for (n, span, mode), score in result.distances.items() if mode == "off"}
    # 160 tokens: asked for in segment 9, told up to token 34, 86 and 139, in segments 2, 5 and 8
    assert {span: count for (n, span), count in trials.items() if n == 160} == {1: 7, 3: 14}
    ends = [text.lay(160, depth, "53817").fact_end for depth in (0, 0.5, 1)]
    assert [154 // 16 - (end - 1) // 16 for end in ends] == [7, 4, 1]
    assert sum(trials.values()) == 42
    assert seen[-1] == (240 * 21, 240 * 21)
    assert evaluate_passkey(model, text, settings).to_dict() == result.to_dict(), "the same keys every time"


def test_a_result_is_told_in_lines_json_and_a_picture(text, tmp_path):
    settings = PasskeySettings(lengths=[80], depths=3, samples=2)
    result = evaluate_passkey(make_model(), text, settings)
    lines = "\n".join(result_lines(result))
    for word in ("memory on", "memory off", "memory shuffled", "Chance", "segments"):
        assert word in lines
    write_json(result, tmp_path / "out" / "passkey.json", checkpoint="mine")
    value = json.loads((tmp_path / "out" / "passkey.json").read_text())
    assert value["checkpoint"] == "mine"
    assert len(value["by_depth"]) == 9
    assert value["by_depth"][0].keys() >= {"exact_match", "exact_match_interval", "token_accuracy", "depth", "length"}
    assert write_heat_map(result, tmp_path / "out" / "passkey.png")
    assert (tmp_path / "out" / "passkey.png").read_bytes().startswith(b"\x89PNG")


def test_a_plain_model_is_the_baseline_with_full_attention(text):
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    assert memory_modes(model) == ("full",)
    assert memory_modes(make_model(turn_on_memory=False)) == ("off",)
    batch = [text.lay(90, 0.5, key) for key in ("53817", "11112")]
    whole = find_keys(model, batch, "full", 1_000)
    assert torch.equal(torch.stack(find_keys(model, batch, "full", 17)), torch.stack(whole))
    result = evaluate_passkey(model, text, PasskeySettings(lengths=[80], depths=2, samples=2))
    assert "full attention" in "\n".join(result_lines(result))


def test_wilsons_interval_is_right_at_both_ends_and_between():
    assert wilson(0, 50) == pytest.approx((0, 0.0713), abs=1e-4)
    assert wilson(50, 50) == pytest.approx((0.9287, 1), abs=1e-4)
    assert wilson(45, 50) == pytest.approx((0.7864, 0.9565), abs=1e-4)
    assert wilson(0, 0) == (0, 1)


def test_chance_is_what_the_best_fixed_guess_reaches(text):
    result = evaluate_passkey(make_model(), text, PasskeySettings(lengths=[80], depths=1, samples=2, digits=3))
    assert result.chance_exact == pytest.approx(1 / 900)
    assert result.chance_token == pytest.approx((1 / 9 + 2 / 10) / 3, abs=0.01)


def test_spans_double():
    numbers = torch.tensor([0, 1, 2, 3, 4, 7, 8, 1_000_000])
    assert [span_name(int(span)) for span in span_of(numbers)] == [
        *("0", "1", "2-3", "2-3", "4-7", "4-7", "8-15", "524288-1048575")
    ]


@pytest.mark.parametrize(
    "wrong",
    [{"lengths": []}, {"lengths": [0]}, {"samples": 1}, {"batch_size": 1}, {"shots": 4}, {"depths": 0}, {"digits": 0}],
    ids=str,
)
def test_settings_that_cannot_be_asked_are_refused(wrong):
    with pytest.raises(SettingsError):
        PasskeySettings(**{"lengths": [80], **wrong})


def test_a_length_that_is_too_short_is_refused_before_the_others_are_read(text):
    class NeverRead:
        config = make_model().config

    with pytest.raises(SettingsError, match="needs 54 tokens"):
        evaluate_passkey(NeverRead(), text, PasskeySettings(lengths=[2_000, 50]))
