"""Data-sheet numbers of the GPUs that a plan can be made for: dense matrix rates, memory, links. None was measured here.

Sources. mi355x: AMD Instinct MI355X data sheet (FP8: 8 192 FLOP per clock and unit · 256 units · 2.4 GHz; MXFP4 twice,
BF16 half of it), 8 TB/s, Infinity Fabric 7 × 153.6 GB/s in both directions together. mi300x: AMD Instinct MI300X data sheet,
7 × 128 GB/s. b200: NVIDIA HGX B200 data sheet (sparse rates halved), NVLink 5 1.8 TB/s in both directions together. h100 and
h200: NVIDIA H100 SXM and H200 SXM data sheets (sparse rates halved), NVLink 4 900 GB/s. A GB is 10⁹ bytes, the smaller
reading. Links are those within one node; between nodes they are slower, which is not modelled.
"""

import dataclasses

from train.errors import InputError


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU. arch: what kernels are compiled for. rates: dense products by format, FLOP/s. memory: bytes. bandwidth: of the
    memory; links: what one GPU sends; B/s."""

    name: str
    arch: str
    rates: dict[str, float]
    memory: float
    bandwidth: float
    links: float

    def unit(self, kind: str) -> str:
        """Return the matrix unit that multiplies "fp4", "fp8" or "bf16": FP4 is decoded to BF16 where there is none for it."""
        return kind if kind in self.rates else "bf16"


_HOPPER = {"bf16": 0.989e15, "fp8": 1.979e15}
DEVICES = {
    d.name: d
    for d in (
        Device("mi355x", "gfx950", {"bf16": 2.5166e15, "fp8": 5.0332e15, "fp4": 10.0663e15}, 288e9, 8.0e12, 537.6e9),
        Device("mi300x", "gfx942", {"bf16": 1.3074e15, "fp8": 2.6149e15}, 192e9, 5.3e12, 448e9),
        Device("b200", "sm_100", {"bf16": 2.25e15, "fp8": 4.5e15, "fp4": 9.0e15}, 180e9, 8.0e12, 900e9),
        Device("h100", "sm_90", _HOPPER, 80e9, 3.35e12, 450e9),
        Device("h200", "sm_90", _HOPPER, 141e9, 4.8e12, 450e9),
    )
}


def get(name: str) -> Device:
    """Return the device of that name; raises InputError for an unknown one."""
    if name not in DEVICES:
        raise InputError(f"--device={name} is not one of {', '.join(DEVICES)}")
    return DEVICES[name]
