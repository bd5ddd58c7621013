"""QTensor: the codes and scales of one quantized array. value = decode(code) · (scale · tensor_scale), per block."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax import formats, rounding, scales
from fp4jax.recipe import OperandSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QTensor:
    """A quantized array.

    data: uint8. 4-bit formats: two codes per byte along `axis`, the even index in the low nibble, so half as long there;
    FP8: one code per byte. scale: float8_e8m0fnu (MX), float8_e4m3fn (NVFP4) or float32 (FP8); one per block, x.shape with
    axis divided by the block, and the other axis of a square block too; per tensor of shape (1, …, 1). tensor_scale:
    float32 of shape (1, …, 1), NVFP4 only. axis ≥ 0: the contraction axis.
    """

    data: jax.Array
    scale: jax.Array
    tensor_scale: jax.Array | None
    spec: OperandSpec = dataclasses.field(metadata={"static": True})
    axis: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def codes(self) -> jax.Array:
        """The codes, uint8, one per element, in the shape of the quantized array."""
        return unpack(self.data, self.axis) if self._element.bits == 4 else self.data

    @property
    def _element(self) -> formats.ElementFormat:
        assert self.spec.element is not None
        return self.spec.element

    @property
    def packed(self) -> jax.Array:
        """The codes as stored: two per byte for a 4-bit format."""
        return self.data

    @property
    def scale_bytes(self) -> jax.Array:
        """The E8M0 or E4M3 scale bytes, uint8."""
        if self.scale.dtype == jnp.float32:
            raise ValueError(f"format {self.spec.format!r} has float32 scales, no scale bytes")
        return lax.bitcast_convert_type(self.scale, jnp.uint8)

    def dequantize(self, dtype=jnp.float32) -> jax.Array:
        """Return the values in `dtype`; a block with scale NaN decodes to NaN, a product below 2^-126 to zero.

        A rule with a gain (floor_3_4) gives that multiple of the quantized array.
        """
        scale = self.scale
        if self.spec.scale == "e8m0":
            scale = decode_e8m0(self.scale_bytes)
        elif self.tensor_scale is not None:
            scale = scales.e4m3_decode(decode_e4m3(self.scale_bytes), self.tensor_scale)
        for axis, length in enumerate(self.shape):
            if scale.shape[axis] not in (1, length):
                scale = jnp.repeat(scale, length // scale.shape[axis], axis=axis)
        return rounding.flush(rounding.decode(self.codes, self._element) * scale).astype(dtype)


def decode_e8m0(byte: jax.Array) -> jax.Array:
    """Return 2^(byte - 127) as float32 for bytes 1…254 (uint8 or int32), NaN for 255."""
    byte = byte.astype(jnp.int32)
    return jnp.where(byte == scales.NAN_BYTE, jnp.nan, rounding.power_of_two(byte))


def encode_e8m0(byte: jax.Array) -> jax.Array:
    """Return bytes (int32, 0…255) as a float8_e8m0fnu array; `astype` would round and turn 0 into NaN."""
    return lax.bitcast_convert_type(byte.astype(jnp.uint8), jnp.float8_e8m0fnu)


def decode_e4m3(code: jax.Array) -> jax.Array:
    """Return E4M3 scales (uint8 codes) as float32, NaN for code 127."""
    return jnp.where(code == 0x7F, jnp.nan, rounding.decode(code, formats.E4M3))


def encode_e4m3(scale: jax.Array) -> jax.Array:
    """Return float32 scales on the E4M3 grid, or NaN, as a float8_e4m3fn array."""
    code = jnp.where(jnp.isnan(scale), jnp.uint8(0x7F), rounding.encode(scale, formats.E4M3))
    return lax.bitcast_convert_type(code, jnp.float8_e4m3fn)


def pack(codes: jax.Array, axis: int) -> jax.Array:
    """Pack 4-bit codes (uint8) two per byte along `axis`, the even index in the low nibble; the length must be even."""
    axis = axis % codes.ndim
    if codes.shape[axis] % 2:
        raise ValueError(f"cannot pack an odd number of codes: axis {axis} of {codes.shape}")
    low = lax.slice_in_dim(codes, 0, None, stride=2, axis=axis)
    high = lax.slice_in_dim(codes, 1, None, stride=2, axis=axis)
    return low | (high << 4)


def unpack(packed: jax.Array, axis: int) -> jax.Array:
    """Return the codes (uint8) that `pack` packed along `axis`."""
    axis = axis % packed.ndim
    pair = jnp.stack([packed & 0xF, packed >> 4], axis=axis + 1)
    return pair.reshape(*packed.shape[:axis], 2 * packed.shape[axis], *packed.shape[axis + 1 :])
