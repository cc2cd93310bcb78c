"""Tiny models of transformers with attn_implementation="cute_fa": the logits of "sdpa" and "eager", or a refusal."""

from __future__ import annotations

import pytest
import torch

import cute_fa
from cute_fa.compat.transformers import attention, mask

transformers = pytest.importorskip("transformers", reason="an extra: pip install 'cute_fa[transformers]'")

SIZES = {"vocab_size": 97, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}  # fmt: skip
# The largest logit is about 1; bf16 keeps 8 bits of it, and two layers round some ten times.
TOLERANCE = 0.04


@pytest.fixture(scope="module", autouse=True)
def registered():
    cute_fa.register()


def build(family: str, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(config, dtype=torch.bfloat16)
    return model.eval()


MODELS = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    # Softcap, and a window in every other layer.
    "gemma2": ("Gemma2", {"sliding_window": 7, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 64}),
}


@pytest.fixture(params=MODELS)
def model(request):
    family, changes = MODELS[request.param]
    return build(family, **changes)


def peer_of(model) -> str:
    """The implementation to compare with: "sdpa" where transformers has it for the model."""
    return "eager" if "Gemma2" in type(model).__name__ else "sdpa"


def logits(model, implementation: str, tokens, **inputs):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(tokens, **inputs).logits.float()


def tokens_of(batch: int, length: int):
    return torch.randint(2, 97, (batch, length), generator=torch.Generator().manual_seed(1))


def left_padded(lengths):
    tokens = tokens_of(len(lengths), max(lengths))
    padding = torch.ones_like(tokens)
    for row, length in enumerate(lengths):
        tokens[row, : max(lengths) - length] = 0
        padding[row, : max(lengths) - length] = 0
    return tokens, padding


def test_prefill(model):
    tokens = tokens_of(2, 23)
    got = logits(model, "cute_fa", tokens)
    assert got.abs().max() > 0.2
    for other in {"eager", peer_of(model)}:
        assert (got - logits(model, other, tokens)).abs().max() < TOLERANCE


@pytest.mark.parametrize("right", [False, True])
def test_padding_in_a_batch(model, right):
    tokens, padding = left_padded([23, 9, 1])
    if right:
        tokens, padding = tokens.flip(1), padding.flip(1)
    expected = logits(model, peer_of(model), tokens, attention_mask=padding)
    got = logits(model, "cute_fa", tokens, attention_mask=padding)
    assert (got - expected)[padding.bool()].abs().max() < TOLERANCE


def test_padding_says_as_much_as_its_absence(model):
    """A padded sequence gives the logits that it gives alone."""
    tokens, padding = left_padded([23, 9])
    got = logits(model, "cute_fa", tokens, attention_mask=padding)
    alone = logits(model, "cute_fa", tokens[1:, 14:])
    assert (got[1:, 14:] - alone).abs().max() < TOLERANCE


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("lengths", [[12], [12, 5]])
def test_generation_with_a_cache(model, cache, lengths):
    tokens, padding = left_padded(lengths)
    options = {"attention_mask": padding, "max_new_tokens": 4, "do_sample": False, "output_logits": True,
               "return_dict_in_generate": True, "cache_implementation": cache, "disable_compile": True}  # fmt: skip
    results = {}
    for implementation in ("cute_fa", peer_of(model)):
        model.set_attn_implementation(implementation)
        results[implementation] = model.generate(tokens, **options)
    for step, (got, expected) in enumerate(zip(*(results[name].logits for name in results), strict=True)):
        assert (got.float() - expected.float()).abs().max() < TOLERANCE, f"step {step}"
        chosen = [result.sequences[:, tokens.shape[1] : tokens.shape[1] + step + 1] for result in results.values()]
        if not torch.equal(*chosen):
            break  # two logits closer than the tolerance: from here on the texts differ


def test_a_prompt_in_chunks(model):
    """Queries behind a cache: the mask is at the bottom right."""
    tokens = tokens_of(1, 23)
    expected = logits(model, peer_of(model), tokens)
    model.set_attn_implementation("cute_fa")
    with torch.no_grad():
        first = model(tokens[:, :9], use_cache=True)
        second = model(tokens[:, 9:], cache=first.cache).logits.float()
    assert (second - expected[:, 9:]).abs().max() < TOLERANCE


def test_an_encoder_with_padding():
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=97, hidden_size=128, num_hidden_layers=2, num_attention_heads=2,
                                     intermediate_size=128)  # fmt: skip
    bert = transformers.BertModel._from_config(config, dtype=torch.bfloat16).eval()
    tokens, padding = left_padded([23, 9])
    states = {}
    for implementation in ("sdpa", "cute_fa"):
        bert.set_attn_implementation(implementation)
        with torch.no_grad():
            states[implementation] = [
                bert(tokens.flip(1), attention_mask=padding.flip(1)).last_hidden_state[padding.flip(1).bool()],
                bert(tokens).last_hidden_state,
            ]
    for got, expected in zip(states["cute_fa"], states["sdpa"], strict=True):
        assert (got.float() - expected.float()).abs().max() < 4 * TOLERANCE  # layer norms: values up to 4


@pytest.mark.parametrize(
    "family, changes, inputs, match",
    [
        ("Gemma2", {"attn_logit_softcapping": 5000.0}, {}, r"softcap must be 0 \(off\).*got 5000\.0"),
        ("Llama", {}, {"attention_mask": torch.ones(1, 1, 23, 23).double()},
         r"attention_mask must be torch\.bool, torch\.float32 or torch\.bfloat16, got torch\.float64"),
        ("Llama", {"head_dim": 20}, {}, r"q must have a head dimension \(its last\) that is a multiple of 8 .*got 20"),
        ("Llama", {}, {"output_attentions": True}, r"output_attentions must be None for cute_fa"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(family, changes, inputs, match):
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=match):
        logits(build(family, **changes), "cute_fa", tokens_of(1, 23), **inputs)


@pytest.mark.parametrize(
    "family, inputs",
    [
        ("Llama", {"attention_mask": torch.rand(1, 1, 23, 23) < 0.7}),
        ("Llama", {"attention_mask": torch.randn(1, 1, 23, 23).bfloat16()}),
        ("Llama", {"position_ids": torch.arange(23)[None] % 10, "use_cache": False}),  # packed sequences
        ("Mistral", {"attention_mask": torch.tensor([[0] * 5 + [1] * 4 + [0] * 3 + [1] * 11])}),  # a hole in a window
    ],
)
def test_patterns_of_ones_own(family, inputs):
    model = build(family, **({"sliding_window": 7} if family == "Mistral" else {}))
    expected = logits(model, "sdpa", tokens_of(1, 23), **inputs)
    got = logits(model, "cute_fa", tokens_of(1, 23), **inputs)
    if inputs.get("attention_mask") is not None and inputs["attention_mask"].dim() == 2:
        real = inputs["attention_mask"].bool()
        got, expected = got[real], expected[real]
    assert (got - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("window", [22, 23, 24])
def test_windows_at_the_length_of_the_prompt(window):
    model = build("Mistral", sliding_window=window)
    expected = logits(model, "sdpa", tokens_of(1, 23))
    assert (logits(model, "cute_fa", tokens_of(1, 23)) - expected).abs().max() < TOLERANCE


def test_sinks_and_windows_of_gpt_oss():
    """Its layers have a sink for every head, and every other one a window."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        **{**SIZES, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 7, "rope_scaling": None}
    )
    model = transformers.GptOssForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    for padding in ({}, {"attention_mask": left_padded([23, 9])[1]}):
        tokens = left_padded([23, 9])[0] if padding else tokens_of(2, 23)
        difference = logits(model, "cute_fa", tokens, **padding) - logits(model, "eager", tokens, **padding)
        real = padding["attention_mask"].bool() if padding else torch.ones(2, 23, dtype=torch.bool)
        assert difference[real].abs().max() < TOLERANCE


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_layer_asks_for_its_window_itself(is_causal, generator):
    """transformers counts the query's own key: a window of 23 is one of 22 to the left."""
    q = torch.randn(1, 2, 23, 64, generator=generator).to(torch.bfloat16)
    options = {"attention_mask": None, "is_causal": is_causal}
    o, _ = attention(torch.nn.Module(), q, q, q, sliding_window=9, **options)
    turned = q.transpose(1, 2)
    assert torch.equal(o, cute_fa.forward(turned, turned, turned, causal=is_causal, window_size=(8, 8)))


def test_a_bias_of_positions_and_padding(generator):
    q = torch.randn(2, 2, 23, 64, generator=generator).to(torch.bfloat16)
    bias = torch.randn(1, 2, 23, 23, generator=generator)
    padding = left_padded([23, 9])[1].bool()[:, None]
    o, _ = attention(torch.nn.Module(), q, q, q, padding, position_bias=bias)
    both = bias.masked_fill(~padding[:, None], -torch.inf)
    exact = torch.nn.functional.scaled_dot_product_attention(*(tensor.float() for tensor in (q, q, q)), both)
    assert (o.float() - exact.transpose(1, 2)).abs().max() <= 2 * torch.finfo(q.dtype).eps * q.abs().max()


def test_training_needs_a_backward():
    model = build("Llama")
    model.set_attn_implementation("cute_fa")
    with pytest.raises(ValueError, match="q must not require gradients"):
        model(tokens_of(1, 9), labels=tokens_of(1, 9))
    gradients = {}
    try:
        cute_fa.register(backward="sdpa")
        for implementation in ("cute_fa", "sdpa"):
            model.set_attn_implementation(implementation)
            model.zero_grad()
            model(tokens_of(1, 9), labels=tokens_of(1, 9)).loss.backward()
            gradients[implementation] = model.model.layers[0].self_attn.q_proj.weight.grad.float()
    finally:
        cute_fa.register()
    difference = (gradients["cute_fa"] - gradients["sdpa"]).abs().max()
    assert difference < 0.05 * gradients["sdpa"].abs().max()


def test_a_mask_for_more_queries_than_keys_is_refused():
    from transformers.masking_utils import causal_mask_function

    from cute_fa.compat.transformers import mask

    with pytest.raises(NotImplementedError, match=r"kv_length must reach the last query \(9 keys\), got 7"):
        mask(1, 9, 7, mask_function=causal_mask_function)


def test_long_patterns_are_looked_at_in_pieces():
    from transformers.masking_utils import and_masks, causal_mask_function, sliding_window_overlay

    def window(size):
        return and_masks(sliding_window_overlay(size), causal_mask_function)

    assert mask(1, 1500, 1500, mask_function=window(1500), local_size=1500) is None
    shape = (1, 1499, 1500)
    assert mask(1, 1500, 1500, mask_function=window(1499), local_size=1499).shape == shape
    assert mask(1, 1500, 1500, mask_function=window(1499), local_size=1498).shape == (1, 1, 1500, 1500)
