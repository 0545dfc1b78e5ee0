"""Laws of streaming: whatever the pieces, the logits are those of the whole text, and the state never grows."""

import copy

import pytest
import torch

from packhorse.models import (
    InfiniCache,
    InfiniLlamaConfig,
    InfiniLlamaForCausalLM,
    InfiniQwen2Config,
    InfiniQwen2ForCausalLM,
    InfiniQwen3Config,
    InfiniQwen3ForCausalLM,
    gate_parameters,
    split_into_segments,
)

VOCAB = 61
SEGMENT = 8
FAMILIES = {
    "llama": (InfiniLlamaConfig, InfiniLlamaForCausalLM),
    "qwen2": (InfiniQwen2Config, InfiniQwen2ForCausalLM),
    "qwen3": (InfiniQwen3Config, InfiniQwen3ForCausalLM),
}


@pytest.fixture(autouse=True)
def _one_thread_seed_and_no_gradients():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def make_model(family="llama", **settings):
    config, model = FAMILIES[family]
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "eos_token_id": None,
    }
    infini_attention = {"segment_length": SEGMENT, "balance_init_type": "randn", **settings}
    model = model(config(**sizes, infini_attention=infini_attention)).eval()
    for name, parameter in model.named_parameters():  # biases start at 0 and norms at 1, where nobody would miss them
        if name.endswith("bias") or "norm" in name:
            parameter.add_(torch.randn_like(parameter) / 2)
    return model


def stream(model, input_ids, lengths, **inputs) -> torch.Tensor:
    cache = InfiniCache(model.config)
    return torch.cat([model(chunk, past_key_values=cache, **inputs).logits for chunk in input_ids.split(lengths, 1)], 1)


def assert_same(got, expected):
    scale = expected.abs().max().clamp(min=1)  # relative to the largest logit: sums run in another order
    torch.testing.assert_close(got / scale, expected / scale, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rule", ["linear", "delta"])
@pytest.mark.parametrize("family", FAMILIES)
def test_streaming_equals_the_whole_text_at_every_split_point(family, rule):
    """A prompt of any length, then token by token: before, at and behind each end of a segment."""
    model = make_model(family, memory_update=rule)
    length = 3 * SEGMENT + 2
    input_ids = torch.randint(0, VOCAB, (2, length))
    expected = model(input_ids).logits
    for prompt in range(1, length + 1):
        assert_same(stream(model, input_ids, [prompt] + [1] * (length - prompt)), expected)


@pytest.mark.parametrize("chunk", [1, 3, 7, 8, 9, 16, 29])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"memory_update": "delta"},
        {"first_segment": "gated"},
        {"memory_qk_norm": True, "memory_update": "delta"},
        {"turn_on_memory": False},
        {"balance_act_type": "orig_tanh", "memory_update": "delta", "first_segment": "gated"},
        {"segment_length": 1},
        {"segment_length": 100},
    ],
)
def test_streaming_in_chunks_equals_the_whole_text(settings, chunk):
    model = make_model(**settings)
    input_ids = torch.randint(0, VOCAB, (2, 29))
    assert_same(stream(model, input_ids, chunk), model(input_ids).logits)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.bfloat16, 0.1)])
def test_streaming_keeps_the_dtype_and_its_precision(dtype, tolerance):
    model = make_model(memory_update="delta").to(dtype)
    input_ids = torch.randint(0, VOCAB, (2, 29))
    got, expected = stream(model, input_ids, 5), model(input_ids).logits
    assert got.dtype == dtype
    assert (got - expected).abs().max() < tolerance * expected.abs().max()


def test_streaming_without_what_came_before_is_another_text():
    """The control: it is the cache that makes the pieces one text."""
    model = make_model()
    input_ids = torch.randint(0, VOCAB, (1, 29))
    expected = model(input_ids).logits
    apart = torch.cat([model(chunk).logits for chunk in input_ids.split(SEGMENT, 1)], 1)
    assert (apart - expected)[:, SEGMENT:].abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("rule", ["linear", "delta"])
@pytest.mark.parametrize("lengths", [[29], [11, 18], [1] * 29, [8, 8, 13]])
def test_padding_anywhere_changes_no_row_of_a_stream(lengths, rule):
    """Rows end their segments at different tokens; some are nothing but padding for a while."""
    model = make_model(memory_update=rule)
    masks = ["0" * 26 + "111", "0" * 10 + "1" * 19, "1" * 29, "1" * 9 + "0" * 20, "011" * 9 + "01", "0" * 13 + "1" * 16]
    attention_mask = torch.tensor([[int(x) for x in mask] for mask in masks])
    input_ids = torch.randint(0, VOCAB, attention_mask.shape)
    cache, logits, start = InfiniCache(model.config), [], 0
    for length in lengths:
        end = start + length
        full_or_new = attention_mask[:, :end] if length % 2 else attention_mask[:, start:end]
        logits.append(model(input_ids[:, start:end], attention_mask=full_or_new, past_key_values=cache).logits)
        start = end
    logits = torch.cat(logits, 1)
    assert_same(logits, model(input_ids, attention_mask=attention_mask).logits)  # masked tokens too: they hear nobody
    for row, is_real in enumerate(attention_mask.bool()):
        assert_same(logits[row, is_real], model(input_ids[row : row + 1, is_real]).logits[0])


@pytest.mark.parametrize("rule", ["linear", "delta"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompt_length", [1, 8, 13])
def test_greedy_generation_equals_reading_everything_again(family, rule, prompt_length):
    model = make_model(family, memory_update=rule)
    prompt = torch.randint(0, VOCAB, (2, prompt_length))
    generated = model.generate(prompt, max_new_tokens=20, do_sample=False)
    expected = prompt
    for _ in range(20):
        expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generated, expected)
    assert torch.equal(model.generate(prompt, max_new_tokens=20, do_sample=False, use_cache=False), expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False, "num_beams": 4},
        {"do_sample": False, "num_beams": 4, "num_return_sequences": 3},
        {"do_sample": True, "top_k": 7, "num_return_sequences": 3},
        {"do_sample": True, "num_beams": 3},
        {"do_sample": False, "prefill_chunk_size": 5},
    ],
    ids=str,
)
def test_every_way_of_generating_equals_itself_without_a_cache(family, options):
    """Beams change places at every token, and their memories must follow them."""
    model = make_model(family, memory_update="delta")
    prompt = torch.randint(0, VOCAB, (2, 13))
    attention_mask = torch.ones_like(prompt)
    attention_mask[0, :6] = 0
    results = []
    for use_cache in (True, False):
        torch.manual_seed(1)
        if not use_cache:
            options = {name: value for name, value in options.items() if name != "prefill_chunk_size"}
        results.append(
            model.generate(prompt, attention_mask=attention_mask, max_new_tokens=14, use_cache=use_cache, **options)
        )
    assert torch.equal(*results)


def test_generation_calls_the_model_with_one_token_at_a_time():
    """A cache that nobody uses would pass all the laws above."""
    model, widths = make_model(), []
    model.model.register_forward_pre_hook(
        lambda module, args, inputs: widths.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    model.generate(torch.randint(0, VOCAB, (1, 10)), max_new_tokens=5, do_sample=False)
    assert widths == [10, 1, 1, 1, 1]


def test_left_padded_prompts_generate_what_each_generates_alone():
    model = make_model()
    prompts = [torch.randint(0, VOCAB, (length,)) for length in (1, 8, 18)]
    input_ids, attention_mask = torch.full((3, 18), 7), torch.zeros(3, 18, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        input_ids[row, -len(prompt) :], attention_mask[row, -len(prompt) :] = prompt, 1
    together = model.generate(input_ids, attention_mask=attention_mask, max_new_tokens=20, do_sample=False)
    for row, prompt in enumerate(prompts):
        alone = model.generate(prompt[None], max_new_tokens=20, do_sample=False)
        assert torch.equal(together[row, -20:], alone[0, -20:])


def test_generation_goes_on_from_a_cache_and_from_embeddings():
    model, prompt = make_model(), torch.randint(0, VOCAB, (1, 13))
    expected = model.generate(prompt, max_new_tokens=20, do_sample=False)
    first = model.generate(prompt, max_new_tokens=9, do_sample=False, return_dict_in_generate=True)
    assert isinstance(first.past_key_values, InfiniCache)
    second = model.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=11, do_sample=False)
    assert torch.equal(second, expected)
    embeddings = model.get_input_embeddings()(prompt)
    assert torch.equal(model.generate(inputs_embeds=embeddings, max_new_tokens=20, do_sample=False), expected[:, 13:])


def test_generation_works_in_training_mode_with_gradient_checkpointing():
    model, prompt = make_model(), torch.randint(0, VOCAB, (1, 13))
    expected = model.generate(prompt, max_new_tokens=9, do_sample=False)
    model.train().gradient_checkpointing_enable()
    assert torch.equal(model.generate(prompt, max_new_tokens=9, do_sample=False), expected)


def test_the_state_keeps_its_size_over_a_hundred_thousand_tokens():
    segment = 500
    model = make_model(memory_update="delta", segment_length=segment)
    cache, sizes = InfiniCache(model.config), set()
    for chunk in torch.randint(0, VOCAB, (1, 100_000)).split(3_333, 1):
        logits = model(chunk, past_key_values=cache).logits
        sizes.add(cache.state_bytes)
    assert cache.get_seq_length() == 100_000
    assert logits.isfinite().all()
    keys_and_values, memory = 2 * (segment + 1) * 2 * 8, 2 * 8 * (8 + 1)
    assert sizes == {2 * 4 * (keys_and_values + memory)}  # two layers of fp32


def test_rows_can_be_picked_repeated_and_started_again():
    model = make_model()
    input_ids, rest = torch.randint(0, VOCAB, (3, 13)), torch.randint(0, VOCAB, (1, 9))
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, :5] = 0
    cache = model(input_ids, attention_mask=attention_mask, use_cache=True).past_key_values
    other = copy.deepcopy(cache)

    def goes_on(cache, rows):
        logits = model(rest.expand(len(rows), -1), past_key_values=cache).logits
        for got, row in zip(logits, rows, strict=True):
            text = torch.cat([input_ids[row : row + 1, 5 if row == 0 else 0 :], rest], 1)
            assert_same(got, model(text).logits[0, -9:])

    cache.batch_select_indices(torch.tensor([2, 0]))
    goes_on(cache, [2, 0])
    other.batch_repeat_interleave(2)
    goes_on(other, [0, 0, 1, 1, 2, 2])
    other.reset()
    assert_same(model(input_ids, past_key_values=other).logits, model(input_ids).logits)


def test_a_cache_is_made_when_asked_for_and_never_with_gradients():
    model, input_ids = make_model(), torch.randint(0, VOCAB, (1, 9))
    assert model(input_ids).past_key_values is None
    assert isinstance(model(input_ids, use_cache=True).past_key_values, InfiniCache)
    with torch.enable_grad():
        assert model(input_ids, use_cache=True).past_key_values is None
        with pytest.raises(ValueError, match="no gradients"):
            model(input_ids, past_key_values=InfiniCache(model.config))


def test_what_a_stream_would_answer_wrongly_is_refused():
    model, input_ids = make_model(), torch.randint(0, VOCAB, (2, 9))
    cache = model(input_ids, use_cache=True).past_key_values
    packed = torch.cat([torch.arange(4), torch.arange(5)])[None]
    with pytest.raises(ValueError, match="count its tokens from 0"):
        model(input_ids, position_ids=packed, use_cache=True)
    with pytest.raises(ValueError, match="count its tokens from 0"):
        model(input_ids, position_ids=torch.arange(9)[None], past_key_values=cache)
    with pytest.raises(ValueError, match="holds 2 rows"):
        model(input_ids[:1], past_key_values=cache)
    with pytest.raises(ValueError, match="has 11 columns"):
        model(input_ids, attention_mask=torch.ones(2, 11), past_key_values=cache)
    with pytest.raises(ValueError, match="segments"):
        model(input_ids, segments=split_into_segments((2, 9), SEGMENT), past_key_values=cache)
    with pytest.raises(ValueError, match="forget"):
        cache.crop(1)
    assert cache.get_seq_length() == 9, "nothing of what was refused has been read"
    assert not cache.is_croppable
    assert not cache.is_compileable
    assert len(gate_parameters(model)) == len(cache)
