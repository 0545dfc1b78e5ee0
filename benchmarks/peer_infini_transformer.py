"""How does lucidrains' infini-transformer-pytorch compare: which of our laws does it keep, and how fast is it?

Both are used as their users would, and nothing of the peer is copied. Install it beside, it is no dependency:

    pip install --no-deps --target /tmp/peer infini-transformer-pytorch einops einx rotary-embedding-torch tqdm
    pip install --no-deps --target /tmp/peer frozendict
    PYTHONPATH=/tmp/peer python benchmarks/peer_infini_transformer.py [--threads 2]

The last line is the ratio of a training step, peer / ours: 4 layers, 256 wide, 4 heads, 1,024 tokens, segments of 128.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable

SEGMENT, VOCAB = 16, 61


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if importlib.util.find_spec("infini_transformer_pytorch") is None:
        print("infini-transformer-pytorch is not installed; nothing was compared. How to install it is said by --help.")
        sys.exit(0)
    import torch
    from report import print_header, print_result

    torch.set_num_threads(options.threads)
    print_header("torch", "infini-transformer-pytorch")
    rows = []
    for law, ours, peer in LAWS:
        told = [verdict(check) for check in (ours, peer)]
        rows.append(f"{law}: ours {told[0]}, peer {told[1]}")
        print(rows[-1], flush=True)
    seconds = step_seconds(options.repeats)
    rows.append(", ".join(f"{name} {took * 1e3:.0f} ms a step" for name, took in seconds.items()))
    print(rows[-1])
    print_result(rows, seconds["peer"] / seconds["ours"], "torch", "infini-transformer-pytorch")


def verdict(check: Callable[[], bool] | None) -> str:
    """Whether a law is kept; an exception is its name."""
    if check is None:
        return "has no such input"
    try:
        return "keeps it" if check() else "breaks it"
    except Exception as error:  # whatever it is, it is the finding
        return f"fails with {type(error).__name__}"


def make_ours(**settings):
    import torch

    from packhorse.models import InfiniLlamaConfig, InfiniLlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 85, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": settings.pop("groups", 4), "initializer_range": 0.3}
    infini_attention = {"segment_length": SEGMENT, "memory_update": "delta", **settings}
    return InfiniLlamaForCausalLM(InfiniLlamaConfig(**sizes, **heads, infini_attention=infini_attention)).eval()


def make_peer(ignore_index: int = -1, open_gates: bool = True):
    import torch
    from infini_transformer_pytorch import InfiniTransformer, InfiniTransformerWrapper

    torch.manual_seed(0)
    model = InfiniTransformer(num_tokens=VOCAB, dim=32, depth=2, dim_head=8, heads=4, use_mem_delta_rule=True)
    for layer in model.layers:
        layer[0].to_qkv.weight.data.mul_(3)  # far from uniform attention
        if open_gates:
            layer[0].fastweight_mem.head_gates.data.zero_()
    return InfiniTransformerWrapper(model, segment_length=SEGMENT, ignore_index=ignore_index).eval()


def text(rows: int = 2, length: int = 3 * SEGMENT + 2):
    import torch

    return torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


def read_peer(peer, input_ids):
    """The peer's logits of whole texts, segment by segment as its own training does."""
    import torch

    memories, logits = None, []
    for piece in input_ids.split(SEGMENT, 1):
        out, _, memories = peer.model(piece, past_memories=memories, return_new_memories=True)
        logits.append(out)
    return torch.cat(logits, 1)


def ours_is_causal() -> bool:
    model, input_ids = make_ours(), text()
    return causal(lambda x: model(x).logits, input_ids)


def peer_is_causal() -> bool:
    peer, input_ids = make_peer(), text()
    return causal(lambda x: read_peer(peer, x), input_ids)


def causal(read: Callable, input_ids) -> bool:
    changed = input_ids.clone()
    changed[:, SEGMENT + 3] = changed[:, SEGMENT + 3] % (VOCAB - 1) + 1
    moved = (read(changed) - read(input_ids)).abs().amax((0, 2)) > 1e-6
    return not moved[: SEGMENT + 3].any() and bool(moved[SEGMENT + 3 :].all())


def ours_ignores_labels() -> bool:
    input_ids = text()
    labels = input_ids.clone()
    labels[:, 5] = -100
    return bool(make_ours()(input_ids, labels=labels).loss.isfinite())


def peer_ignores_labels() -> bool:
    input_ids = text()
    input_ids[:, 5] = -1  # its documented ignore_index; inputs and labels are one tensor there
    return bool(make_peer()(input_ids).isfinite())


def ours_survives_a_segment_without_labels() -> bool:
    input_ids = text()
    labels = input_ids.clone()
    labels[:, SEGMENT : 2 * SEGMENT + 1] = -100
    return bool(make_ours()(input_ids, labels=labels).loss.isfinite())


def peer_survives_a_segment_without_labels() -> bool:
    input_ids = text()
    input_ids[:, SEGMENT : 2 * SEGMENT + 1] = 0
    return bool(make_peer(ignore_index=0)(input_ids).isfinite())


def ours_reads_its_prompt() -> bool:
    import torch

    model, prompt = make_ours(), text()
    expected = model(prompt).logits[:, -1]
    scores = model.generate(
        prompt, max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True, eos_token_id=None
    ).logits[0]
    return bool(torch.allclose(scores, expected, atol=1e-4))


def peer_reads_its_prompt() -> bool:
    import torch

    peer, prompt, seen = make_peer(), text(), []
    hook = peer.model.register_forward_hook(lambda module, inputs, out: seen.append(out[0][:, -1]))
    peer.generate(prompt=prompt, seq_len=prompt.shape[1] + 1)
    hook.remove()
    return bool(torch.allclose(seen[0], read_peer(peer, prompt)[:, -1], atol=1e-4))


def ours_can_learn_its_gates() -> bool:
    from packhorse.models import gate_values

    return bool(gate_values(make_ours()).min() > 0.01)


def peer_can_learn_its_gates() -> bool:
    # Its gate is the share of local attention.
    layers = make_peer(open_gates=False).model.layers
    return all(bool((1 - layer[0].fastweight_mem.head_gates.sigmoid()).min() > 0.01) for layer in layers)


def ours_keeps_its_memory_in_fp32() -> bool:
    import torch

    from packhorse.models import InfiniCache

    model = make_ours()
    cache = InfiniCache(model.config)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        model(text(), past_key_values=cache)
    return all(layer.tensors["memory"].dtype == torch.float32 for layer in cache.layers)


def peer_keeps_its_memory_in_fp32() -> bool:
    import torch

    peer = make_peer()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        _, _, memories = peer.model(text(length=SEGMENT), return_new_memories=True)
    return all(x.dtype == torch.float32 for pair in memories for x in pair)


def ours_keeps_packed_documents_apart() -> bool:
    import torch

    model, one, other = make_ours(), text(1, 21), text(1, 30)
    position_ids = torch.cat([torch.arange(21), torch.arange(30)])[None]
    packed = model(torch.cat([one, other], 1), position_ids=position_ids).logits[:, 21:]
    return bool(torch.allclose(packed, model(other).logits, atol=1e-4))


def ours_ignores_padding() -> bool:
    import torch

    model, input_ids = make_ours(), text(1, 21)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), input_ids], 1)
    mask = torch.cat([torch.zeros(1, 5), torch.ones(1, 21)], 1)
    return bool(torch.allclose(model(padded, attention_mask=mask).logits[:, 5:], model(input_ids).logits, atol=1e-4))


def ours_groups_heads() -> bool:
    return bool(make_ours(groups=2)(text()).logits.isfinite().all())


LAWS: list[tuple[str, Callable, Callable | None]] = [
    ("no token changes what stands before it", ours_is_causal, peer_is_causal),
    ("ignored labels are ignored", ours_ignores_labels, peer_ignores_labels),
    (
        "a segment without labels gives a number",
        ours_survives_a_segment_without_labels,
        peer_survives_a_segment_without_labels,
    ),
    ("generation has read the whole prompt", ours_reads_its_prompt, peer_reads_its_prompt),
    ("gates start where they can learn", ours_can_learn_its_gates, peer_can_learn_its_gates),
    ("the memory stays in fp32 under autocast", ours_keeps_its_memory_in_fp32, peer_keeps_its_memory_in_fp32),
    ("a packed document gets what it gets alone", ours_keeps_packed_documents_apart, None),
    ("padding changes nothing", ours_ignores_padding, None),
    ("key/value heads may be shared", ours_groups_heads, None),
]


def step_seconds(repeats: int) -> dict[str, float]:
    """A training step of both, in turns."""
    import torch
    from bench_backends import best_of
    from infini_transformer_pytorch import InfiniTransformer, InfiniTransformerWrapper

    from packhorse.models import InfiniLlamaConfig, InfiniLlamaForCausalLM

    width, depth, heads, size, segment, vocab = 256, 4, 4, 64, 128, 4096
    peer_model = InfiniTransformer(
        num_tokens=vocab, dim=width, depth=depth, dim_head=size, heads=heads, use_mem_delta_rule=True
    )
    # Memories must not be detached: that would be another, cheaper task.
    peer = InfiniTransformerWrapper(peer_model, segment_length=segment, detach_mems_every_num_segments=10**9)
    sizes = {"vocab_size": vocab, "hidden_size": width, "intermediate_size": width * 4 * 2 // 3, "head_dim": size}
    config = InfiniLlamaConfig(
        **sizes,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        infini_attention={"segment_length": segment, "memory_update": "delta"},
    )
    ours = InfiniLlamaForCausalLM(config).train()
    input_ids = torch.randint(0, vocab, (4, 1025))

    def step_ours() -> None:
        ours.zero_grad()
        hidden = ours.model(input_ids=input_ids[:, :-1]).last_hidden_state
        torch.nn.functional.cross_entropy(ours.lm_head(hidden).flatten(0, 1), input_ids[:, 1:].flatten()).backward()

    def step_peer() -> None:
        peer.zero_grad()
        peer(input_ids, backward=True)

    return best_of({"ours": step_ours, "peer": step_peer}, repeats)


if __name__ == "__main__":
    main()
