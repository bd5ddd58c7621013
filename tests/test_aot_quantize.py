"""The machine code of the quantize kernel, compiled for GPUs that need not be here.

VALU: vector instructions per element of x, those of the matrix core aside. An MI355X (256 CUs of 64 lanes, 2.4 GHz, 8 TB/s)
issues 15 in the time that memory takes for the 3.06 bytes of an element, so up to there memory can be the bound.
"""

import itertools
import re

import pytest

from benchmarks import asm
from fp4jax.ops import matmul, quantize_triton
from fp4jax.ops.kernels import Cast
from fp4jax.recipe import OperandSpec

RAGGED = (8176, 4128)  # a multiple of 32 along C, of 16 along R
PLAIN, ROTATED = Cast(OperandSpec("mxfp4")), Cast(OperandSpec("mxfp4"), size=16)


def of_gfx950(row, col, shape=asm.QUANTIZED, native=True):
    """Return (the program's text, its VALU instructions per element), checked for what no program should have."""
    compiled = asm.compile_quantize("gfx950", row, col, shape=shape, native=native)
    text = compiled.asm["amdgcn"]
    found = asm.metrics(text)
    assert found.spills == 0
    assert compiled.shared_bytes <= 160 * 1024
    assert any(name.startswith("buffer_load_dwordx") for name in found.program)
    assert not any(name.startswith(("flat", "scratch")) for name in found.program)
    return text, found.vector_instructions / (128 if native else 32)


@pytest.mark.parametrize(
    ("row", "col", "most"),
    [
        (PLAIN, None, 5.0),
        (None, PLAIN, 4.5),
        (PLAIN, PLAIN, 7.5),
        (ROTATED, None, 4.5),
        (None, ROTATED, 5.0),
        (ROTATED, ROTATED, 9.0),
    ],
    ids=["row", "col", "both", "rotated row", "rotated col", "rotated both"],
)
def test_gfx950_native(row, col, most):
    text, valu = of_gfx950(row, col)
    assert "v_cvt_scalef32_pk_fp4_f32" in text
    assert valu <= most


@pytest.mark.parametrize("cast", [PLAIN, ROTATED], ids=["plain", "rotated"])
def test_gfx950_native_with_masks(cast):
    assert of_gfx950(cast, cast, RAGGED)[1] <= 10


def test_gfx950_does_not_write_a_byte_of_a_word_right_after_another():
    """After a conversion into a byte other than the first, the GPU wants a cycle until the next access to that register."""
    lines = [line.strip() for line in of_gfx950(ROTATED, ROTATED)[0].splitlines()]
    lines = [line for line in lines if line and not line.startswith((";", "."))]
    pairs = [(a, b) for a, b in itertools.pairwise(lines) if a.startswith("v_cvt_scalef32_pk_fp4") and "op_sel" in a]
    assert pairs
    assert not [(a, b) for a, b in pairs if re.search(rf"\b{a.split()[1].rstrip(',')}\b", b)]


@pytest.mark.parametrize(
    ("cast", "most"),
    [
        (Cast(OperandSpec("mxfp4", rounding="sr")), 80),
        (Cast(OperandSpec("mxfp4", rounding="sr"), size=16), 89),
        (Cast(OperandSpec("nvfp4")), 87),
    ],
    ids=["mxfp4 sr", "mxfp4 sr rotated", "nvfp4"],
)
def test_gfx950_portable(cast, most):
    assert of_gfx950(cast, cast, native=False)[1] <= most


def test_gfx950_two_casts_of_which_one_is_native():
    own = quantize_triton._static(PLAIN, "gfx950")
    assert own[7] == "gfx950"
    other = Cast(OperandSpec("mxfp4", rounding="sr"))
    compiled = asm.compile_quantize("gfx950", PLAIN, other)
    assert asm.metrics(compiled.asm["amdgcn"]).spills == 0
    assert "v_cvt_scalef32_pk_fp4_f32" in compiled.asm["amdgcn"]


@pytest.mark.parametrize("cast", [PLAIN, ROTATED], ids=["plain", "rotated"])
def test_sm_100_native(cast):
    compiled = asm.compile_quantize("sm_100", cast, cast)
    assert "cvt.rn.satfinite.e2m1x2.f32" in compiled.asm["ptx"]


@pytest.mark.parametrize("cast", [PLAIN, Cast(OperandSpec("nvfp4"), size=16)], ids=str)
def test_sm_90_portable(cast):
    compiled = asm.compile_quantize("sm_90", cast, cast, shape=RAGGED)
    assert "e2m1" not in compiled.asm["ptx"]


@pytest.mark.parametrize(("target", "limit"), [("gfx950", 160), ("sm_100", 227)])
def test_the_largest_rotation_fits(target, limit):
    cast = Cast(OperandSpec("mxfp4"), size=matmul.LARGEST_ROTATION)
    compiled = asm.compile_quantize(target, cast, None)
    assert compiled.shared_bytes <= limit * 1024
