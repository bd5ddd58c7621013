"""What casts and GEMMs do to the tensors they really see: sums taken in the graph, and the figures they stand for.

A dot that is given `zeros()` as `sums=` (see `dot.quantized_dot_general`) returns what it measured as their cotangent: its
backward sees all of x, w and dy. Sums are means over elements or blocks and a number of calls, so that they may be added up
over microbatches and chunks; `operand_figures` and `gemm_figures` divide. Everything is measured on the reference's casts,
with the dot's own key, and on the product that the dot's implementation really returned.

The error of a cast is split into three parts that add up to it, after the analysis of 2605.20402. With Q the cast, and Q* the
same rounding under the unrounded scale amax / largest element:
    scale      Q(x) − Q*(x)                    what the rule and the rounding of the scale cost, clipping included
    dead zone  Q*(x) − x where Q*(x) = 0       what is too small for its block
    grid       Q*(x) − x elsewhere             rounding to the neighbours in the grid
The last two never meet in one element, so ‖error‖² is ‖dead zone‖² + ‖grid‖² + what the scale adds, its own square and its
products with the others: three shares that add up to 1. That of the scale is negative where the rounded scale happens to err
less than the unrounded one.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fp4jax import bits, rounding, scales
from fp4jax.ops import quantize
from fp4jax.recipe import GEMMS, OPERANDS, OperandSpec

LOWEST, BINS = -48, 64  # powers of two counted by the scale histogram: 2^-48 … 2^15, the ends take what lies beyond
# Over all GEMMs of two trained tiny models the factor is 0.87 to 1.36 (LOG.md). Operands whose rotations do not match give more
# than this, and so does, late in training, a clip mask ("quest": up to 5.2 in a dgrad, 1.2 without the mask).
EXCESS = 4.0
ZEROED = 0.25  # share of non-zero elements flushed to zero that is worth a finding; of a normal distribution 9 to 14 %


class OperandSums(NamedTuple):
    """Sums over the calls of one cast; float32 scalars of any common leading shape, histogram [..., BINS].

    Means over elements: square x², error (Q(x) − x)², dead_zone_error and grid_error (squares of these parts), zeroed
    (x ≠ 0 = Q(x)), nonzero (x ≠ 0), clipped (|x| above the largest element · scale), first (x² of the first element of every
    rotated block). Means over blocks: crest (max |x| / root mean square; 1 for a zero block), histogram of the exponent of
    scale.
    """

    calls: Any
    square: Any
    error: Any
    dead_zone_error: Any
    grid_error: Any
    zeroed: Any
    nonzero: Any
    clipped: Any
    first: Any
    crest: Any
    histogram: Any


class GemmSums(NamedTuple):
    """Sums over the calls of one GEMM: means over the elements of its quantized product q and of the exact one p.

    inner q·p, exact p², quantized q². expected: (q − p)² if the errors of both casts were independent of everything else.
    """

    calls: Any
    inner: Any
    exact: Any
    quantized: Any
    expected: Any


class Sums(NamedTuple):
    """What one linear layer's dot measures. operands: [3, 2, 2] = GEMM, lhs and rhs, as cast and without its rotation;
    the latter stay zero where there is no rotation. gemms: [3]. All zero for a plain GEMM.
    """

    operands: OperandSums
    gemms: GemmSums


def zeros(shape: tuple[int, ...] = ()) -> Sums:
    """Return the float32 zeros that a dot's `sums=` takes, with leading axes `shape`."""

    def fill(kind: Any, axes: tuple[int, ...]) -> Any:
        bins = {"histogram": (BINS,)}
        return kind(**{name: jnp.zeros((*shape, *axes, *bins.get(name, ())), jnp.float32) for name in kind._fields})

    return Sums(fill(OperandSums, (3, 2, 2)), fill(GemmSums, (3,)))


def split_error(
    x: jax.Array, spec: OperandSpec, axis: int, key: bits.Key | None = None, amax: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the scale, dead-zone and grid parts of the error of a cast, float32 of x's shape; their sum is Q(x) − x.

    A rule with a gain is compared after division by it. BF16 has a grid part only.
    """
    x = rounding.flush(x.astype(jnp.float32))
    values, best, _ = _casts(x, spec, axis % x.ndim, key, amax)
    rest = best - x
    return values - best, jnp.where(best == 0, rest, 0.0), jnp.where(best == 0, 0.0, rest)


def _casts(x: jax.Array, spec: OperandSpec, axis: int, key, amax) -> tuple[jax.Array, jax.Array, quantize.BlockCast | None]:
    """Return (Q(x) less the rule's gain, Q*(x), the cast Q); both are the rounded values where a format has no blocks."""
    if spec.element is None:
        values = quantize.fake_quantize(x, spec, axis)
        return values, values, None
    cast = quantize.cast_blocks(x, spec, axis, key, amax)
    values = rounding.flush(cast.elements * cast.decode)
    view, within = quantize.block_view(x.shape, spec, axis)
    random = quantize.random_bits(x, key).reshape(view) if spec.rounding == "sr" else None
    blocks = x.reshape(view)
    ideal = scales.fp32_scale(rounding.max_magnitude(blocks, within), spec.element.max)
    best = rounding.round_to_grid(rounding.divide(blocks, ideal), spec.element, random) * ideal
    return (values if spec.gain == 1 else values / spec.gain).reshape(x.shape), best.reshape(x.shape), cast


def operand_sums(
    x: jax.Array,
    spec: OperandSpec,
    axis: int,
    key: bits.Key | None = None,
    amax: jax.Array | None = None,
    *,
    rotation: int = 0,
) -> OperandSums:
    """Return what one call of a cast does to `x`; rotation: the size of the blocks that `x` was rotated in, 0 for none.

    Format "none" measures nothing and gives zeros; BF16 has no blocks, its crest and histogram are zero.
    """
    if spec.format == "none":
        return jax.tree.map(lambda leaf: leaf[0, 0, 0], zeros().operands)
    axis = axis % x.ndim
    x = rounding.flush(x.astype(jnp.float32))
    # Kept in memory: fused into its readers, every cast would be computed anew for each of the means.
    x, values, best, cast = jax.lax.optimization_barrier((x, *_casts(x, spec, axis, key, amax)))
    error, ideal_error = values - x, best - x
    clipped, crest, histogram = jnp.zeros(()), jnp.zeros(()), jnp.zeros(BINS)
    if spec.element is not None and cast is not None:
        view, within = quantize.block_view(x.shape, spec, axis)
        blocks = x.reshape(view)
        clipped = jnp.abs(blocks) * spec.gain > cast.decode * spec.element.max
        rms = jnp.sqrt(jnp.mean(blocks * blocks, within, keepdims=True))
        crest = jnp.where(rms > 0, rounding.max_magnitude(blocks, within) / jnp.where(rms > 0, rms, 1.0), 1.0)
        exponent = (rounding.to_bits(cast.decode) >> 23) - 127
        bin_of = jnp.clip(exponent - LOWEST, 0, BINS - 1).reshape(-1)
        histogram = jnp.zeros(BINS).at[bin_of].add(1.0 / bin_of.size)
    first = jnp.zeros(())
    if rotation:
        index = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
        first = jnp.where(index % rotation == 0, x * x, 0.0)

    def mean(what: jax.Array) -> jax.Array:
        return jnp.mean(what, dtype=jnp.float32)

    square = mean(x * x)
    return OperandSums(
        calls=_one_call(square),
        square=square,
        error=mean(error * error),
        dead_zone_error=mean(jnp.where(best == 0, ideal_error * ideal_error, 0.0)),
        grid_error=mean(jnp.where(best == 0, 0.0, ideal_error * ideal_error)),
        zeroed=mean((x != 0) & (values == 0)),
        nonzero=mean(x != 0),
        clipped=mean(clipped),
        first=mean(first),
        crest=mean(crest),
        histogram=histogram,
    )


def _one_call(measured: jax.Array) -> jax.Array:
    """Return 1, batched where vmap batches `measured`: the cotangents of the batch are added up, and so must the calls be."""
    return jnp.where(jnp.isnan(measured), 1.0, 1.0)


def gemm_sums(quantized: jax.Array, exact: jax.Array, lhs: OperandSums, rhs: OperandSums, length: int) -> GemmSums:
    """Return what one GEMM of contraction length `length` did; lhs, rhs: the sums of this call's casts."""
    q, p = quantized.astype(jnp.float32), exact.astype(jnp.float32)
    independent = lhs.error * rhs.square + lhs.square * rhs.error + lhs.error * rhs.error
    return GemmSums(_one_call(independent), jnp.mean(q * p), jnp.mean(p * p), jnp.mean(q * q), length * independent)


def operand_figures(sums: OperandSums) -> dict[str, Any] | None:
    """Return the figures of one cast from its (numpy) sums, None where nothing was measured.

    relative_error ‖Q(x) − x‖ / ‖x‖ and sqnr_db = −20·log10 of it; crest; zeroed: share of the non-zero elements; clipped:
    share of all; scale_share, dead_zone_share, grid_share of the error; first_share: share of x² in the first coefficient of
    the rotated blocks (1/size where it gathers no mean); scale_histogram: {exponent of two: share of the blocks}.
    """
    if not sums.calls:
        return None
    s = OperandSums(*(np.asarray(leaf, np.float64) / float(sums.calls) for leaf in sums))
    error = math.sqrt(_ratio(s.error, s.square))
    return {
        "relative_error": error,
        "sqnr_db": -20 * math.log10(error) if error > 0 else math.inf if error == 0 else math.nan,
        "crest": float(s.crest),
        "zeroed": _ratio(s.zeroed, s.nonzero),
        "clipped": float(s.clipped),
        "scale_share": _ratio(s.error - s.dead_zone_error - s.grid_error, s.error),
        "dead_zone_share": _ratio(s.dead_zone_error, s.error),
        "grid_share": _ratio(s.grid_error, s.error),
        "first_share": _ratio(s.first, s.square),
        "scale_histogram": {str(LOWEST + i): float(v) for i, v in enumerate(s.histogram) if v},
    }


def gemm_figures(sums: GemmSums) -> dict[str, float] | None:
    """Return the figures of one GEMM from its (numpy) sums, None where nothing was measured.

    q: the product, p: the exact one of the same operands. gain ⟨q, p⟩/⟨p, p⟩; cosine; relative_error ‖q − p‖/‖p‖; excess:
    the error over what independent errors of the operands explain. signal_to_noise: 1 / relative_error, of dw the
    gradient-to-noise ratio of this step, to be held against √3 (2505.19115).
    """
    if not sums.calls:
        return None
    inner, exact, quantized, expected = (float(x) / float(sums.calls) for x in sums[1:])
    error = max(quantized - 2 * inner + exact, 0.0) if quantized == quantized else math.nan
    relative = math.sqrt(_ratio(error, exact))
    return {
        "gain": _ratio(inner, exact),
        "cosine": _ratio(inner, math.sqrt(exact * quantized)),
        "relative_error": relative,
        "excess": math.sqrt(_ratio(error, expected)),
        "signal_to_noise": 1 / relative if relative else math.inf,
    }


def _ratio(a: Any, b: Any) -> float:
    """Return a / b, 0 where both are 0."""
    return 0.0 if a == b == 0 else float(a) / float(b) if b else math.inf


def figures(sums: Mapping[str, Sums]) -> list[dict[str, Any]]:
    """Return one row per (module, quantized GEMM): {"module", "gemm", GEMM figures, operand: {figures, "unrotated": figures}}.

    sums: {path: what the dots of that path measured, stacked over the blocks, or not stacked outside of them}.
    """
    rows = []
    for path, measured in jax.tree.map(np.asarray, dict(sums)).items():
        stacked = measured.gemms.calls.ndim == 2
        layers = range(len(measured.gemms.calls)) if stacked else (None,)
        for layer in layers:
            one = jax.tree.map(lambda leaf, layer=layer: leaf if layer is None else leaf[layer], measured)
            for g, gemm in enumerate(GEMMS):
                of_gemm = gemm_figures(GemmSums(*(leaf[g] for leaf in one.gemms)))
                if of_gemm is None:
                    continue
                row = {"module": path if layer is None else f"layers/{layer}/{path}", "gemm": gemm, **of_gemm}
                for i, name in enumerate(OPERANDS[gemm]):
                    cast, plain = (operand_figures(OperandSums(*(leaf[g, i, r] for leaf in one.operands))) for r in (0, 1))
                    if cast is not None:
                        row[name] = cast | ({} if plain is None else {"unrotated": plain})
                rows.append(row)
    return rows


def first_nonfinite(rows: Iterable[Mapping[str, Any]], paths: Sequence[str]) -> str | None:
    """Return which GEMM of `figures` is the first that is not finite, and what of it; None where all are.

    paths: in the order in which a block runs them; first come the blocks' fprops in order, then dgrads and wgrads backwards.
    Squares are measured, so a value beyond 1e19 counts as not finite.
    """

    def place(row: Mapping[str, Any]) -> tuple[bool, float, int]:
        _, layer, path = row["module"].split("/", 2) if row["module"] not in paths else ("", math.inf, row["module"])
        backward = row["gemm"] != "fprop"
        sign = -1 if backward else 1
        return backward, sign * float(layer), sign * paths.index(path)

    for row in sorted(rows, key=place):
        broken = [name for name in OPERANDS[row["gemm"]] if name in row and not math.isfinite(row[name]["relative_error"])]
        if broken:
            return f"{row['gemm']} of {row['module']}: {' and '.join(broken)}"
        if not math.isfinite(row["relative_error"]):
            return f"{row['gemm']} of {row['module']}: the product of finite operands"
    return None


def findings(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return what is wrong or remarkable in `figures`, one sentence per kind, the worst module named."""
    rows, out = list(rows), []
    for gemm in GEMMS:
        of_gemm = [row for row in rows if row["gemm"] == gemm]
        broken = [row["module"] for row in of_gemm if not math.isfinite(row["relative_error"])]
        if broken:
            out.append(f"{gemm}: the product of {broken[0]} is not finite ({len(broken)} of {len(of_gemm)} modules)")
        of_gemm = [row for row in of_gemm if math.isfinite(row["relative_error"])]
        worst = max(of_gemm, key=lambda row: row["excess"], default=None)
        if worst and worst["excess"] > EXCESS:
            out.append(
                f"{gemm}: the product of {worst['module']} errs {worst['excess']:.1f} times what the errors of its operands "
                f"explain (relative error {worst['relative_error']:.2f}): its operands do not belong together, for instance "
                "rotated or scaled differently, or a clip mask takes away what matters"
            )
        for name in OPERANDS[gemm]:
            cast = [row for row in of_gemm if name in row]
            worst = max(cast, key=lambda row: row[name]["zeroed"], default=None)
            if worst and worst[name]["zeroed"] > ZEROED:
                share = worst[name]["zeroed"]
                out.append(f"{gemm}: {share:.0%} of {name} of {worst['module']} is flushed to zero")
        if gemm == "wgrad":
            worst = min(of_gemm, key=lambda row: row["signal_to_noise"], default=None)
            if worst and worst["signal_to_noise"] < math.sqrt(3):
                ratio = worst["signal_to_noise"]
                out.append(f"wgrad: the gradient of {worst['module']} is {ratio:.2f} times its quantization error, below √3")
    return out
