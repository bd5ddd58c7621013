"""Hugging Face directories in training and evaluation: their weights placed on a mesh, and their tokenizer.

The tokenizer is tokenizer.json. Text is encoded without special tokens; what a model is used
to see in front of a text is `bos`, which callers put there. Not supported: tokenizer.model files, chat templates.
"""

import json
import logging
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fp4jax import bits
from models import huggingface, llama
from models.llama import LlamaConfig
from train import config, sharding, step
from train import tokenizer as tokenizer_lib
from train.config import Settings
from train.data import DataConfig
from train.errors import InputError
from train.optimizer import OptimizerConfig
from train.tokenizer import JsonTokenizer

log = logging.getLogger(__name__)
SAMPLE = "In the beginning God created the heaven and the earth.\n\n“naïve” 1234567 Ж 🙂"


class Tokenizer(JsonTokenizer):
    """A directory's tokenizer.json.

    bos_id: what its post-processor puts in front of a text; without one, bos_token of tokenizer_config.json. bos: that same id
    where add_bos_token there is true; where nothing is said, what the post-processor puts; else None. eos: the ids that end a
    text, of tokenizer_config.json, config.json and generation_config.json.
    """

    def __init__(self, directory: pathlib.Path):
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise InputError(f"{directory} has no tokenizer.json")
        try:
            super().__init__(path.read_text())
        except Exception as error:  # the library raises nothing more special
            raise InputError(f"{path} cannot be read: {error}") from None
        options = _json(directory / "tokenizer_config.json")
        prefix, added = self.prefix(), options.get("add_bos_token")
        self.bos_id = self._id_of(options.get("bos_token")) if prefix is None else prefix
        self.bos = prefix if added is None else self.bos_id if added else None
        ends = [
            token
            for found in (self._id_of(options.get("eos_token")), *(_json(directory / f).get("eos_token_id") for f in _CONFIGS))
            for token in (found if isinstance(found, list) else [found])
            if token is not None
        ]
        if not all(isinstance(token, int) and token >= 0 for token in ends):
            raise InputError(f"{directory}: eos_token_id {ends} holds something that is no token id")
        self.eos = frozenset(ends)

    def _id_of(self, token: Any) -> int | None:
        content = token.get("content") if isinstance(token, dict) else token
        return self._tokenizer.token_to_id(content) if isinstance(content, str) else None


_CONFIGS = ("config.json", "generation_config.json")


def _json(path: pathlib.Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    return found if isinstance(found, dict) else {}


def read_config(directory: pathlib.Path, **changes: Any) -> LlamaConfig:
    """Return the model of a directory; raises InputError where it is none that can be read."""
    try:
        return huggingface.read_config(directory, **changes)
    except ValueError as error:
        raise InputError(str(error)) from None


def different_ids(one: tokenizer_lib.Tokenizer, other: tokenizer_lib.Tokenizer) -> str:
    """Return how two tokenizers differ on a sample of text, "" where they do not."""
    a, b = (each.encode(SAMPLE).tolist() for each in (one, other))
    return "" if a == b else f"{SAMPLE[:20]!r} begins with {a[:4]}, not {b[:4]}"


def check(settings: Settings, tokenizer: tokenizer_lib.Tokenizer) -> None:
    """Raise InputError where train.initial_weights is not the run's model, or of another tokenizer; no weight is read."""
    directory = pathlib.Path(settings.train.initial_weights)
    differences = huggingface.same_model(settings.model, read_config(directory))
    if differences:
        raise InputError(f"train.initial_weights={directory} is another model than the run's: {'; '.join(differences)}")
    try:
        huggingface.find_tensors(directory, settings.model, huggingface.packed_format(directory))
    except ValueError as error:
        raise InputError(f"train.initial_weights: {error}") from None
    if not (directory / "tokenizer.json").exists():
        log.warning("%s has no tokenizer.json: nothing says that its token ids are those of the data", directory)
        return
    if how := different_ids(Tokenizer(directory), tokenizer):
        raise InputError(
            f"train.initial_weights={directory} knows other token ids than "
            f"data.tokenizer={settings.data.tokenizer!r} gives: {how}; its own are in {directory / 'tokenizer.json'}"
        )


def start_from(settings: Settings, mesh: Mesh, state: step.TrainState) -> step.TrainState:
    """Return the initial state with the weights of train.initial_weights in the place of random ones, which make room first."""
    directory, averages = pathlib.Path(settings.train.initial_weights), bool(state.ema)
    state = state._replace(params={}, ema={})
    params = load(directory, settings, mesh)
    log.info("step 0 has the weights of %s", directory)
    return state._replace(params=params, ema=jax.tree.map(jnp.copy, params) if averages else {})


def load(directory: pathlib.Path, settings: Settings, mesh: Mesh) -> Any:
    """Return the directory's weights as float32 parameters, each read straight into its place on the mesh."""
    model = llama.Llama(settings.model)
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, settings.data.seq_len), np.int32))["params"]
    try:
        return huggingface.load(directory, settings.model, sharding.state_shardings(mesh, shapes))
    except ValueError as error:
        raise InputError(str(error)) from None


def open_model(
    directory: pathlib.Path, *, recipe: str, impl: str = "auto", dtype: str = "float32"
) -> tuple[Settings, Mesh, step.TrainState, Tokenizer]:
    """Return a directory's model to look at, in a recipe's numerics: the state holds parameters only, and seed 0."""
    model, tokenizer = read_config(directory, dtype=dtype), Tokenizer(directory)
    if tokenizer.vocab_size > model.vocab_size:
        raise InputError(f"{directory}: tokenizer.json has {tokenizer.vocab_size} ids, the model {model.vocab_size}")
    quant: Any = config.default_config().quant
    quant.update(recipe=recipe, impl=impl)
    numerics, name, _ = config.resolve_numerics(quant, model.n_layers)
    data = DataConfig(seq_len=min(model.max_seq_len, 2048))
    mesh_config = sharding.over_all_devices(model)
    settings = Settings(model, data, OptimizerConfig(), config.TrainConfig(), mesh_config, numerics, name)
    mesh = sharding.make_mesh(mesh_config)
    params = load(directory, settings, mesh)
    state = step.TrainState(params, (), np.int32(0), {}, bits.seed_words(0), {}, {})  # pyright: ignore[reportArgumentType]
    return settings, mesh, state, tokenizer
