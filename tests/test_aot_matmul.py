"""The machine code of the scaled_matmul kernel, compiled for GPUs that need not be here. Run by tests/test_kernels.py.

Every shipped tile configuration, with shapes that it divides and shapes that it does not (masks), in all four layouts.
"""

import dataclasses
import re

import pytest

from benchmarks import asm
from fp4jax.ops.matmul_triton import CONFIGS, TileConfig, choose_config

LAYOUTS = [(1, 1), (1, 0), (0, 1), (0, 0)]
SHARED_LIMIT = 227 * 1024  # of a block on sm_90 and sm_100


def name(parameter) -> str:
    if isinstance(parameter, TileConfig):
        return f"{parameter.tile_m}x{parameter.tile_n}x{parameter.tile_k}"
    return str(parameter)


def compile_gfx950(config, shape=asm.EVEN, a_axis=1, b_axis=1, out="*bf16"):
    return asm.compile_matmul("gfx950", config, shape, a_axis=a_axis, b_axis=b_axis, out=out)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", [asm.EVEN, asm.RAGGED], ids=str)
@pytest.mark.parametrize("config", CONFIGS["gfx950"], ids=name)
def test_gfx950_is_native_fits_and_spills_nothing(config, shape, layout):
    compiled = compile_gfx950(config, shape, *layout)
    assert asm.faults(compiled.asm["amdgcn"], compiled.shared_bytes) == []


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gfx950_inner_loop_of_the_large_tile_is_nearly_all_matrix_instructions(layout):
    found = asm.metrics(compile_gfx950(CONFIGS["gfx950"][0], asm.EVEN, *layout).asm["amdgcn"])
    assert found.others_per_matrix_cycle <= 0.10


def test_gfx950_short_contraction_is_not_unrolled():
    compiled = compile_gfx950(CONFIGS["gfx950"][0], (4096, 4096, 1024))  # with a known count of 4 steps, 20 registers spill
    assert asm.faults(compiled.asm["amdgcn"], compiled.shared_bytes) == []


@pytest.mark.parametrize("mnk", [(4096, 4096, 8192), (14336, 4096, 32768), (4096, 1024, 65536)], ids=str)
def test_gfx950_float32_results_in_the_tile_that_is_chosen(mnk):
    """Partial sums on a mesh and along K, weight gradients; the 256 x 256 tile spills a register with them."""
    config = choose_config("gfx950", *mnk, float32=True)
    compiled = compile_gfx950(config, mnk, out="*fp32")
    assert asm.faults(compiled.asm["amdgcn"], compiled.shared_bytes) == []
    assert config.split_k == (2 if mnk[1] == 1024 else 1)


def test_gfx950_output_beyond_2_gib():
    compiled = compile_gfx950(CONFIGS["gfx950"][0], (65536, 128256, 4096))  # the head of Llama 8B
    assert asm.faults(compiled.asm["amdgcn"], compiled.shared_bytes) == []
    assert re.search(r"arith\.muli .*: i64", compiled.asm["ttgir"])  # the offset of a tile's corner


def test_the_check_sees_emulation_and_overuse():
    """One warp, or a tile_k below 128, compiles without complaint to bfloat16 arithmetic."""
    config = dataclasses.replace(CONFIGS["gfx950"][-1], tile_m=32, tile_n=32)
    for change in ({"num_warps": 1}, {"tile_k": 64}):
        compiled = compile_gfx950(dataclasses.replace(config, **change))
        messages = asm.faults(compiled.asm["amdgcn"], compiled.shared_bytes)
        assert messages[0] == "no native FP4 matrix instruction", change
        assert "bf16" in messages[1], change
    compiled = compile_gfx950(dataclasses.replace(CONFIGS["gfx950"][0], num_warps=8), a_axis=0, b_axis=0)
    messages = asm.faults(compiled.asm["amdgcn"], compiled.shared_bytes)
    assert len(messages) == 1
    assert re.fullmatch(r"spills \d+ vector registers", messages[0])
    assert "needs 163841 bytes of LDS" in asm.faults(compiled.asm["amdgcn"], 163841)[1]


@pytest.mark.parametrize(
    ("block", "kind", "shape", "layout"),
    [
        (32, "mxf4", asm.EVEN, (1, 1)),
        (32, "mxf4", asm.RAGGED, (1, 0)),
        (16, "mxf4nvf4", asm.EVEN, (0, 0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("config", CONFIGS["sm_100"], ids=name)
def test_sm_100_is_native_in_both_formats(config, block, kind, shape, layout):
    compiled = asm.compile_matmul("sm_100", config, shape, a_axis=layout[0], b_axis=layout[1], block=block)
    kinds = set(re.findall(r"tcgen05\.mma\.\S*kind::(\w+)\.block_scale\.block(\d+)", compiled.asm["ptx"]))
    assert kinds == {(kind, str(block))}
    assert not re.search(r"wgmma|mma\.sync", compiled.asm["ptx"])
    assert compiled.shared_bytes <= SHARED_LIMIT


@pytest.mark.parametrize(("block", "type_"), [(32, "bf16"), (16, "f16")])
@pytest.mark.parametrize("config", CONFIGS["sm_90"], ids=name)
def test_sm_90_emulates_both_formats(config, block, type_):
    compiled = asm.compile_matmul("sm_90", config, asm.RAGGED, a_axis=1, b_axis=0, block=block)
    assert re.search(rf"wgmma\.mma_async\S*\.f32\.{type_}\.{type_}", compiled.asm["ptx"])
    assert compiled.shared_bytes <= SHARED_LIMIT
