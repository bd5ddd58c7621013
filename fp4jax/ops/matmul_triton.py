"""Multiply two packed FP4 matrices by their block scales on the matrix cores: the Triton kernel of `scaled_matmul`.

    C[m, n] = factor · Σ_k (a[m, k] · 2^(sa[m, k / 32] - 127)) · (b[n, k] · 2^(sb[n, k / 32] - 127)),   accumulated in float32

and for NVFP4 with E4M3 scales, one per 16, and factor = alpha · the two tensor scales. M, N: rows of A and B, K: contraction;
in the kernel's shapes R is M or N. Operands lie contraction last, [R, K/2], or contraction first, [K/2, R], each on its own and
with its scales in the same orientation, so fprop, dgrad and wgrad all run without a transpose.

Native FP4: MXFP4 on gfx950 and sm_100, NVFP4 on sm_100. sm_90 has none and emulates, for development. NVFP4 on gfx950 raises.
The shape is compiled in: one kernel per shape, with masks only where a tile does not divide it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from fp4jax.ops import triton_call

MX_BLOCK, NV_BLOCK = 32, 16
_LIMIT_32 = 2**31


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """What one program computes and how it is compiled.

    A program multiplies tile_m × tile_n over K / split_k in steps of tile_k. Programs walk down group_m tile rows before they
    turn to the next tile column. matrix_instr_nonkdim (side of a matrix instruction) and waves_per_eu (occupancy to compile
    for, 0 = any) apply to AMD only.
    """

    tile_m: int
    tile_n: int
    tile_k: int = 256
    num_warps: int = 4
    num_stages: int = 2
    split_k: int = 1
    group_m: int = 8
    matrix_instr_nonkdim: int = 0
    waves_per_eu: int = 0

    def options(self, target: str) -> dict[str, int]:
        """Return the compiler options for `target`."""
        names = ["num_warps", "num_stages"] + ["matrix_instr_nonkdim", "waves_per_eu"] * target.startswith("gfx")
        return {name: getattr(self, name) for name in names}


# Largest first. Chosen by the machine code (benchmarks/asm.py, tests/kernels_aot_matmul.py), not yet by measured time:
# gfx950: dot_scaled is native from 2 warps and tile_k 128 on (below, it silently multiplies in bfloat16); LDS ≤ 160 KiB. 8
#   warps spill at 256 × 256, and 32 × 32 instructions spill there under a mask along K. 256 CUs hold 256 large tiles at once:
#   by group_m 32 these are 32 × 8, and as programs go round robin over the 8 XCDs, 4 × 8 in each L2.
# sm_100: native from tile_m 128 on. sm_90: emulated. Shared memory ≤ 227 KiB on both.
_gfx950 = functools.partial(TileConfig, group_m=32, matrix_instr_nonkdim=16)
CONFIGS: dict[str, tuple[TileConfig, ...]] = {
    "gfx950": (_gfx950(256, 256), _gfx950(256, 128), _gfx950(128, 128), _gfx950(64, 64, num_warps=2, num_stages=3)),
    "sm_100": (TileConfig(128, 256, num_stages=4), TileConfig(128, 128, num_stages=4), TileConfig(128, 64, num_stages=4)),
    "sm_90": (TileConfig(128, 128, 128, num_warps=8, num_stages=3), TileConfig(64, 64, 128, num_stages=3)),
}
_PROGRAMS = {"gfx950": 256, "sm_100": 148, "sm_90": 132}  # compute units: fewer programs leave some idle
_MIN_STEPS = 16  # tile_k steps that a split keeps, so that its float32 partial result costs less traffic than its operands


def choose_config(target: str, m: int, n: int, k: int, *, float32: bool = False) -> TileConfig:
    """Return the largest tile whose grid, K split where it is long, fills the GPU; else the smallest tile, split most.

    target: "gfx950", "sm_100" or "sm_90". float32: the result's type, else bfloat16. split_k is 1, 2, 4 or 8, divides the
    steps along K, and leaves 16 or more to each.
    """
    if target not in CONFIGS:
        raise ValueError(f"no tile configuration for {target=}: only {', '.join(CONFIGS)}")
    choices = []
    for config in CONFIGS[target]:
        tiles = triton.cdiv(m, config.tile_m) * triton.cdiv(n, config.tile_n)
        steps = triton.cdiv(k, config.tile_k)
        splits = [s for s in (1, 2, 4, 8) if s == 1 or (steps % s == 0 and steps // s >= _MIN_STEPS)]
        if (target, config.tile_m, config.tile_n) == ("gfx950", 256, 256):  # a float32 result spills a register there
            splits = [] if float32 else [1]
        choices += [(tiles * split, dataclasses.replace(config, split_k=split)) for split in splits]
    return next((config for programs, config in choices if programs >= _PROGRAMS[target]), choices[-1][1])


def scaled_matmul(
    a_data: jax.Array,
    a_scale: jax.Array,
    b_data: jax.Array,
    b_scale: jax.Array,
    *,
    a_axis: int,
    b_axis: int,
    target: str,
    a_tensor_scale: jax.Array | None = None,
    b_tensor_scale: jax.Array | None = None,
    alpha: float = 1.0,
    out_dtype=jnp.float32,
    config: TileConfig | None = None,
) -> jax.Array:
    """Return C [M, N] in `out_dtype` (float32 or bfloat16): the product of A and B over their contraction axes.

    a_data: uint8, two E2M1 codes per byte along a_axis, the even index in the low nibble: [M, K/2] for a_axis 1, [K/2, M] for
    0; b_data: [N, K/2] for b_axis 1, [K/2, N] for 0. a_scale, b_scale: uint8 scale bytes in the same orientation, E8M0 per 32
    elements, or with tensor scales (NVFP4; one float32 each) E4M3 per 16. A NaN scale makes NaN of every output that it
    enters. alpha multiplies the result. target, config: for whom and how to compile, by default `choose_config`'s. Split along
    K, partial results are summed in a fixed order. Raises ValueError for shapes and types that do not fit together, and for
    NVFP4 on a target that cannot multiply it.
    """
    block = _check_formats(a_tensor_scale, b_tensor_scale, target, out_dtype)
    m, k = _check_operand("a", a_data, a_scale, a_axis, block)
    n, k_of_b = _check_operand("b", b_data, b_scale, b_axis, block)
    if k != k_of_b:
        raise ValueError(f"contraction of {k} elements in a, {k_of_b} in b")
    config = config or choose_config(target, m, n, k, float32=jnp.dtype(out_dtype) == jnp.float32)
    factor = jnp.full((1,), alpha, jnp.float32)
    if a_tensor_scale is not None and b_tensor_scale is not None:
        factor = factor * (a_tensor_scale.reshape(1) * b_tensor_scale.reshape(1))
    split = config.split_k
    out = jax.ShapeDtypeStruct((m, n), out_dtype) if split == 1 else jax.ShapeDtypeStruct((split, m, n), jnp.float32)
    grid = (triton.cdiv(m, config.tile_m) * triton.cdiv(n, config.tile_n), split)
    constants = kernel_constants(config, m, n, k, a_axis=a_axis, b_axis=b_axis, block=block, target=target)
    arrays = (a_data, a_scale, b_data, b_scale, factor)
    result = triton_call.call(
        scaled_matmul_kernel, *arrays, out_type=out, grid=grid, options=config.options(target), **constants
    )
    return result if split == 1 else jnp.sum(result, axis=0).astype(out_dtype)


def kernel_constants(
    config: TileConfig, m: int, n: int, k: int, *, a_axis: int, b_axis: int, block: int, target: str
) -> dict[str, int | bool]:
    """Return the compile-time arguments of `scaled_matmul_kernel`."""
    return {
        **{"M": m, "N": n, "K": k, "A_K_FIRST": a_axis == 0, "B_K_FIRST": b_axis == 0},
        **{"BLOCK": block, "DECODE": block == NV_BLOCK and target != "sm_100"},
        **{"TILE_M": config.tile_m, "TILE_N": config.tile_n, "TILE_K": config.tile_k},
        **{"SPLIT_K": config.split_k, "GROUP_M": config.group_m},
    }


def _check_formats(a_tensor_scale, b_tensor_scale, target: str, out_dtype) -> int:
    """Return the block size, 16 with tensor scales (NVFP4) and 32 without."""
    if target not in CONFIGS:
        raise ValueError(f"{target=} is not supported: only {', '.join(CONFIGS)}")
    if jnp.dtype(out_dtype) not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"{out_dtype=} is not supported: only float32 and bfloat16")
    if (a_tensor_scale is None) != (b_tensor_scale is None):
        raise ValueError("a tensor scale on one operand only: both must be NVFP4, or neither")
    if a_tensor_scale is None:
        return MX_BLOCK
    if target == "gfx950":
        raise ValueError("gfx950 cannot multiply NVFP4 (E4M3 scales): use mxfp4, or impl='reference'")
    for scale in (a_tensor_scale, b_tensor_scale):
        if scale.size != 1 or scale.dtype != jnp.float32:
            raise ValueError(f"a tensor scale is one float32, not {scale.dtype}{list(scale.shape)}")
    return NV_BLOCK


def _check_operand(name: str, data: jax.Array, scale: jax.Array, axis: int, block: int) -> tuple[int, int]:
    """Return (rows, K) of an operand."""
    if data.ndim != 2 or axis not in (0, 1) or data.dtype != jnp.uint8 or scale.dtype != jnp.uint8:
        raise ValueError(f"{name}: two uint8 matrices, axis 0 or 1; not {data.dtype}{data.shape}, {scale.dtype}, {axis=}")
    rows, k = data.shape[1 - axis], 2 * data.shape[axis]
    if k % block:
        raise ValueError(f"{name}: {k=} is not a multiple of {block=}")
    expected = (rows, k // block) if axis == 1 else (k // block, rows)
    if scale.shape != expected:
        raise ValueError(f"{name}: scales of shape {scale.shape}, expected {expected}")
    if data.size >= _LIMIT_32:
        raise ValueError(f"{name}: {data.size} bytes, the kernel's offsets reach {_LIMIT_32}")
    return rows, k


@triton.jit
def scaled_matmul_kernel(
    a_ptr,  # uint8 [M, K/2], or [K/2, M] where A_K_FIRST
    a_scale_ptr,  # uint8 [M, K/BLOCK], or [K/BLOCK, M]
    b_ptr,  # uint8 [N, K/2], or [K/2, N] where B_K_FIRST
    b_scale_ptr,  # uint8 [N, K/BLOCK], or [K/BLOCK, N]
    factor_ptr,  # float32 [1]
    c_ptr,  # float32 or bfloat16 [SPLIT_K, M, N]
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    A_K_FIRST: tl.constexpr,
    B_K_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,  # elements per scale: 32 with E8M0 scales, 16 with E4M3
    DECODE: tl.constexpr,  # multiply decoded float16 values: for E4M3 scales without native support
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Compute one tile of C, or of one of its SPLIT_K partial sums. Grid: (tiles of C, SPLIT_K)."""
    steps: tl.constexpr = (K + TILE_K * SPLIT_K - 1) // (TILE_K * SPLIT_K)
    row, column = _tile_corner(M, N, TILE_M, TILE_N, GROUP_M)
    split = tl.program_id(1)
    rows_M = tl.arange(0, TILE_M)
    rows_N = tl.arange(0, TILE_N)
    bytes_K = tl.arange(0, TILE_K // 2)
    blocks_K = tl.arange(0, TILE_K // BLOCK)
    mask_m: tl.constexpr = M % TILE_M != 0
    mask_n: tl.constexpr = N % TILE_N != 0
    mask_k: tl.constexpr = K % (TILE_K * SPLIT_K) != 0

    acc_MN = tl.zeros((TILE_M, TILE_N), tl.float32)
    first = split * steps
    # num_programs is SPLIT_K, which the compiler does not know: it would unroll a loop of few known steps, and spill.
    for step in range(first, first + steps * (tl.num_programs(1) // SPLIT_K)):
        # B is loaded as [K/2, N]: a transpose of a loaded [N, K/2] costs gfx950 a lane permutation per load.
        k = step * (TILE_K // 2)
        a_MK = _load(a_ptr, row, k, rows_M[:, None], bytes_K[None, :], M, K // 2, A_K_FIRST, mask_m, mask_k)
        b_KN = _load(b_ptr, column, k, rows_N[None, :], bytes_K[:, None], N, K // 2, B_K_FIRST, mask_n, mask_k)
        k = step * (TILE_K // BLOCK)
        sa_MK = _load(a_scale_ptr, row, k, rows_M[:, None], blocks_K[None, :], M, K // BLOCK, A_K_FIRST, mask_m, mask_k)
        sb_NK = _load(b_scale_ptr, column, k, rows_N[:, None], blocks_K[None, :], N, K // BLOCK, B_K_FIRST, mask_n, mask_k)
        if DECODE:
            acc_MN = tl.dot(_decode(a_MK, sa_MK), _decode(b_KN.T, sb_NK).T, acc_MN)
        else:
            if BLOCK == 16:
                sa_MK = sa_MK.to(tl.float8e4nv, bitcast=True)
                sb_NK = sb_NK.to(tl.float8e4nv, bitcast=True)
            acc_MN = tl.dot_scaled(a_MK, sa_MK, "e2m1", b_KN, sb_NK, "e2m1", acc_MN)

    c_MN = (acc_MN * tl.load(factor_ptr)).to(c_ptr.dtype.element_ty)
    # C can have more than 2^31 elements, a tile of it cannot span as many.
    corner = c_ptr + (split * M + row).to(tl.int64) * N + column
    offsets = rows_M[:, None] * N + rows_N[None, :]
    if mask_m or mask_n:
        tl.store(corner + offsets, c_MN, mask=(rows_M < M - row)[:, None] & (rows_N < N - column)[None, :])
    else:
        tl.store(corner + offsets, c_MN)


@triton.jit
def _tile_corner(M: tl.constexpr, N: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Return the row and column at which this program's tile of C starts.

    Programs that run together should share rows of A and B in the cache: the order goes down GROUP_M tiles, then right.
    """
    tiles_m: tl.constexpr = (M + TILE_M - 1) // TILE_M
    tiles_n: tl.constexpr = (N + TILE_N - 1) // TILE_N
    group = tl.program_id(0) // (GROUP_M * tiles_n)
    within = tl.program_id(0) % (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    return (group * GROUP_M + within % height) * TILE_M, within // height * TILE_N


@triton.jit
def _load(
    ptr,
    row,
    k,
    rows,
    ks,
    ROWS: tl.constexpr,
    KS: tl.constexpr,
    K_FIRST: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    MASK_K: tl.constexpr,
):
    """Load the tile (row + rows, k + ks) of an array [ROWS, KS], or of [KS, ROWS] where K_FIRST; 0 outside the array.

    rows, ks: index blocks, one a column and one a row, which give the tile its shape. 0 does for a scale byte too: it is finite
    in both scale formats, and its elements are 0. The offsets in a tile are the same for all programs and steps.
    """
    ptr += k * ROWS + row if K_FIRST else row * KS + k
    ptrs = ptr + (ks * ROWS + rows if K_FIRST else rows * KS + ks)
    if MASK_ROWS and MASK_K:
        tile = tl.load(ptrs, mask=(rows < ROWS - row) & (ks < KS - k), other=0)
    elif MASK_ROWS:
        tile = tl.load(ptrs, mask=rows < ROWS - row, other=0)
    elif MASK_K:
        tile = tl.load(ptrs, mask=ks < KS - k, other=0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def _decode(data_RK, scale_RK):
    """Return the values of a tile [R, K/2] with E4M3 scale bytes [R, K/16] as float16 [R, K], which holds each exactly."""
    codes_RK = tl.interleave(data_RK & 0xF, data_RK >> 4).to(tl.uint32)
    doubled_RK = ((0xC8643210 >> (4 * (codes_RK & 7))) & 0xF).to(tl.float16)  # a table of 2 · |value|, one nibble per code
    value_RK = tl.where(codes_RK >= 8, -0.5, 0.5).to(tl.float16) * doubled_RK
    value_RBk = value_RK.reshape(scale_RK.shape[0], scale_RK.shape[1], 16)
    scale_RB = scale_RK.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    scale_RB = tl.where((scale_RK & 0x7F) == 0x7F, float("nan"), scale_RB)  # Triton's interpreter makes 480 of E4M3's NaN
    return (value_RBk * scale_RB[:, :, None]).reshape(data_RK.shape[0], 2 * data_RK.shape[1])
