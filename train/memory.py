"""What one device holds during a train step, in bytes, computed from the config and the mesh; nothing is allocated.

Arguments and results are exact: they are the arrays of `train.step.make_train_step`. Temporaries are what must be alive at the
fullest of these moments, with L blocks and everything per device:

    head    saved of L blocks + logits and their gradient + the head's gradient and operand
    block   saved of L blocks + gradients so far + one block's interior and cotangents + its weights and their gradient
    update  gradients, and the clipped ones, which both moments read, or both new moments, where spikes are skipped both; of
            Muon its directions and iterates (unrolled blocks on a mesh that shards them take a third to all of what is said)

    evaluation  the largest of attention, MLP and head of a forward pass over its own batch, with the weights of one block

and over microbatches the sum of the gradients beside the first two. Compilers fuse, reorder and copy: expect tens of percent.
Shape key: M tokens of a microbatch, D, F, V model, FFN and vocabulary, N, K heads of queries and keys, H their size, U
positions of a sequence, S positions of an attention block, W weights of a block, c bytes of the compute dtype.
"""

import dataclasses
import math
from typing import Any

import jax

from fp4jax.recipe import OperandSpec, Recipe
from train import optimizer, sharding, step
from train.config import Settings
from train.errors import InputError

STEP = ("head", "block", "update")  # the moments of a train step; the others are those of evaluation
METRICS = 3  # float32 scalars that a step returns beside the state
POINTER = 8  # bytes of one entry in the table of results
# Linear layers of a block by what they read; layers of one group share a packed copy of it.
INPUTS = {"attn": ("attn/q", "attn/k", "attn/v"), "out": ("attn/o",), "mlp": ("mlp/gate", "mlp/up"), "hidden": ("mlp/down",)}


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a plan: what, how many bytes (or FLOPs) it is on one device, and the formula."""

    name: str
    value: int
    formula: str


@dataclasses.dataclass(frozen=True)
class Local:
    """What one device has of the model and of one microbatch; see the module's shape key."""

    M: int
    D: int
    F: int
    V: int
    N: int
    K: int
    H: int
    U: int
    L: int
    c: int
    fsdp: int
    context: int

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Input and output features of every linear layer of a block, those a tensor axis splits divided by it."""
        q, kv = self.N * self.H, self.K * self.H
        ends = {"attn/q": (self.D, q), "attn/k": (self.D, kv), "attn/v": (self.D, kv), "attn/o": (q, self.D)}
        return ends | {"mlp/gate": (self.D, self.F), "mlp/up": (self.D, self.F), "mlp/down": (self.F, self.D)}

    @property
    def W(self) -> int:
        return sum(k * n for k, n in self.linears.values())


def local(settings: Settings, mesh: sharding.AnyMesh, batch: int = 0) -> Local:
    """Return the sizes on one device of the mesh; batch: sequences of a call, 0 for a microbatch."""
    m, tensor, context = settings.model, mesh.shape["tensor"], mesh.shape["context"]
    batch = batch or settings.train.microbatch
    sequences = -(-batch // sharding.split(mesh, "batch"))
    heads = (m.n_heads // tensor, m.n_kv_heads // tensor, m.head_size, settings.data.seq_len)
    sizes = (sequences * settings.data.seq_len // context, m.d_model, m.d_ff // tensor, m.vocab_size // tensor)
    return Local(*sizes, *heads, m.n_layers, m.compute_dtype.itemsize, mesh.shape["fsdp"], context)


def element_bytes(spec: OperandSpec, plain: int) -> float:
    """Return the bytes per element of an operand with its block scales; plain: of one that is not quantized."""
    if spec.element is None:
        return 2 if spec.format == "bf16" else plain
    scale = {"float32": 4, "e8m0": 1, "e4m3": 1}[spec.scale]
    return spec.element.bits / 8 + (scale / (spec.block * (spec.across or 1)) if spec.block else 0)


def state_lines(settings: Settings, mesh: sharding.AnyMesh) -> list[Line]:
    """Return the arguments of the train step: the state, exactly as it is sharded, and the tokens of a step."""
    state = step.abstract_state(settings, mesh)
    kept = jax.tree_util.tree_leaves_with_path(state.opt_state)
    moments = tree_bytes([x for path, x in kept if x.ndim and "ns_coeffs" not in jax.tree_util.keystr(path)])
    rest = tree_bytes(state) - tree_bytes(state.params) - tree_bytes(state.ema) - moments
    tokens = settings.train.batch_size // sharding.split(mesh, "batch") * (settings.data.seq_len + 1)
    adam = "2 · 4 B · parameters (FP32, Adam's mean and variance)"
    lines = [
        Line("parameters", tree_bytes(state.params), "4 B · parameters of this device (FP32 master)"),
        Line("moments", moments, adam if settings.optimizer.name == "adamw" else adam + ", of Muon's matrices only one"),
        Line("averaged weights", tree_bytes(state.ema), "4 B · parameters"),
        Line("counters, seed, history", rest, "4 B each; history 96 B per block and layer"),
        Line("tokens", tokens * 4, "4 B · sequences of this device · (T + 1)"),
    ]
    return [line for line in lines if line.value]


def output_bytes(settings: Settings, mesh: sharding.AnyMesh) -> int:
    """Return the bytes of the results: the state, three metrics, and the compiler's table with a pointer to each of them."""
    leaves = jax.tree.leaves(step.abstract_state(settings, mesh))
    spike = settings.train.skip_spikes > 0  # one bool more
    return sum(map(leaf_bytes, leaves)) + METRICS * 4 + spike + POINTER * (len(leaves) + METRICS + spike)


def leaf_bytes(leaf: Any) -> int:
    """Return the bytes of a sharded array's shape on one device."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def tree_bytes(tree: Any) -> int:
    return sum(map(leaf_bytes, jax.tree.leaves(tree)))


def _recipes(settings: Settings, path: str) -> list[Recipe]:
    """Return the different recipes of one linear layer of the blocks."""
    return [recipe for recipe, _, _ in settings.numerics.recipes_of(path, ...)]


def kept_operands(settings: Settings, s: Local, remat: str) -> tuple[float, float]:
    """Return (bytes of the inputs of a block's linear layers that the backward pass keeps, bytes of its kept weights).

    A plain layer keeps the array it reads, in common with others; a quantized one a flattened copy, which no other shares,
    or, packed, the codes and scales of wgrad's operand, shared unless they are drawn. Of the weights a plain or unpacked layer
    keeps a copy only where it computes in less than float32, a packed one dgrad's codes. remat="packed": packed ones alone.
    """
    inputs, weights = 0.0, 0.0
    for paths in INPUTS.values():
        width = s.linears[paths[0]][0]
        shared: set[Any] = set()
        for path, recipe in [(p, r) for p in paths for r in _recipes(settings, p)]:
            k, n = s.linears[path]
            lhs, rhs = recipe.wgrad.lhs, recipe.dgrad.rhs
            packs = [settings.numerics.residuals == "packed" and operand.element is not None for operand in (lhs, rhs)]
            what: Any = "itself" if recipe.is_plain else path  # one copy, whatever other blocks do
            if packs[0]:
                what = (path if lhs.draws or recipe.wgrad.rotation.draws else "", lhs, recipe.wgrad.rotation)
            if what not in shared and (packs[0] or remat != "packed"):
                inputs += s.M * width * (element_bytes(lhs, s.c) if packs[0] else s.c)
            shared.add(what)
            if packs[1]:
                weights += k * n * element_bytes(rhs, s.c)
            elif remat != "packed" and s.c < 4 and (path, "w") not in shared:
                weights += k * n * s.c
                shared.add((path, "w"))
    return inputs, weights


def attention_bytes(settings: Settings, s: Local) -> tuple[int, int]:
    """Return (bytes that one attention keeps between its passes, bytes of its backward pass beside those)."""
    block = settings.model.attention_block
    if not block:
        scores = s.M * s.N * s.U
        return scores * (4 + s.c) + 2 * 4 * s.M * s.N, 2 * 4 * scores
    rows = s.M // (s.U // s.context) * block * s.N  # of one query block, all its sequences and heads
    of_scores = rows * s.U * (4 + (s.c if s.c < 4 else 0) + 1)  # weights, their cast, the mask
    of_sums = rows * (s.U // block) * 4 * (s.H + 2)
    return 0, of_scores + of_sums + 4 * s.M * s.N * s.H + 2 * 4 * s.M // s.context * s.K * s.H


def saved_lines(settings: Settings, s: Local, remat: str) -> list[Line]:
    """Return what one block keeps for its backward pass under a remat policy, in bytes of one microbatch."""
    inputs, weights = (round(x) for x in kept_operands(settings, s, remat))
    q, kv = s.N * s.H, s.K * s.H
    entry = Line("block input", s.M * s.D * s.c, "c·M·D")
    packed = [Line("packed inputs", inputs, "(bits/8 + scale)·M·(D + N·H + D + F), shared by q, k, v and by gate, up")]
    packed.append(Line("packed weights", weights, "(bits/8 + scale)·W; kernels keep a shard of it"))
    if remat == "full":
        return [entry]
    if remat == "packed":
        return [entry, *packed]
    if remat == "dots":
        made = sum(n * (s.c if all(r.is_plain for r in _recipes(settings, p)) else 4) for p, (_, n) in s.linears.items())
        made -= s.D * (s.c if all(r.is_plain for r in _recipes(settings, "mlp/down")) else 4)
        return [entry, Line("products", s.M * made, "(c or, quantized, 4)·M·(N·H + 2·K·H + D + 2·F)")]
    return [
        Line("norms", s.M * (4 * s.D + 4) * 4, "4·M·(4·D + 4): both norms' FP32 input, normalized input, root"),
        Line("linear inputs", inputs, "c·M·width of each kept input of q, k, v, o, gate, up, down"),
        Line("weight copies", weights, "c·W where c < 4, or their codes"),
        Line("q, k, v", s.M * (q + 2 * kv) * s.c, "c·M·(N + 2·K)·H"),
        Line("attention", attention_bytes(settings, s)[0], "(4 + c)·M·N·U, or blockwise 0"),
        Line("SwiGLU", 5 * s.M * s.F * s.c, "5·c·M·F: gate, up, sigmoid, silu and what multiplies its slope"),
    ]


def total(lines: list[Line]) -> int:
    return sum(line.value for line in lines)


@dataclasses.dataclass(frozen=True)
class Temporaries:
    """The temporaries of a step by moment: {moment: lines}; its size is that of the fullest."""

    moments: dict[str, list[Line]]

    @property
    def fullest(self) -> str:
        return max(self.moments, key=lambda name: total(self.moments[name]))

    @property
    def bytes(self) -> int:
        return total(self.moments[self.fullest])


def temporaries(settings: Settings, mesh: sharding.AnyMesh) -> Temporaries:
    """Return what the step allocates beside its arguments and results, by moment; see the module's formulas."""
    s, remat = local(settings, mesh), settings.model.remat
    params = step.abstract_state(settings, mesh).params
    gradients = tree_bytes(params)
    stacked = gradients - (0 if settings.model.tie_embeddings else tree_bytes(params["embed"]))  # the embedding's come last
    saved = [dataclasses.replace(x, value=s.L * x.value, formula=f"L·({x.formula})") for x in saved_lines(settings, s, remat)]
    carried = [Line("summed gradients", gradients, "4 B · parameters, over microbatches")] * (settings.train.accumulation > 1)
    done = Line("gradients", stacked, "4 B · parameters but the embedding's, which come last: stacks for all blocks at once")
    if not settings.model.scan_layers:
        done = Line("gradients", 4 * s.D * s.V, "4 B · D·V of the head: those of blocks take the place of what these kept")
    return Temporaries(
        {
            "head": [*saved, *carried, *head_lines(settings, s)],
            "block": [*saved, *carried, done, *block_lines(settings, s)],
            "update": update_lines(settings, s, params),
            **evaluation(settings, mesh),
        }
    )


def update_lines(settings: Settings, s: Local, params: Any) -> list[Line]:
    """Return what the optimizer holds; params: the shapes of the parameters."""
    gradients = tree_bytes(params)
    lines = [Line("gradients", gradients, "4 B · parameters")]
    if settings.optimizer.clip_norm:
        lines.append(Line("clipped gradients", gradients, "4 B · parameters: both moments read them"))
    muon = settings.optimizer.name == "muon"
    if not settings.optimizer.clip_norm or (settings.train.skip_spikes and not muon):
        lines.append(Line("new moments", 2 * gradients, "2 · 4 B · parameters: written apart from the old ones"))
    elif settings.optimizer.ema_decay and not muon:
        lines.append(Line("new averaged weights", gradients, "4 B · parameters: written apart from the old ones"))
    if muon:
        at_once = 1 if settings.model.scan_layers else s.L / 2
        if settings.mesh.tensor > 1 and s.fsdp == 1:
            at_once /= 2  # products over split columns wait for one another
        squares = sum(min(k, n) ** 2 for k, n in s.linears.values())
        moved = jax.tree.map(lambda x, of: x if of else None, params, optimizer.is_hidden_matrix(params))
        lines.append(Line("Muon's directions", tree_bytes(moved), "4 B · parameters that Muon moves"))
        what = f"4·(5·W + 3·Σ min(in, out)²) / fsdp, of {at_once:g} blocks"
        lines.append(Line("Newton–Schulz", round(at_once * 4 * (5 * s.W + 3 * squares) / s.fsdp), what))
    return lines


def evaluation(settings: Settings, mesh: sharding.AnyMesh) -> dict[str, list[Line]]:
    """Return what a call of the evaluation step allocates, at its three fullest moments."""
    s = local(settings, mesh, settings.train.eval_batch_size)
    positions = s.U // s.context
    rows = s.M // positions * (settings.model.loss_chunk or positions)
    cast, gathered = s.c * (s.c < 4), s.fsdp > 1
    copies = 4 + cast + (4 / s.fsdp if gathered else 0)
    if not settings.model.scan_layers:  # nothing is cut out of a stack, but all blocks' copies may be made ahead
        plain = all(r.is_plain for path in s.linears for r in _recipes(settings, path))
        copies = s.L * (cast + 4 * (gathered or not plain))
    what = "a block's, cut out" if settings.model.scan_layers else "of all blocks"
    what += ", gathered" * gathered + f", cast ({s.c} B)" * bool(cast)
    of_mlp = 3 * s.D * s.F
    stream = Line("x", 2 * s.M * s.D * s.c, "2·c·M·D: what a block reads and returns")
    block, pairs = settings.model.attention_block, s.M * s.U
    if block:
        pairs = s.M // positions * block * block
    attention = s.M * (s.N + s.K) * s.H * s.c + pairs * s.N * (4 + s.c) + (2 * 4 * s.M * s.N * s.H if block else 0)
    head = (4 * gathered + cast) * s.D * s.V
    return {
        "evaluation: attention": [
            stream,
            Line("attention", attention, "c·M·(N + K)·H + (4 + c)·N·pairs of positions at once, blockwise 2·4·M·N·H too"),
            Line("weights", round(copies * s.W), what),
        ],
        "evaluation: MLP": [
            stream,
            Line("SwiGLU", 2 * s.M * s.F * s.c, "2·c·M·F"),
            Line("weights", round(copies * (of_mlp if settings.model.scan_layers else s.W)), what),
        ],
        "evaluation: head": [
            stream,
            Line("logits", 4 * rows * s.V, "4·positions·V"),
            Line("head", head, "4·D·V gathered, c·D·V cast"),
        ],
    }


def head_lines(settings: Settings, s: Local) -> list[Line]:
    """Return what the head holds while it is differentiated."""
    chunk, positions = settings.model.loss_chunk, s.U // s.context
    rows = s.M // positions * (chunk or positions)
    kernel = (4 + s.c) * s.D * s.V + (4 * s.D * s.V if chunk else 0)
    more = ", and 4·D·V for the sum over chunks" if chunk else ""
    of_chunk = ", of one chunk" if chunk else ""
    return [
        Line("logits", 2 * 4 * rows * s.V, f"2 · 4 B · positions · V: logits and their gradient{of_chunk}"),
        Line("head", kernel, f"(4 + c)·D·V: gradient and operand{more}"),
    ]


def block_lines(settings: Settings, s: Local) -> list[Line]:
    """Return what one block holds while it is differentiated, where its MLP is or where its attention is."""
    interior = saved_lines(settings, s, "none")
    mlp = total([x for x in interior if x.name == "SwiGLU"])
    in_mlp, in_attention = (3 * s.M * s.F + s.M * s.D) * s.c, attention_bytes(settings, s)[1] - mlp
    what = "(3·F + D)·c·M of SwiGLU" if in_mlp >= in_attention else "scores and their gradient, SwiGLU gone"
    remat, scan = settings.model.remat, settings.model.scan_layers
    kept = total(saved_lines(settings, s, remat)) if remat == "dots" or not (scan or remat == "full") else 0
    copies = (s.W * 4 if s.fsdp > 1 else 0) + 4 * s.W
    return [
        Line(
            "interior of one block",
            max(total(interior) - kept, 0),
            "what a block without remat keeps: computed again, or taken out of the stacks",
        ),
        Line("cotangents", max(in_mlp, in_attention), what),
        Line("weights and their gradient", copies, "4·W, and 4·W gathered on an fsdp axis"),
    ]


def bytes_limit() -> int | None:
    """Return the bytes that one device here lets a program use, None where that is not known, as on a CPU."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def check_fits(settings: Settings, mesh: sharding.AnyMesh, bytes_limit: float | None) -> None:
    """Raise InputError when a device of so many bytes cannot hold the train step; None: not known, nothing is checked.

    Needed is what is there for certain, arguments and the fullest moment's temporaries; results take the arguments' place.
    """
    if bytes_limit is None:
        return
    arguments, held = state_lines(settings, mesh), temporaries(settings, mesh)
    needed = total(arguments) + held.bytes
    if needed > bytes_limit:
        lines = sorted([*arguments, *held.moments[held.fullest]], key=lambda line: -line.value)
        most = ", ".join(f"{line.name} {gib(line.value)}" for line in lines[:3])
        what = "a train step" if held.fullest in STEP else f"an {held.fullest}"
        raise InputError(
            f"{what} needs {gib(needed)} on each device ({needed:,} bytes) and there are {gib(bytes_limit)} "
            f"({int(bytes_limit):,} bytes); most of it: {most}"
        )


def gib(size: float) -> str:
    """Return a size in GiB, a small one in MiB or bytes."""
    if size < 2**20:
        return f"{size:.0f} B"
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"
