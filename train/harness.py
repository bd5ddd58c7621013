"""The three requests of lm-evaluation-harness, answered by a model of this project; nothing of it needs PyTorch.

lm-eval 0.4.13 lists no torch among its dependencies, and `lm_eval.api.model` and `lm_eval.simple_evaluate` import without it
(it is used for several ranks only, where the harness gathers; here it always sees one). lm-eval is not a dependency of this
project: pip install lm-eval==0.4.13. Its tasks fetch their data from the Hugging Face hub.

What is scored is what lm-eval's own models score: spaces at the end of a context go to the continuation, both are tokenized
together, and an empty context is BOS, or EOS where the tokenizer has no BOS; contexts that are too long lose their beginning.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp4jax import bits
from models import llama
from train import generate, perplexity, sharding, step
from train.errors import InputError


class Harness:
    """Answers requests, objects whose `args` are (context, continuation), (text,) or (context, options)."""

    def __init__(self, model: Any, *, batch_size: int = 8):
        self.model, self.window = model, model.settings.model.max_seq_len
        self.prefix = model.tokenizer.bos
        if self.prefix is None:
            self.prefix = next(iter(sorted(model.tokenizer.eos)), None)
        self.size = batch_size + -batch_size % sharding.split(model.mesh, "batch")
        self._figures = losses_and_misses(model)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return (log-likelihood of the continuation in nats, whether greedy decoding would produce it) of each request."""
        pieces = []
        for context, continuation in (request.args for request in requests):
            before, after = self._encode_pair(context, continuation)
            tokens = np.array([*before, *after], np.int32)
            if len(after) > self.window:
                raise InputError(f"a continuation of {len(after)} tokens exceeds max_seq_len={self.window}")
            kept = tokens[-(self.window + 1) :]
            pieces.append(perplexity.Piece(kept, len(kept) - len(after)))
        return [(-nll, misses == 0) for nll, misses in self._score(pieces)]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-likelihood of each whole text, in windows of max_seq_len, the last of them full."""
        pieces, owners = [], []
        for owner, (text,) in enumerate(request.args for request in requests):
            tokens = np.array([self._prefix(), *self.model.tokenizer.encode(text)], np.int32)
            for begin, scored, end in perplexity.spans(len(tokens), window=self.window, stride=self.window):
                begin = max(min(begin, end - self.window), 0)
                pieces.append(perplexity.Piece(tokens[begin : end + 1], scored - begin))
                owners.append(owner)
        nats: list[list[float]] = [[] for _ in requests]
        for (nll, _), owner in zip(self._score(pieces), owners, strict=True):
            nats[owner].append(nll)
        return [-math.fsum(each) for each in nats]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return the greedy or sampled continuation of each context, cut before the first of the `until` strings."""
        return [self._generate(*request.args, seed=seed) for seed, request in enumerate(requests)]

    def _generate(self, context: str, options: dict[str, Any], *, seed: int) -> str:
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else until
        length = options.get("max_gen_toks", 256)
        room = self.window - length - 1  # beside BOS
        if room < 1:
            raise InputError(f"max_gen_toks={length} leaves no room for a context in max_seq_len={self.window}")
        temperature = options.get("temperature", 0.0) if options.get("do_sample") else 0.0
        how = {"max_tokens": length, "temperature": temperature, "seed": seed, "keep": room}
        found = generate.generate(self.model, context, **how)["continuation"]
        ends = [found.index(stop) for stop in until if stop and stop in found]
        return found[: min(ends)] if ends else found

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        encode = self.model.tokenizer.encode
        moved = len(context) - len(context.rstrip())
        if moved:
            context, continuation = context[:-moved], context[-moved:] + continuation
        if not context:
            return [self._prefix()], list(encode(continuation))
        both, before = list(encode(context + continuation)), list(encode(context))
        front = [] if self.model.tokenizer.bos is None else [self.model.tokenizer.bos]
        return front + both[: len(before)], both[len(before) :]

    def _prefix(self) -> int:
        if self.prefix is None:
            raise InputError("a text without a context needs a tokenizer with BOS or EOS")
        return self.prefix

    def _score(self, pieces: Sequence[perplexity.Piece]) -> list[tuple[float, float]]:
        equal = step.looks_ahead(self.model.settings.numerics)
        sums = perplexity.score(self._figures, pieces, batch_size=self.size, equal=equal)
        return [(float(nll), float(misses)) for nll, misses in sums.T]


def losses_and_misses(model: Any) -> perplexity.Figures:
    """Return (tokens_BT1, row) → (nll_BT, misses_BT): 1 where another token than the next one is the likeliest."""
    config = dataclasses.replace(model.settings.model, attention="dot_product", attention_block=0, loss_chunk=0)
    apply = llama.Llama(config, step.eval_numerics(model.settings.numerics).dot).apply

    @jax.jit
    def program(params, tokens_BT1, words):
        def one(tokens_T1):
            logits_BTV: Any = apply({"params": params}, tokens_T1[None, :-1], bits.step_key(words, 0))
            nll_BT = llama.cross_entropy(logits_BTV, tokens_T1[None, 1:])
            return nll_BT[0], jnp.argmax(logits_BTV[0], -1) != tokens_T1[1:]

        return jax.vmap(one)(tokens_BT1)

    def figures(tokens_BT1: np.ndarray, row: int) -> tuple[np.ndarray, ...]:
        del row  # nothing is drawn
        nll, misses = program(model.state.params, sharding.put_batch(model.mesh, tokens_BT1), model.state.seed)
        return np.asarray(nll), np.asarray(misses)

    return figures


def run(model: Any, tasks: Sequence[str], *, limit: int | None, batch_size: int) -> dict[str, Any]:
    """Return lm-evaluation-harness's results of the tasks."""
    try:
        import lm_eval  # pyright: ignore[reportMissingImports]
        from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InputError(f"--tasks needs lm-evaluation-harness: pip install lm-eval==0.4.13 ({error})") from None

    class Adapter(Harness, LM):
        def __init__(self):
            LM.__init__(self)
            Harness.__init__(self, model, batch_size=batch_size)

    found = lm_eval.simple_evaluate(model=Adapter(), tasks=list(tasks), limit=limit, bootstrap_iters=0)
    return {task: {k: v for k, v in result.items() if isinstance(v, int | float)} for task, result in found["results"].items()}
