"""Continue a text, to look at what a model says: one jitted loop over a buffer of fixed length, without a key/value cache.

Every token costs a forward pass over the whole buffer. The buffer's rest is zeros, which nothing sees but a scale or a mean
over the whole sequence, in recipes that have one. A kernel (impl=triton) on several devices is not supported.
Shape key: T positions of the buffer, V vocabulary, S ids that end a text.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp4jax import bits
from models import llama
from train import step
from train.config import Settings
from train.errors import InputError

LENGTHS = 64  # the buffer is a multiple of it, so that few are compiled


@functools.lru_cache(maxsize=8)
def make_sampler(settings: Settings, *, top_k: int = 0) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Return the jitted (params, tokens_T, start, last, stops_S, temperature, seed, words) → (tokens_T, end).

    tokens_T[start:end] is drawn, up to `last` or to the first token of stops_S. temperature 0 takes the likeliest token, the
    first of equals; else softmax(logits / temperature) over the top_k likeliest, 0 for all. seed, words: of the draws, and of
    the run.
    """
    model = dataclasses.replace(settings.model, attention="dot_product", attention_block=0, loss_chunk=0)
    apply = llama.Llama(model, step.eval_numerics(settings.numerics).dot).apply

    def choose(logits_V, temperature, key):
        if top_k:
            logits_V = jnp.where(logits_V >= jax.lax.top_k(logits_V, top_k)[0][-1], logits_V, -jnp.inf)
        drawn = jax.random.categorical(key, logits_V / jnp.where(temperature > 0, temperature, 1.0))
        return jnp.where(temperature > 0, drawn, jnp.argmax(logits_V)).astype(jnp.int32)

    def sample(params, tokens_T, start, last, stops_S, temperature, seed, words):
        def goes_on(carry):
            _, at, stopped = carry
            return (at < last) & ~stopped

        def extend(carry):
            tokens_T, at, _ = carry
            logits_BTV: Any = apply({"params": params}, tokens_T[None], bits.step_key(words, 0))
            token = choose(logits_BTV[0, at - 1], temperature, jax.random.fold_in(jax.random.key(seed), at))
            return tokens_T.at[at].set(token), at + 1, jnp.any(stops_S == token)

        tokens_T, end, _ = jax.lax.while_loop(goes_on, extend, (tokens_T, start, jnp.array(False)))
        return tokens_T, end

    return jax.jit(sample)


def generate(
    model: Any,
    prompt: str,
    *,
    max_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
    keep: int | None = None,
    bos: str = "auto",
) -> dict[str, Any]:
    """Return a prompt, its continuation and what it was drawn by, of a `train.evaluation.Model`.

    The prompt begins with the tokenizer's BOS, if it has one (bos: as `Tokenizer.front` takes it); a token that ends a text
    ends the continuation and is not shown.
    keep: only so many of the prompt's last tokens are given to the model, beside BOS.
    """
    front = [] if (first := model.tokenizer.front(bos)) is None else [first]
    try:
        encoded = model.tokenizer.encode(prompt)
    except (TypeError, UnicodeEncodeError):
        raise InputError(f"the text {prompt!r} is not UTF-8") from None
    ids = np.array([*front, *encoded[max(len(encoded) - keep, 0) if keep is not None else 0 :]], np.int32)
    config, length = model.settings.model, len(ids) + max_tokens
    if not len(ids):
        raise InputError("--generate: an empty text needs a tokenizer with BOS")
    if length > config.max_seq_len:
        raise InputError(f"{len(ids)} tokens of text and {max_tokens=} exceed the model's max_seq_len={config.max_seq_len}")
    if not 0 <= temperature < math.inf or not 0 <= top_k <= config.vocab_size or not 0 <= seed < 2**32:
        raise InputError(f"{temperature=}, {top_k=} or {seed=} is out of range")
    stops = sorted(model.tokenizer.eos) or [-1]
    sampler = make_sampler(model.settings, top_k=top_k)
    buffer = np.pad(ids, (0, max_tokens + -length % LENGTHS))
    arguments = (
        np.int32(len(ids)),
        np.int32(length),
        np.array(stops, np.int32),
        np.float32(temperature),
        np.uint32(seed),
        model.state.seed,
    )
    tokens, end = sampler(model.state.params, buffer, *arguments)
    drawn = np.asarray(tokens)[len(ids) : int(end)]
    shown = drawn[:-1] if len(drawn) and drawn[-1] in stops else drawn
    settings = {"temperature": temperature, "top_k": top_k, "seed": seed}
    given, decode = [*ids[len(front) :]], model.tokenizer.decode
    continuation = decode([*given, *shown])[len(decode(given)) :]  # together: some tokenizers drop a text's first space
    return {"prompt": prompt, "continuation": continuation, "tokens": len(drawn), "ended": len(shown) < len(drawn), **settings}
