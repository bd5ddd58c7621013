"""The scaled_matmul kernel in Triton's interpreter against numpy. Run by tests/test_kernels.py with TRITON_INTERPRET=1.

MNK below are chosen so that no tile divides them, unless a test says otherwise.
"""

import functools

import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from fp4jax.ops import matmul_triton, triton_call
from fp4jax.ops.matmul_triton import TileConfig

LAYOUTS = [(1, 1), (1, 0), (0, 1), (0, 0)]
RAGGED_MNK = (150, 90, 352)
GRID = np.array([float(v) for v in oracle.grid("e2m1")])
VALUES = np.concatenate([GRID, -GRID])  # by code
TILE = TileConfig(128, 64, 128)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    with interpreter.installed(monkeypatch):
        yield


def matmul(*args, config=TILE, **kwargs):
    kwargs = {"target": triton_call.current_target().arch, **kwargs}
    return matmul_triton.scaled_matmul(*args, config=config, **kwargs)


class Operand:
    """A random FP4 matrix [R, K], stored with its contraction on `axis`; value: float64."""

    def __init__(self, rows: int, k: int, axis: int, scale_bytes: np.ndarray | None = None, block: int = 32, seed: int = 0):
        rng = np.random.default_rng(seed)
        codes = rng.integers(0, 16, (rows, k), dtype=np.uint8)
        if scale_bytes is None:
            scale_bytes = rng.integers(107, 148, (rows, k // block), dtype=np.uint8)
        decoded = np.where(scale_bytes == 255, np.nan, np.exp2(scale_bytes - 127.0)) if block == 32 else E4M3[scale_bytes]
        self.value = VALUES[codes] * np.repeat(decoded, block, axis=1)
        data = codes[:, ::2] | codes[:, 1::2] << 4
        self.axis = axis
        self.arrays = [jnp.asarray(x if axis == 1 else x.T) for x in (data, scale_bytes)]


E4M3_GRID = np.array([*map(float, oracle.grid("e4m3")), np.nan])
E4M3 = np.concatenate([E4M3_GRID, -E4M3_GRID])  # by code
ones = functools.partial(np.full, fill_value=127, dtype=np.uint8)


def product(a: Operand, b: Operand, **kwargs) -> np.ndarray:
    """Return the kernel's result as float64."""
    result = matmul(*a.arrays, *b.arrays, a_axis=a.axis, b_axis=b.axis, **kwargs)
    return np.asarray(result.astype(jnp.float32)).astype(np.float64)


def operands(mnk=RAGGED_MNK, layout=(1, 1), **kwargs) -> tuple[Operand, Operand]:
    m, n, k = mnk
    return Operand(m, k, layout[0], seed=1, **kwargs), Operand(n, k, layout[1], seed=2, **kwargs)


def assert_close(got: np.ndarray, a: Operand, b: Operand, factor: float = 1.0, output: float = 0.0):
    """|C - C64| ≤ √K · 2^-24 · (|A|·|B|), which a sum of K float32 terms keeps in any order; output: rounding of C itself."""
    exact = factor * (a.value @ b.value.T)
    bound = np.sqrt(a.value.shape[1]) * 2.0**-24 * abs(factor) * (abs(a.value) @ abs(b.value).T) + output * abs(exact)
    excess = abs(got - exact) - bound
    assert excess.max() <= 0, f"{(excess > 0).sum()} of {excess.size} elements, worst by {excess.max()}"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("mnk", [RAGGED_MNK, (128, 64, 256), (1, 1, 32), (150, 64, 256), (128, 90, 288)], ids=str)
def test_with_unit_scales_every_element_is_exact_in_every_layout(mnk, layout):
    m, n, k = mnk
    a = Operand(m, k, layout[0], ones((m, k // 32)), seed=1)
    b = Operand(n, k, layout[1], ones((n, k // 32)), seed=2)
    np.testing.assert_array_equal(product(a, b), a.value @ b.value.T)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_with_scales_the_error_is_that_of_float32_sums(layout):
    a, b = operands(layout=layout)
    assert_close(product(a, b), a, b)


def test_bfloat16_output():
    a, b = operands()
    got = matmul(*a.arrays, *b.arrays, a_axis=1, b_axis=1, out_dtype=jnp.bfloat16)
    assert got.dtype == jnp.bfloat16
    assert_close(product(a, b, out_dtype=jnp.bfloat16), a, b, output=2.0**-8)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_nan_scale_reaches_every_output_of_its_row_and_no_other(layout):
    a, b = operands(layout=layout)
    m, n, k = RAGGED_MNK
    scales = [np.full((rows, k // 32), 127, np.uint8) for rows in (m, n)]
    scales[0][m - 1, 0] = 255
    scales[1][3, k // 32 - 1] = 255  # in the part of the last tile that is not masked
    a, b = (Operand(rows, k, axis, s) for rows, axis, s in zip((m, n), layout, scales, strict=True))
    expected = np.zeros((m, n), bool)
    expected[m - 1] = expected[:, 3] = True
    got = product(a, b)
    np.testing.assert_array_equal(np.isnan(got), expected)
    np.testing.assert_array_equal(got, a.value @ b.value.T)


@pytest.mark.parametrize("k", [512, 352, 160], ids=str)  # two whole steps each, a masked one, and splits that get nothing
@pytest.mark.parametrize("split_k", [2, 4])
def test_split_k_adds_partial_sums(k, split_k):
    a, b = operands((150, 90, k), (1, 0))
    config = TileConfig(128, 64, 128, split_k=split_k)
    assert_close(product(a, b, config=config), a, b)
    unit = [Operand(rows, k, axis, ones((rows, k // 32)), seed=axis) for rows, axis in ((150, 1), (90, 0))]
    np.testing.assert_array_equal(product(*unit, config=config), unit[0].value @ unit[1].value.T)
    assert_close(product(a, b, config=config, out_dtype=jnp.bfloat16), a, b, output=2.0**-8)  # rounded by XLA, to nearest


@pytest.mark.parametrize("group_m", [1, 2, 3, 8])
def test_every_tile_is_computed_whatever_the_order_of_programs(group_m):
    m, n, k = 150, 90, 32
    a, b = Operand(m, k, 1, ones((m, 1)), seed=1), Operand(n, k, 1, ones((n, 1)), seed=2)
    np.testing.assert_array_equal(product(a, b, config=TileConfig(32, 32, 32, group_m=group_m)), a.value @ b.value.T)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_nvfp4_decodes_every_e4m3_scale_and_applies_the_tensor_scales(layout):
    m, n, k = 140, 70, 272
    codes = np.arange(m * k // 16, dtype=np.int64) * 37 % 256  # every code, on both operands
    codes[(codes & 127) == 127] = 0x38
    scales = codes.astype(np.uint8).reshape(m, k // 16)
    a, b = Operand(m, k, layout[0], scales, 16, seed=1), Operand(n, k, layout[1], scales[m - n :], 16, seed=2)
    tensor_scales = {"a_tensor_scale": jnp.full((1, 1), 0.375), "b_tensor_scale": jnp.full((1, 1), 3e-5)}
    factor = float(np.float32(0.375) * np.float32(3e-5))
    assert_close(product(a, b, **tensor_scales), a, b, factor, output=2.0**-23)


def test_nvfp4_nan_scale():
    m, n, k = 40, 30, 48
    scales = np.full((m, k // 16), 0x38, np.uint8)
    scales[7, 1], scales[9, 2] = 0x7F, 0xFF
    a, b = Operand(m, k, 1, scales, 16, seed=1), Operand(n, k, 1, scales[10:], 16, seed=2)
    one = jnp.ones(())
    np.testing.assert_array_equal(product(a, b, a_tensor_scale=one, b_tensor_scale=one), a.value @ b.value.T)


def test_alpha_multiplies_the_result():
    a, b = operands()
    assert_close(product(a, b, alpha=16 / 9), a, b, float(np.float32(16 / 9)), output=2.0**-23)
    config = TileConfig(128, 64, 128, split_k=2)
    assert_close(product(a, b, alpha=16 / 9, config=config), a, b, float(np.float32(16 / 9)), output=2.0**-22)


def test_works_under_jit():
    a, b = operands()
    multiply = jax.jit(functools.partial(matmul, a_axis=1, b_axis=1))
    np.testing.assert_array_equal(multiply(*a.arrays, *b.arrays), product(a, b))


@pytest.mark.parametrize("target", matmul_triton.CONFIGS)
def test_every_shipped_tile_computes_the_product(target):
    if jax.default_backend() == "gpu" and target != triton_call.current_target().arch:
        pytest.skip("tiles of another GPU")
    for config in matmul_triton.CONFIGS[target]:
        m, n, k = 270, 264, 288
        a, b = Operand(m, k, 1, ones((m, k // 32)), seed=1), Operand(n, k, 0, ones((n, k // 32)), seed=2)
        np.testing.assert_array_equal(product(a, b, target=target, config=config), a.value @ b.value.T)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a_axis": 0}, "k=300 is not a multiple of block=32"),
        ({"b_data": jnp.zeros((90, 192), jnp.uint8)}, "scales of shape"),
        ({"b_data": jnp.zeros((90, 192), jnp.uint8), "b_scale": jnp.zeros((90, 12), jnp.uint8)}, "contraction of 352"),
        ({"a_scale": jnp.zeros((150, 11), jnp.float8_e8m0fnu)}, "uint8 matrices"),
        ({"a_data": jnp.zeros((150, 8), jnp.uint8)}, "k=16 is not a multiple of block=32"),
        ({"a_tensor_scale": jnp.ones(1)}, "one operand only"),
        ({"a_tensor_scale": jnp.ones(1), "b_tensor_scale": jnp.ones(1), "target": "gfx950"}, "cannot multiply NVFP4"),
        ({"a_tensor_scale": jnp.ones(2), "b_tensor_scale": jnp.ones(1)}, "one float32"),
        ({"out_dtype": jnp.float16}, "only float32 and bfloat16"),
        ({"target": "sm_80"}, "target='sm_80' is not supported"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(change, message):
    a, b = operands()
    arrays = dict(zip(("a_data", "a_scale", "b_data", "b_scale"), (*a.arrays, *b.arrays), strict=True))
    with pytest.raises(ValueError, match=message):
        matmul(**{**arrays, "a_axis": 1, "b_axis": 1, **change})


def test_an_operand_beyond_the_reach_of_32_bit_offsets_is_refused():
    data, scale = (jax.ShapeDtypeStruct((2**17, k), jnp.uint8) for k in (2**14, 2**10))
    with pytest.raises(ValueError, match="offsets reach"):
        jax.eval_shape(functools.partial(matmul, a_axis=1, b_axis=1), data, scale, data, scale)


def choice(*shape, target="gfx950"):
    config = matmul_triton.choose_config(target, *shape)
    return config.tile_m, config.tile_n, config.split_k


def test_the_choice_of_tiles():
    assert choice(65536, 14336, 4096) == (256, 256, 1)  # Llama 8B, fprop of the MLP
    assert choice(65536, 128256, 4096) == (256, 256, 1)  # its head
    assert choice(4096, 1024, 65536) == (256, 128, 2)  # wgrad of k and v: 128 tiles, a long K
    assert choice(2048, 2048, 2048) == (128, 128, 1)  # few tiles, K too short to split
    assert choice(64, 4096, 14336) == (64, 64, 2)  # 56 steps: in 2, at 16 or more each
    assert choice(65536, 128256, 4096, target="sm_100") == (128, 256, 1)
    assert choice(4096, 1024, 65536, target="sm_90") == (128, 128, 1)
    with pytest.raises(ValueError, match="no tile configuration"):
        choice(1, 1, 32, target="gfx942")
