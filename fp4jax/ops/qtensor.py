"""QTensor: the codes and scales of one quantized array. value = decode(code) · scale, per block."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax import rounding
from fp4jax.recipe import OperandSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QTensor:
    """A quantized array.

    data: uint8. MXFP4: two codes per byte along `axis`, the even index in the low nibble, so half as long there; FP8: one
    code per byte. scale: the decode scale. MXFP4: float8_e8m0fnu, one per block, x.shape with axis divided by the block
    (as uint8 through `scale_bytes`); FP8: float32 of shape (1, …, 1). axis ≥ 0: the contraction axis.
    """

    data: jax.Array
    scale: jax.Array
    spec: OperandSpec = dataclasses.field(metadata={"static": True})
    axis: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def codes(self) -> jax.Array:
        """The codes, uint8, one per element, in the shape of the quantized array."""
        return unpack(self.data, self.axis) if self.spec.block else self.data

    @property
    def packed(self) -> jax.Array:
        """The codes as stored: two per byte for a 4-bit format."""
        return self.data

    @property
    def scale_bytes(self) -> jax.Array:
        """The E8M0 scale bytes, uint8 (MXFP4 only)."""
        if self.scale.dtype != jnp.float8_e8m0fnu:
            raise ValueError(f"format {self.spec.format!r} has a {self.scale.dtype} scale, no scale bytes")
        return lax.bitcast_convert_type(self.scale, jnp.uint8)

    def dequantize(self, dtype=jnp.float32) -> jax.Array:
        """Return the values in `dtype`; a block with scale NaN decodes to NaN, a product below 2^-126 to zero."""
        element = self.spec.element
        assert element is not None
        values = rounding.decode(self.codes, element)
        scale = decode_e8m0(self.scale_bytes) if self.spec.block else self.scale
        if self.spec.block:
            scale = jnp.repeat(scale, self.spec.block, axis=self.axis)
        return rounding.flush(values * scale).astype(dtype)


def decode_e8m0(byte: jax.Array) -> jax.Array:
    """Return 2^(byte - 127) as float32 for bytes 1…254 (uint8 or int32), NaN for 255."""
    byte = byte.astype(jnp.int32)
    return jnp.where(byte == rounding.NAN_BYTE, jnp.nan, rounding.power_of_two(byte))


def encode_e8m0(byte: jax.Array) -> jax.Array:
    """Return bytes (int32, 0…255) as a float8_e8m0fnu array; `astype` would round and turn 0 into NaN."""
    return lax.bitcast_convert_type(byte.astype(jnp.uint8), jnp.float8_e8m0fnu)


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
