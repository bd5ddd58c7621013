"""Evaluate any checkpoint on any text: a model with its tokenizer, opened from a workdir or a Hugging Face directory."""

import dataclasses
import logging
import math
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from train import config, corpus, data, loop, perplexity, prepared, pretrained, sharding, sources, step
from train.config import Settings
from train.errors import InputError
from train.tokenizer import Tokenizer

log = logging.getLogger(__name__)
LONG = 2048  # positions from which on attention and loss are computed in blocks
BLOCK = 512


class Model(NamedTuple):
    """A model to look at. settings: in the numerics of the evaluation. about: what is reported of it. dataset: a run's own."""

    settings: Settings
    mesh: Mesh
    state: step.TrainState
    tokenizer: Tokenizer
    about: dict[str, Any]
    dataset: data.Dataset | None


def open_workdir(
    workdir: pathlib.Path,
    *,
    at: int | None = None,
    recipe: str | None = None,
    impl: str | None = None,
    ema: bool = False,
    own_data: bool = True,
) -> Model:
    """Open a checkpoint of a run, the newest by default, in the numerics of its last step or in `recipe`.

    own_data=False: without the run's dataset, for other text.
    """
    settings, dataset, tokenizer, mesh, checkpoints = loop.open_run(workdir, own_data=own_data)
    if ema and not settings.optimizer.ema_decay:
        raise InputError(f"{workdir} has no averaged weights for --ema: it was trained with optimizer.ema_decay=0")
    if impl is not None:
        settings = config.with_impl(settings, impl)
    in_recipe = None if recipe is None else config.in_recipe(settings, recipe)
    at = at if at is not None else checkpoints.latest()
    assert at is not None
    state, run = checkpoints.restore(at, step.abstract_state(settings, mesh))
    checkpoints.close()
    state = step.averaged(state) if ema else state
    settings = in_recipe or settings.phase(max(at - 1, 0))  # that of the last step done
    which = ", averaged weights" if ema else ""
    log.info("evaluating step %d of %s, trained in %s, in %s%s", at, workdir, run["recipe"], settings.recipe_name, which)
    about = {"step": at, "tokens": run["tokens"], "recipe": settings.recipe_name}
    return Model(settings, mesh, state, tokenizer, about, dataset)


def open_directory(directory: pathlib.Path, *, recipe: str | None, impl: str | None, dtype: str) -> Model:
    """Open a Hugging Face directory, without quantization where no recipe is named."""
    opened = pretrained.open_model(directory, recipe=recipe or "none", impl=impl or "auto", dtype=dtype)
    settings, _, _, tokenizer = opened
    log.info("evaluating %s in %s; BOS %s, EOS %s", directory, settings.recipe_name, tokenizer.bos, sorted(tokenizer.eos))
    return Model(*opened, {"model": str(directory), "recipe": settings.recipe_name}, None)


def for_length(settings: Settings, length: int) -> Settings:
    """Return the settings for sequences of another length: in blocks where it is long, as a whole where they do not divide."""
    model, block = settings.model, BLOCK if length >= LONG else 0
    wanted = (model.attention_block or block, model.loss_chunk or block)
    attention, loss = (size if size and length % size == 0 else 0 for size in wanted)
    kind = "blockwise" if attention else "dot_product"
    return dataclasses.replace(
        settings, model=dataclasses.replace(model, attention=kind, attention_block=attention, loss_chunk=loss)
    )


def losses(model: Model, *, stochastic: bool = False) -> perplexity.Figures:
    """Return (tokens_BT1, number of the first row) → (nll_BT,), compiled once for each length."""
    programs: dict[int, Any] = {}

    def figures(tokens_BT1: np.ndarray, row: int) -> tuple[np.ndarray, ...]:
        length = tokens_BT1.shape[1] - 1
        if length not in programs:
            programs[length] = step.make_eval_step(for_length(model.settings, length), model.mesh, stochastic=stochastic)
        tokens, state = sharding.put_batch(model.mesh, tokens_BT1), model.state
        return (np.asarray(programs[length](state.params, tokens, np.uint32(row), state.step, state.seed)),)

    return figures


def own_loss(model: Model, *, batch_size: int = 0, stochastic: bool = False) -> float:
    """Return the validation loss of a run on its own data, as training computes it."""
    assert model.dataset is not None
    batches = step.val_batches(model.settings, model.mesh, model.dataset, batch_size=batch_size)
    eval_step = step.make_eval_step(model.settings, model.mesh, stochastic=stochastic)
    return step.validation_loss(eval_step, model.mesh, model.state, batches)


class Options(NamedTuple):
    """How texts are evaluated. window, stride: 0 for the model's own seq_len, and for the window. bos: "auto", "yes", "no"."""

    window: int = 0
    stride: int = 0
    separate: bool = False
    bos: str = "auto"
    batch_size: int = 8
    stochastic: bool = False
    protocol: str = ""
    text_key: str = "text"


def evaluate(model: Model, names: Sequence[str], options: Options) -> list[dict[str, Any]]:
    """Return what is to be said of each dataset: a glob of text files, or a prepared directory, of which the validation split.

    Without names, of the run's own validation split.
    """
    protocol = perplexity.PROTOCOLS.get(options.protocol)
    options = options._replace(window=protocol.window, stride=protocol.window) if protocol else options
    window = options.window or model.settings.data.seq_len
    options = options._replace(window=window, stride=options.stride or window)
    if window > model.settings.model.max_seq_len:
        raise InputError(f"{window=} is above the model's max_seq_len={model.settings.model.max_seq_len}")
    size = options.batch_size + -options.batch_size % sharding.split(model.mesh, "batch")
    figures, equal = losses(model, stochastic=options.stochastic), step.looks_ahead(model.settings.numerics)
    results = []
    for source in names or [""]:
        text, about = _read(model, source, options)
        streams = [perplexity.first_sequences(text.streams[0], protocol)] if protocol else text.streams
        largest, vocab_size = max((int(s.max()) for s in streams if len(s)), default=0), model.settings.model.vocab_size
        if largest >= vocab_size:
            raise InputError(f"{source}: token id {largest} is not below the model's {vocab_size=}")
        pieces = perplexity.cut(streams, window=window, stride=options.stride)
        end = model.settings.model.document_end
        if not perplexity.count(pieces, document_end=end):
            raise InputError(f"{source}: no document has a token to predict")
        log.info("%s: %d windows of up to %d tokens, stride %d", about["dataset"], len(pieces), window, options.stride)
        (nats,) = perplexity.score(figures, pieces, batch_size=size, equal=equal, document_end=end)
        tokens, known = perplexity.count(pieces, document_end=end), text.tokens and text.bytes
        found = perplexity.summary(math.fsum(nats), tokens, text.bytes / text.tokens if known else None)
        result = {**about, "window": window, "stride": options.stride, "sequences": len(pieces), **found}
        if protocol:
            whole = len(pieces) == protocol.sequences
            if not whole:
                log.warning("%s: %d of the protocol's %d sequences", source, len(pieces), protocol.sequences)
            reached = found["nats_per_token"] <= protocol.target if whole else None
            result |= {"bits_per_byte": None, "protocol": options.protocol, "target": protocol.target, "reached": reached}
        results.append(result)
    return results


def _read(model: Model, source: str, options: Options) -> tuple[perplexity.Text, dict[str, Any]]:
    """Return the streams of a source and what is reported of them."""
    if options.protocol and options.bos == "yes":
        raise InputError(f"--bos=yes: --protocol={options.protocol} has no BOS")
    bos = None if options.protocol else model.tokenizer.front(options.bos)
    if (pathlib.Path(source) / "manifest.json").exists() and source:
        return _read_prepared(model, pathlib.Path(source), options, bos)
    if source:
        documents = sources.read_files(sources.match_files(source), text_key=options.text_key)
        separator = "" if options.protocol else corpus.SEPARATOR
        text = perplexity.encode(documents, model.tokenizer, separate=options.separate, bos=bos, separator=separator)
        how = "separate" if options.separate else f"joined by {separator!r}"
        return text, {"dataset": source, "documents": len(documents), "joined": how, "bos": bos}
    if model.dataset is None or options.separate:
        raise InputError("--data=FILES is missing: the text to evaluate")
    size = sum(len(model.tokenizer.decode(tokens).encode()) for tokens in model.dataset.val)
    marks = [mark for mark in (model.tokenizer.bos_id, model.tokenizer.eos_id) if mark is not None]
    tokens = sum(int(np.sum(~np.isin(tokens, marks))) for tokens in model.dataset.val)
    about = {"dataset": "validation split", "documents": None, "joined": "as in training", "bos": None}
    return perplexity.Text(list(model.dataset.val), tokens, size), about


def _read_prepared(
    model: Model, path: pathlib.Path, options: Options, bos: int | None
) -> tuple[perplexity.Text, dict[str, Any]]:
    """Return the validation split of prepared data, with the marks it has; BOS is put in front where none is there."""
    found = prepared.open_directory(path)
    prepared.verify(found, splits=("val",))
    if how := pretrained.different_ids(model.tokenizer, found.tokenizer()):
        raise InputError(f"{path} was prepared with another tokenizer than the model's: {how}")
    ids, ends, of = found.ids["val"], found.ends["val"], found.manifest["splits"]["val"]
    marks = found.manifest["documents"]
    if options.protocol and marks != "none":
        raise InputError(f"{path} was prepared with documents={marks!r}, --protocol={options.protocol} has documents='none'")
    streams = np.split(ids, ends[:-1]) if options.separate else [ids]
    bos = None if "bos" in marks else bos
    if bos is not None:
        streams = [np.concatenate([np.array([bos], ids.dtype), stream]) for stream in streams]
    of_ids = any(name.endswith(".idx") for piece in of["pieces"] for name, _ in piece["files"])  # nobody knows their text
    own = of["tokens"] - of["documents"] * (("bos" in marks) + ("eos" in marks))
    text = perplexity.Text(streams, own, 0 if of_ids else of["text_bytes"])
    joined = "separate" if options.separate else f"as prepared: {marks}"
    return text, {"dataset": str(path), "documents": of["documents"], "joined": joined, "bos": bos}
