"""GPUs: peak rates, memory, links, power and price of one, as their data sheets state them."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentjax.errors import expecting, from_validation
from agentjax.performance.catalogue import read_entry

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), expecting("a number > 0")]
_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), expecting("a number >= 0")]


class Device(BaseModel):
    """One GPU. Rates are peaks without sparsity; how much of them is reached is a matter of the model that
    uses them. Each file of `conf/hardware` says where its numbers are from and which of them are assumptions.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: Annotated[str, Field(min_length=1), expecting("a string that is not empty")]
    bf16_tflops: _Positive
    """Matrix products in bfloat16 (TFLOP/s)."""
    fp8_tflops: Annotated[float | None, Field(gt=0), expecting("a number > 0, or null")] = None
    """Matrix products in 8-bit floating point (TFLOP/s); None: no units for them."""
    memory_mib: _Positive
    """Memory that the driver shows (MiB)."""
    memory_gb_s: _Positive
    """Memory bandwidth (GB/s)."""
    link_gb_s: _Positive
    """Bandwidth to the other GPUs of the server, in one direction (GB/s)."""
    link_latency_us: _NotNegative
    """Time of one hop of a ring between GPUs (µs)."""
    tdp_w: _Positive
    """Board power limit (W)."""
    idle_w: _NotNegative
    """Power without work (W)."""
    price_usd_per_gpu_hour: _NotNegative
    """A list price (US dollars per GPU and hour): a default to override, prices differ severalfold."""
    price_date: Annotated[
        str | None, Field(pattern=r"^\d{4}-\d\d-\d\d$"), expecting("a date as YYYY-MM-DD")
    ] = None

    @property
    def memory_bytes(self) -> float:
        """Memory that the driver shows (bytes)."""
        return self.memory_mib * 2**20

    @property
    def memory_bytes_per_s(self) -> float:
        """Memory bandwidth (bytes/s)."""
        return self.memory_gb_s * 1e9

    @property
    def link_bytes_per_s(self) -> float:
        """Bandwidth to the other GPUs in one direction (bytes/s)."""
        return self.link_gb_s * 1e9

    def flops_per_s(self, weights: str = "bf16") -> float:
        """Peak rate of matrix products (FLOP/s).

        **Arguments:**

        - `weights`: `fp8` multiplies in fp8 where the GPU can; `bf16` and `mxfp4`, whose weights are widened
            as they are read, multiply in bfloat16.
        """
        eight = self.fp8_tflops if weights == "fp8" else None
        return (eight or self.bf16_tflops) * 1e12


def read_device(name_or_path: str | Path) -> Device:
    """A GPU of the catalogue, such as `h100_sxm`, or of a YAML file with the same fields.

    Raises `InputError` for an unknown name, or a file that does not have the fields.
    """
    where, fields = read_entry("hardware", name_or_path)
    try:
        return Device.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error, where, {"": tuple(Device.model_fields)}) from None
