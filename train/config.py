"""Configuration: one ConfigDict with typed defaults, resolved once into frozen settings before anything runs.

Sections: model (models.llama.LlamaConfig), data (train.data.DataConfig), optimizer (train.optimizer.OptimizerConfig), mesh
(train.sharding.MeshConfig), train and diagnose (TrainConfig and DiagnoseConfig below), and quant: `recipe` names the base;
every leaf of a recipe stands there as a typed placeholder (quant.fprop.lhs.rounding, quant.wgrad.rotation.size, …) whose value,
if set, goes on top. quant.recipe, quant.rules and quant.schedule take recipes as `fp4jax.recipes.parse` reads them
("mxfp4_h16:fprop=bf16").
"""

import dataclasses
import itertools
import json
import math
from typing import Any, NamedTuple

from ml_collections import ConfigDict, config_dict

from fp4jax import recipes
from fp4jax.numerics import Numerics
from fp4jax.ops.kernels import REDUCE
from fp4jax.recipe import GEMMS, Recipe, from_dict, leaves, override
from models.llama import LINEAR_PATHS, LlamaConfig
from train.data import DataConfig
from train.errors import InputError, check_types
from train.optimizer import OptimizerConfig
from train.sharding import MeshConfig

MAY_CHANGE_ON_RESUME = (
    "train.steps",
    "train.eval_every",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.keep_every",
    "train.log_every",
    "train.target_loss",
    "train.skip_nonfinite",
    "train.eval_batch_size",
    "mesh.data",
    "mesh.fsdp",
    "mesh.context",
    "mesh.tensor",
    "data.cache_dir",
    "data.verify",
    "data.files",
    "data.val_files",
    "diagnose.every",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The run: lengths in optimizer steps, sizes in sequences.

    Attributes:
      steps: optimizer steps in total. batch_size: sequences per step. accumulation: microbatches per step.
      grad_reduce_dtype: in what the gradients of the linear layers' weights are summed over the devices that split the tokens:
        "float32", "bfloat16" (half the traffic; every device's share is rounded), or "auto": in the dtype of the product,
        float32 for a quantized GEMM, model.dtype for one that is not, such as lm_head's. Embedding and norms: float32.
      eval_every, checkpoint_every: 0 means only at the end. keep_checkpoints: the newest N are kept, 0 keeps all. keep_every:
        besides them, those of every so many steps, 0 none.
      eval_batch_size: sequences per evaluation call, 0 means those of a microbatch (it does not change the result).
      target_loss: stop once the validation loss (nats per token) is at or below it; 0 means never.
      skip_nonfinite: so many steps in a row whose loss or gradient is not finite are left out, counted in the step but with
        the state unchanged, before the run stops.
      skip_spikes: leave out a step whose loss or gradient norm lies more than so many standard deviations above the mean of the
        last spike_window steps, once half of them were seen; 0 means never. OLMo-core's SkipStepOptimizer takes 6 and 128.
      initial_weights: a Llama in Hugging Face's layout that step 0 begins with, in place of random weights; its shape must be
        that of `model`, its token ids those of the data. A run that is resumed reads its checkpoint only.
      seed: initial weights, data order and random bits. log_every: steps between log lines without a terminal.
    """

    steps: int = 1000
    batch_size: int = 16
    accumulation: int = 1
    grad_reduce_dtype: str = "auto"
    eval_every: int = 0
    eval_batch_size: int = 0
    checkpoint_every: int = 0
    keep_checkpoints: int = 3
    keep_every: int = 0
    target_loss: float = 0.0
    skip_nonfinite: int = 0
    skip_spikes: float = 0.0
    spike_window: int = 128
    initial_weights: str = ""
    seed: int = 0
    log_every: int = 50

    @property
    def microbatch(self) -> int:
        """Sequences of a microbatch."""
        return self.batch_size // self.accumulation

    def __post_init__(self):
        check_types("train", self)
        if self.grad_reduce_dtype not in REDUCE:
            raise InputError(f"train.grad_reduce_dtype={self.grad_reduce_dtype!r} is not one of {', '.join(REDUCE)}")
        for name, value in dataclasses.asdict(self).items():
            if not isinstance(value, str) and not (
                math.isfinite(value) and value >= (name in ("steps", "batch_size", "accumulation", "log_every"))
            ):
                raise InputError(f"train.{name}={value} is out of range")
        if self.spike_window < 4:
            raise InputError(f"train.spike_window={self.spike_window} is below 4")
        if self.seed >= 2**32:  # jax.random.key would drop the upper bits
            raise InputError(f"train.seed={self.seed} is not below 2^32")
        if self.batch_size % self.accumulation:
            raise InputError(f"train.batch_size={self.batch_size} is not a multiple of {self.accumulation=}")
        if self.keep_every and not self.keep_checkpoints:
            raise InputError(f"train.keep_every={self.keep_every} has no effect: keep_checkpoints=0 keeps all")
        if self.target_loss and not self.eval_every:
            raise InputError(f"train.target_loss={self.target_loss} has no effect: eval_every=0 evaluates at the end only")
        if self.spike_window != TrainConfig.spike_window and not self.skip_spikes:
            raise InputError(f"train.spike_window={self.spike_window} has no effect without skip_spikes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiagnoseConfig:
    """Diagnosis during training; it changes nothing that is trained. every: optimizer steps, 0 means never."""

    every: int = 0

    def __post_init__(self):
        check_types("diagnose", self)
        if self.every < 0:
            raise InputError(f"diagnose.every={self.every} is negative")


class Phase(NamedTuple):
    """One entry of a schedule: from optimizer step `start` on, `recipe`, with the last `keep_last` blocks in BF16."""

    start: int
    name: str
    recipe: Recipe
    keep_last: int


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything a run needs, checked. recipe_name: the base recipe, with a * when leaves were overridden."""

    model: LlamaConfig
    data: DataConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    mesh: MeshConfig
    numerics: Numerics
    recipe_name: str
    schedule: tuple[Phase, ...] = ()
    diagnose: DiagnoseConfig = DiagnoseConfig()

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved settings as plain JSON data; `from_json_dict` reads them back."""
        sections = ("model", "data", "optimizer", "train", "mesh", "diagnose")
        n = self.numerics
        quant = {"recipe": self.recipe_name, "impl": n.impl, "strict": n.strict, "exempt": list(n.exempt)}
        quant["resolved"], quant["digest"] = n.recipe.to_dict(), n.recipe.digest()
        quant |= {"keep_first": n.keep_first, "keep_last": n.keep_last, "residuals": n.residuals}
        quant["rules"] = [[pattern, recipe.to_dict()] for pattern, recipe in n.rules]
        quant["schedule"] = [[start, name, recipe.to_dict()] for start, name, recipe, _ in self.schedule]
        quant["schedule_keep_last"] = [phase.keep_last for phase in self.schedule]
        return {**{s: dataclasses.asdict(getattr(self, s)) for s in sections}, "quant": quant}

    def phase(self, step: int) -> "Settings":
        """Return the settings with the recipe of the phase that optimizer step `step` (from 0) belongs to.

        The result knows all phases, as the train state has the history of every one of them.
        """
        if not self.schedule:
            return self
        n = self.numerics
        base = () if self.schedule[0].start == 0 else (Phase(0, self.recipe_name, n.recipe, n.keep_last),)
        schedule = (*base, *self.schedule)
        now = [phase for phase in schedule if phase.start <= step][-1]
        numerics = dataclasses.replace(n, recipe=now.recipe, keep_last=now.keep_last)
        return dataclasses.replace(self, recipe_name=now.name, numerics=numerics, schedule=schedule)

    def phases(self) -> list["Settings"]:
        """Return the settings of every phase in order, the first from step 0."""
        return [self.phase(start) for start in (0, *(phase.start for phase in self.schedule if phase.start))]


def default_config() -> ConfigDict:
    """Return the unlocked defaults: a 1 M-parameter byte-level Llama; config files change what they need and lock it."""
    recipe_leaves: dict[str, Any] = {}
    for path, value in leaves(Recipe()):
        *parents, leaf = path.split(".")
        node = recipe_leaves
        for name in parents:
            node = node.setdefault(name, {})
        node[leaf] = config_dict.placeholder(
            bool if leaf == "pad" else int if leaf in ("block", "across", "size") else type(value)
        )
    model = LlamaConfig(vocab_size=256, d_model=128, n_layers=4, n_heads=4, n_kv_heads=2, d_ff=352)
    return ConfigDict(
        {
            "model": dataclasses.asdict(model),
            "data": dataclasses.asdict(DataConfig()),
            "optimizer": dataclasses.asdict(OptimizerConfig()),
            "quant": {
                "recipe": "mxfp4_h16",
                "impl": "auto",
                "strict": True,
                "exempt": ("lm_head",),  # patterns of layers that stay in the model's compute dtype
                "rules": (),  # (pattern, recipe) pairs, first match wins: (("mlp/down", "bf16"), ("attn/*", ":fprop=bf16"))
                "keep_first": 0,  # blocks in BF16
                "keep_last": config_dict.placeholder(int),  # blocks in BF16; unset: what the recipe's paper keeps
                "residuals": "operands",  # what the backward keeps of x and w; "packed": their FP4 codes
                "schedule": (),  # (step, recipe) pairs: from that optimizer step on, instead of quant.recipe
                **recipe_leaves,
            },
            "train": dataclasses.asdict(TrainConfig()),
            "mesh": dataclasses.asdict(MeshConfig()),
            "diagnose": dataclasses.asdict(DiagnoseConfig()),
        }
    )


def resolve_recipe(quant: Any) -> tuple[Recipe, str]:
    """Return (recipe, name) of the quant section: the named base with the set leaves on top."""
    tree = quant.to_dict()
    changes: dict[str, Any] = {}

    def collect(prefix: str, node: dict[str, Any]):
        for key, value in node.items():
            if isinstance(value, dict):
                collect(f"{prefix}{key}.", value)
            elif value is not None:
                changes[prefix + key] = value

    collect("", {g: tree[g] for g in GEMMS})
    try:
        base = recipes.parse(quant.recipe)
        recipe = override(base, changes)
    except ValueError as error:
        raise InputError(f"quant: {error}") from None
    return recipe, quant.recipe + ("*" if recipe != base else "")


def kept_blocks(recipe: str, n_layers: int) -> int:
    """Return how many of a model's last blocks the paper of a named recipe keeps in BF16."""
    return math.ceil(recipes.ENTRIES[recipe.partition(":")[0]].keep_last * n_layers)


def resolve_numerics(quant: Any, n_layers: int) -> tuple[Numerics, str, tuple[Phase, ...]]:
    """Return (numerics, name of the recipe, schedule) of the quant section; raises InputError."""
    recipe, name = resolve_recipe(quant)
    exempt, rules, schedule = (tuple(quant[key]) for key in ("exempt", "rules", "schedule"))
    if any(type(pattern) is not str for pattern in exempt):
        raise InputError(f"quant.exempt={exempt} must hold path patterns")
    for key, pairs, kind in (("rules", rules, str), ("schedule", schedule, int)):
        if not all(isinstance(p, tuple | list) and len(p) == 2 and type(p[0]) is kind and type(p[1]) is str for p in pairs):
            raise InputError(f"quant.{key}={pairs} must hold ({'pattern' if kind is str else 'step'}, recipe) pairs")
    steps = [step for step, _ in schedule]
    if any(a >= b for a, b in itertools.pairwise([0, *steps])):
        raise InputError(f"quant.schedule: the steps {steps} must be positive and rise")
    keep_last = kept_blocks(quant.recipe, n_layers) if quant.keep_last is None else quant.keep_last
    try:
        numerics = Numerics(
            recipe,
            exempt,
            quant.impl,
            quant.strict,
            rules=tuple((pattern, recipes.parse(text, recipe)) for pattern, text in rules),
            keep_first=quant.keep_first,
            keep_last=keep_last,
            n_layers=n_layers,
            residuals=quant.residuals,
        )
        numerics.check_patterns(LINEAR_PATHS)
        named = ((step, name + text if text.startswith(":") else text, text) for step, text in schedule)
        parsed = tuple(
            Phase(
                step,
                full_name,
                recipes.parse(text, recipe),
                kept_blocks(full_name, n_layers) if quant.keep_last is None else quant.keep_last,
            )
            for step, full_name, text in named
        )
    except ValueError as error:
        raise InputError(f"quant: {error}") from None
    return numerics, name, parsed


def resolve(config: Any) -> Settings:
    """Return the checked settings of a config; raises InputError with one line for anything that cannot run."""
    try:
        sections = config.to_dict()
        train = TrainConfig(**sections["train"])
        optimizer = OptimizerConfig(**sections["optimizer"])
        optimizer = dataclasses.replace(optimizer, decay_steps=optimizer.decay_steps or train.steps)
        model = LlamaConfig(**sections["model"])
        numerics, name, schedule = resolve_numerics(config.quant, model.n_layers)
        settings = Settings(
            model,
            DataConfig(**sections["data"]),
            optimizer,
            train,
            MeshConfig(**sections["mesh"]),
            numerics,
            name,
            schedule,
            DiagnoseConfig(**sections["diagnose"]),
        )
    except (KeyError, OSError, TypeError, ValueError) as error:  # OSError: there was no config file to read
        raise InputError(f"config: {error}") from None
    _check_together(settings)
    return settings


def _check_together(s: Settings) -> None:
    """Raise InputError when sections do not fit each other."""
    o = s.optimizer
    if o.warmup_steps + o.cooldown_steps >= o.decay_steps + (o.schedule == "wsd"):
        cooldown = f" and cooldown_steps={o.cooldown_steps}" if o.cooldown_steps else ""
        raise InputError(
            f"optimizer.warmup_steps={o.warmup_steps}{cooldown} do not end before the decay's end ({o.decay_steps}): "
            "a shorter run needs a shorter --config.optimizer.warmup_steps too"
        )
    if s.schedule and s.schedule[-1].start >= s.train.steps:
        raise InputError(
            f"quant.schedule: step {s.schedule[-1].start} is not before the run's end, train.steps={s.train.steps}"
        )
    if s.data.source != "prepared" and s.data.vocab_size > s.model.vocab_size:  # a manifest is read with the data
        raise InputError(
            f"model.vocab_size={s.model.vocab_size} is below the {s.data.vocab_size} ids of tokenizer {s.data.tokenizer!r}"
        )
    if s.data.seq_len > s.model.max_seq_len:
        raise InputError(f"data.seq_len={s.data.seq_len} is above model.max_seq_len={s.model.max_seq_len}")
    histories = (history for phase in s.phases() for history in phase.numerics.init_history(("lm_head",)))
    if s.model.loss_chunk and any(histories):
        raise InputError("model.loss_chunk does not go with delayed scaling of lm_head: its chunks have one history")
    if s.model.remat == "packed" and s.numerics.residuals != "packed":
        raise InputError("model.remat='packed' saves nothing without quant.residuals='packed'")
    for name in ("loss_chunk", "attention_block"):
        size = getattr(s.model, name)
        if size and s.data.seq_len % size:
            raise InputError(f"data.seq_len={s.data.seq_len} is not a multiple of model.{name}={size}")


def from_json_dict(stored: dict[str, Any]) -> Settings:
    """Return the settings that `Settings.to_dict` wrote; raises InputError when they are not of this version."""
    try:
        quant = stored["quant"]
        model = LlamaConfig(**stored["model"])
        numerics = Numerics(
            from_dict(quant["resolved"]),
            tuple(quant["exempt"]),
            quant["impl"],
            quant["strict"],
            rules=tuple((pattern, from_dict(recipe)) for pattern, recipe in quant["rules"]),
            keep_first=quant["keep_first"],
            keep_last=quant["keep_last"],
            n_layers=model.n_layers,
            residuals=quant["residuals"],
        )
        return Settings(
            model,
            DataConfig(**stored["data"]),
            OptimizerConfig(**stored["optimizer"]),
            TrainConfig(**stored["train"]),
            MeshConfig(**stored["mesh"]),
            numerics,
            quant["recipe"],
            tuple(
                Phase(start, name, from_dict(recipe), kept)
                for (start, name, recipe), kept in zip(quant["schedule"], quant["schedule_keep_last"], strict=True)
            ),
            DiagnoseConfig(**stored.get("diagnose", {})),  # absent in a run of an older version
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"config.json does not hold a config of this version: {error}") from None


def in_recipe(settings: Settings, text: str) -> Settings:
    """Return the settings with another recipe for all layers, but for the last blocks that its paper keeps in BF16.

    Rules and schedule are dropped. Raises InputError for an unknown recipe.
    """
    try:
        recipe, kept = recipes.parse(text), kept_blocks(text, settings.model.n_layers)
        numerics = dataclasses.replace(settings.numerics, recipe=recipe, rules=(), keep_first=0, keep_last=kept)
    except (KeyError, ValueError) as error:
        raise InputError(f"recipe {text!r}: {error}") from None
    return dataclasses.replace(settings, numerics=numerics, recipe_name=text, schedule=())


def with_impl(settings: Settings, impl: str) -> Settings:
    """Return the settings with another implementation of the GEMMs; raises InputError for an unknown one."""
    try:
        return dataclasses.replace(settings, numerics=dataclasses.replace(settings.numerics, impl=impl))
    except ValueError as error:
        raise InputError(f"--impl: {error}") from None


def check_cooldown(old: dict[str, Any], new: dict[str, Any], at: int) -> None:
    """Raise InputError when a run of step `at` moves the cool-down of "wsd" after it began, before or after the move.

    old, new: `to_dict` results that `differences` finds nothing in.
    """
    ends = [tree["optimizer"]["decay_steps"] for tree in (old, new)]
    begins = [end - tree["optimizer"]["cooldown_steps"] for end, tree in zip(ends, (old, new), strict=True)]
    if new["optimizer"]["schedule"] == "wsd" and (begins, ends) != (begins[::-1], ends[::-1]) and at > min(begins):
        raise InputError(
            f"the cool-down was from step {begins[0]} to {ends[0]} and would now be from {begins[1]} to {ends[1]}, the newest "
            f"checkpoint is of step {at}: to move it, remove the checkpoints after step {min(begins)}"
        )


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return "key: old → new" for every leaf of two `to_dict` results that may not change when a run is resumed.

    What the older one does not have yet was the default: a run of an older version goes on.
    """

    def flat(prefix: str, node: Any) -> dict[str, Any]:
        if not isinstance(node, dict):
            return {prefix: node}
        return {k: v for key, value in node.items() for k, v in flat(f"{prefix}.{key}" if prefix else key, value).items()}

    defaults = {name: section for name, section in default_config().to_dict().items() if name != "quant"}
    a, b, known = (flat("", json.loads(json.dumps(tree))) for tree in (old, new, defaults))
    a = known | a
    free = (*MAY_CHANGE_ON_RESUME, "quant.digest")
    if a["optimizer.schedule"] == b["optimizer.schedule"] == "wsd":  # the end may move: see `check_cooldown`
        free += ("optimizer.decay_steps", "optimizer.cooldown_steps")
    keys = [k for k in {**a, **b} if a.get(k) != b.get(k) and k not in free]
    if "quant.recipe" in keys:  # its leaves differ as a matter of course
        keys = [k for k in keys if not k.startswith("quant.resolved.")]
    notes = {"optimizer.decay_steps": " (it follows train.steps unless it is set)"}
    return [f"{k}: {a.get(k)} → {b.get(k)}{notes.get(k, '')}" for k in keys]
