"""What one optimizer step costs on one device: products, traffic of its memory, collectives, and the shortest time for them.

Counted from the config as the program computes: every linear layer's fprop, dgrad and wgrad, what rematerialisation computes
again, attention over all pairs of positions (dot_product) or over the blocks up to the diagonal (blockwise). Traffic is a lower
bound: operands read once at their formats, products and casts written once, nothing read twice for lack of cache.

    seconds = max(Σ over kernels max(FLOPs / (rate · efficiency), bytes / bandwidth), bytes sent / links)

A kernel overlaps its products with its traffic; kernels of one GPU run one after another, so they add up; collectives use other
hardware and can hide behind all of them. The efficiency is assumed, the same for all products; nothing is fitted.
Shape key: that of train.memory; A microbatches, P parameters of this device.
"""

import dataclasses
from typing import Any

from fp4jax.recipe import GEMMS, OPERANDS, GemmSpec, OperandSpec, Recipe
from models.llama import num_params
from train import memory, sharding
from train.config import Settings
from train.devices import Device
from train.memory import Line, Local

RECOMPUTED = {"none": (), "full": ("q", "k", "v", "o", "gate", "up"), "dots": (), "packed": ("q", "k", "v", "o", "gate", "up")}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Work that runs alone on a device, summed over a step. kind: the format of its products, "" for none."""

    name: str
    kind: str
    flops: float
    bytes: float
    formula: str

    def seconds(self, device: Device, efficiency: float) -> float:
        rate = device.rates[device.unit(self.kind)] if self.kind else 1.0
        return max(self.flops / (rate * efficiency), self.bytes / device.bandwidth)


def kernels(settings: Settings, mesh: sharding.AnyMesh) -> list[Kernel]:
    """Return everything that one step runs on one device."""
    s = memory.local(settings, mesh)
    linear = [kernel for path in s.linears for kernel in _linear(settings, s, path)]
    return [*linear, *_head(settings, s), _attention(settings, s), _elementwise(settings, s), _optimizer(settings, mesh)]


def _kind(spec: GemmSpec) -> str:
    """Return the format of a product: that of its wider operand."""
    bits = max(16 if o.element is None else o.element.bits for o in (spec.lhs, spec.rhs))
    return {4: "fp4", 8: "fp8"}.get(bits, "bf16")


def fprops(settings: Settings, path: str) -> int:
    """Return how often a step multiplies fprop of one layer of a block: again where its product is not kept but needed."""
    return 1 + (path.split("/")[-1] in RECOMPUTED[settings.model.remat])


def _linear(settings: Settings, s: Local, path: str) -> list[Kernel]:
    """Return the three GEMMs of one linear layer of all blocks, and the casts of their operands."""
    k, n = s.linears[path]
    out = []
    for recipe, _, layers in settings.numerics.recipes_of(path, ...):
        times = settings.train.accumulation * len(layers)
        out += _gemms(recipe, path, (s.M, k, n), s.c, times, fprops(settings, path))
        reader = next(paths for paths in memory.INPUTS.values() if path in paths)
        shares = len([p for p in reader if recipe in [r for r, _, _ in settings.numerics.recipes_of(p, ...)]])
        out += _casts(recipe, path, (s.M * k / shares, k * n / s.fsdp, s.M * n), s.c, times, fprops(settings, path))
    return out


def _gemms(recipe: Recipe, path: str, mkn: tuple[int, int, int], c: int, times: int, forwards: int) -> list[Kernel]:
    m, k, n = mkn
    elements = {"x": m * k, "w": k * n, "dy": m * n}
    products = {"fprop": m * n, "dgrad": m * k, "wgrad": k * n}
    out = []
    for gemm in GEMMS:
        spec: GemmSpec = getattr(recipe, gemm)
        read = sum(
            elements[name] * memory.element_bytes(operand, c)
            for name, operand in zip(OPERANDS[gemm], (spec.lhs, spec.rhs), strict=True)
        )
        written = products[gemm] * (4 if gemm == "wgrad" else c)
        runs = times * (forwards if gemm == "fprop" else 1)
        what = "A·L·2·M·K·N" + (", computed again in the backward pass" if runs > times else "")
        out.append(Kernel(f"{path} {gemm}", _kind(spec), runs * 2.0 * m * k * n, runs * (read + written), what))
    return out


def _casts(recipe: Recipe, path: str, xwdy: tuple[float, float, float], c: int, times: int, forwards: int) -> list[Kernel]:
    """Return the casts of x, w and dy: one read for both GEMMs that an operand goes to, another for a scale of the tensor."""
    total = 0.0
    for name, elements in zip(("x", "w", "dy"), xwdy, strict=True):
        casts = [
            (operand, spec.rotation, gemm)
            for gemm in GEMMS
            for spec in (getattr(recipe, gemm),)
            for where, operand in zip(OPERANDS[gemm], (spec.lhs, spec.rhs), strict=True)
            if where == name and operand.element is not None
        ]
        total += elements * _cast_bytes(casts, 4 if name == "w" else c)
        if name != "dy" and forwards > 1:
            total += elements * _cast_bytes([cast for cast in casts if cast[2] == "fprop"], 4 if name == "w" else c)
    what = "A·L·Σ over x, w, dy: elements · (c or 4 read + bits/8 + scale written per cast)"
    return [Kernel(f"{path} casts", "", 0.0, times * total, what)] if total else []


def _cast_bytes(casts: list[tuple[OperandSpec, Any, str]], read: int) -> float:
    """Return the bytes per element of an operand's casts; one with a single scale and no rotation serves both GEMMs."""
    if not casts:
        return 0.0
    distinct = {(o, rotation, gemm if o.block or rotation.size else "") for o, rotation, gemm in casts}
    of_tensor = any(
        (o.scale_rule == "amax" and not o.block) or (o.scale == "e4m3" and o.scale_rule != "single_level") for o, _, _ in casts
    )
    return read * (1 + of_tensor) + sum(memory.element_bytes(o, 0) for o, _, _ in distinct)


def _head(settings: Settings, s: Local) -> list[Kernel]:
    recipe, _ = settings.numerics.recipe_for("lm_head", None)
    times, forwards = settings.train.accumulation, 1 + bool(settings.model.loss_chunk)
    gemms = _gemms(recipe, "lm_head", (s.M, s.D, s.V), s.c, times, forwards)
    loss = Kernel("loss", "", 0.0, times * s.M * s.V * (3 * 4 + s.c), "A·M·V·(3·4 + c): logits written, read twice, gradient")
    return [*gemms, *_casts(recipe, "lm_head", (s.M * s.D, s.D * s.V / s.fsdp, s.M * s.V), s.c, times, forwards), loss]


def attention_passes(settings: Settings) -> int:
    """Return how often a step goes through q·kᵀ and p·v: 1 forward, 2 backward, 1 for each recomputation around them."""
    return 3 + (settings.model.remat != "none") + (settings.model.attention == "blockwise")


def _attention(settings: Settings, s: Local) -> Kernel:
    block, passes = settings.model.attention_block, attention_passes(settings)
    pairs, what = 1.0, "all pairs"
    if block:  # the last piece of a context axis has the most keys to see
        blocks, own = s.U // block, s.U // s.context // block
        pairs, what = (2 * blocks - own + 1) / (2 * blocks), f"{(2 * blocks - own + 1) / (2 * blocks):.3f} of all pairs"
    times = settings.train.accumulation * s.L * passes
    flops = times * pairs * 2 * 2 * s.M * s.U * s.N * s.H
    moved = times * s.c * s.H * (2 * s.M * s.N + 2 * s.M * s.context * s.K)
    return Kernel("attention", "bf16", flops, moved, f"A·L·{passes} passes·4·M·U·N·H, {what}")


def _elementwise(settings: Settings, s: Local) -> Kernel:
    passes = 3 + (settings.model.remat != "none")
    moved = settings.train.accumulation * s.L * passes * s.c * s.M * (8 * s.D + 3 * s.F + 2 * (s.N + s.K) * s.H)
    what = f"A·L·{passes} passes·c·M·(8·D + 3·F + 2·(N + K)·H): norms, sums, SwiGLU, rotary angles"
    return Kernel("elementwise", "", 0.0, moved, what)


def _optimizer(settings: Settings, mesh: sharding.AnyMesh) -> Kernel:
    size = {line.name: line.value for line in memory.state_lines(settings, mesh)}
    moved = 2 * (size["parameters"] + size["moments"] + size.get("averaged weights", 0)) + 2 * size["parameters"]
    what = "weights, moments and their average read and written; gradients read, and again for their norm"
    return Kernel("optimizer", "", 0.0, moved, what)


def flops(settings: Settings, mesh: sharding.AnyMesh) -> dict[str, float]:
    """Return the FLOPs of a step on one device by the format of the product."""
    out: dict[str, float] = {}
    for kernel in kernels(settings, mesh):
        if kernel.kind:
            out[kernel.kind] = out.get(kernel.kind, 0.0) + kernel.flops
    return out


def model_flops(settings: Settings, mesh: sharding.AnyMesh) -> float:
    """Return 6 · parameters · tokens of a step, per device."""
    return 6.0 * num_params(settings.model) * settings.train.batch_size * settings.data.seq_len / mesh.size


def collectives(settings: Settings, mesh: sharding.AnyMesh, *, fp4_kernels: bool) -> list[Line]:
    """Return the bytes that one device sends per step, by collective, in rings: (n − 1)/n of the whole, twice for a sum.

    They are those of the compiled step, where a gradient that is kept in pieces counts as scattered: XLA for GPUs makes that
    of a sum and a slice. fp4_kernels: weights of FP4 products travel as codes and scales, otherwise they travel in FP32.
    Norms and scalars are left out.
    """
    s, accumulation = memory.local(settings, mesh), settings.train.accumulation
    fsdp, tensor, context = ((mesh.shape[axis] - 1) / mesh.shape[axis] for axis in ("fsdp", "tensor", "context"))
    parameters, replicas = memory.state_lines(settings, mesh)[0].value, mesh.shape["data"] * mesh.shape["context"]
    gathered = accumulation * s.L * sum(_gathered(settings, path, fp4_kernels) * k * n for path, (k, n) in s.linears.items())
    plain = all(r.is_plain for path in s.linears for r, _, _ in settings.numerics.recipes_of(path, ...))
    sums = s.L * (7 + (fprops(settings, "attn/o") - 1)) + 2
    weights = s.L * s.W + s.D * s.V
    summed = s.L * sum(_summed(settings, path, ..., s.c) * k * n for path, (k, n) in s.linears.items())
    summed += _summed(settings, "lm_head", None, s.c) * s.D * s.V
    how = f"b = {summed / weights:.2f} by train.grad_reduce_dtype={settings.train.grad_reduce_dtype}"
    kv = 2 * s.K * s.H * s.M * s.context * s.c * (2 + (settings.model.remat != "none"))
    sizes = {
        "all-gather weights (fsdp)": (fsdp * (gathered + 4 * s.D * s.V), "(n−1)/n·(A·L·(b·W per pass) + 4·D·V of the head)"),
        "all-to-all embeddings (fsdp)": (accumulation * fsdp * 2 * 4 * s.M * s.D, "A·(n−1)/n·2·4·M·D: x and its gradient"),
        "reduce-scatter gradients (fsdp)": (accumulation * fsdp * summed, f"A·(n−1)/n·b·(L·W + D·V), {how}"),
        "all-reduce gradients (data, context)": (
            accumulation * 2 * (replicas - 1) / replicas * (parameters + (summed - 4 * weights) / s.fsdp),
            f"A·2·(n−1)/n·(4·P of embedding and norms, b·P of the rest), {how}",
        ),
        "all-reduce activations (tensor)": (
            accumulation * 2 * tensor * sums * s.M * s.D * (s.c if plain else 4),
            f"A·2·(n−1)/n·b·M·D·{sums}: per block o, down, dx of q, k, v, gate, up; dx of the head, x",
        ),
        "all-gather keys and values (context)": (
            accumulation * s.L * context * kv,
            "A·L·(n−1)/n·2·c·K·H·M·n, per pass; gradients scattered",
        ),
    }
    return [Line(name, round(size), formula) for name, (size, formula) in sizes.items() if size]


def _gathered(settings: Settings, path: str, fp4_kernels: bool) -> float:
    """Return the bytes per weight that a block gathers in a step, mean over blocks: once for fprop, once for dgrad.

    What fprop needs when it is computed again is what dgrad needs too, unless these are codes, which lie along other axes.
    """
    total = 0.0
    for recipe, _, layers in settings.numerics.recipes_of(path, ...):
        for gemm, times in (("fprop", fprops(settings, path)), ("dgrad", 1)):
            spec: GemmSpec = getattr(recipe, gemm)
            codes = fp4_kernels and _kind(spec) == "fp4"
            total += len(layers) * (times * memory.element_bytes(spec.rhs, 4) if codes else 4)
    return total / settings.model.n_layers


def _summed(settings: Settings, path: str, layer: Any, c: int) -> float:
    """Return the bytes per weight in which a layer's gradient is summed over devices, mean over blocks."""
    if settings.train.grad_reduce_dtype != "auto":
        return 2 if settings.train.grad_reduce_dtype == "bfloat16" else 4
    of = [(c if r.wgrad.is_plain else 4, max(len(layers), 1)) for r, _, layers in settings.numerics.recipes_of(path, layer)]
    return sum(size * times for size, times in of) / sum(times for _, times in of)


@dataclasses.dataclass(frozen=True)
class Time:
    """The shortest time of a step: on the chip and on the links, in seconds; the longer one counts."""

    chip: float
    links: float

    @property
    def seconds(self) -> float:
        return max(self.chip, self.links)


def time(settings: Settings, mesh: sharding.AnyMesh, device: Device, efficiency: float) -> Time:
    """Return the shortest time of one step at an assumed efficiency of all products."""
    chip = sum(kernel.seconds(device, efficiency) for kernel in kernels(settings, mesh))
    sent = memory.total(collectives(settings, mesh, fp4_kernels="fp4" in device.rates))
    return Time(chip, sent / device.links)
