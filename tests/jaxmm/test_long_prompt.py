"""A prompt of 32,000 tokens: in chunks, without anything of its square."""

import resource

import numpy as np
import pytest
import torch
import transformers

from jaxmm.gather import gather
from jaxmm.request import Request, SamplingParams
from tests.checkpoints import checkpoint
from tests.engines import make_engine

NUM_TOKENS = 32_000
RELATIVE = 1e-3
"""Float32 sums over 32,000 keys in two orders."""


@pytest.mark.slow
def test_prompt_of_32000_tokens_equals_transformers_in_bounded_memory() -> None:
    ids = np.random.default_rng(0).integers(0, 250, NUM_TOKENS)
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        checkpoint("qwen2_vl"), dtype=torch.float32, attn_implementation="sdpa"
    )
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(ids[None]), logits_to_keep=1).logits[0, -1]
    with make_engine(
        "qwen2_vl",
        **{"max_model_len": NUM_TOKENS + 8, "pages.page_size": 64, "pages.num_pages": 512},
    ) as on:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        sampling = SamplingParams(max_tokens=1, logprobs=20, ignore_eos=True)
        request = Request(id="long", token_ids=ids.tolist(), sampling=sampling)
        [result] = gather(on, [request])
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        num_ids = on.tokenizer.vocab_size
    expected = torch.log_softmax(logits[:num_ids], -1)
    assert result.logprobs is not None
    for token, value in result.logprobs[0].top:
        assert abs(float(expected[token]) - value) < RELATIVE * max(1.0, abs(value))
    # one head's square of scores would take 4 GB
    assert grown_kib < 200 << 10
