"""Coefficient files: fitted coefficients with where they come from, as JSON under `calibration/`."""

import json
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentjax.errors import complaint, expecting, from_validation
from agentjax.performance.affine import Affine
from agentjax.performance.valid import remember

PACKAGE = Path(__file__).resolve().parents[1]

_Seconds = Annotated[
    float, Field(ge=0, le=1e3, allow_inf_nan=False), expecting("a number of seconds from 0 to 1000")
]
_Text = Annotated[str, Field(min_length=1), expecting("a string that is not empty")]
_Count = Annotated[int, Field(ge=1), expecting("an integer from 1")]
_Day = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$"), expecting("a date as YYYY-MM-DD")]


class _Object(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class Coefficients(_Object):
    """The coefficients of `Affine`, in seconds."""

    c0_s: _Seconds
    c_tok_s: _Seconds
    c_seq_s: _Seconds
    c_prefill_s: _Seconds
    c_kv_s: _Seconds
    c_mixed_s: _Seconds = 0.0
    overhead_s: _Seconds = 0.0
    wakeup_s: _Seconds = 0.0


class Source(_Object):
    """One file of measurements that the coefficients were fitted to."""

    file: _Text
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$"), expecting("64 hexadecimal digits")]
    repository: _Text
    commit: _Text
    measured: _Day | None
    use: _Text


class Residual(_Object):
    """Error of the fitted against the measured time over one region, in per cent; positive: too slow."""

    points: _Count
    median_pct: float
    p10_pct: float
    p90_pct: float
    worst_pct: float


class Range(_Object):
    """Where the coefficients were fitted, both ends included."""

    low: Annotated[float, Field(ge=0)]
    high: Annotated[float, Field(ge=0)]


class CoefficientFile(_Object):
    """All that a coefficient file says. Only `coefficients` changes a simulation; the rest is provenance."""

    gpu: _Text
    gpus: _Count
    model: _Text
    tensor_parallel: _Count
    engine: _Text
    fitted: _Day
    method: _Text
    coefficients: Coefficients
    valid: dict[str, Range] = {}
    residuals: dict[str, Residual] = {}
    sensitivity: dict[str, Coefficients] = {}
    inputs: list[Source] = []
    notes: list[_Text] = []


_NAMES = {
    "": tuple(CoefficientFile.model_fields),
    "coefficients": tuple(Coefficients.model_fields),
    "inputs": tuple(Source.model_fields),
}
_NAMES_BELOW = {
    "valid": tuple(Range.model_fields),
    "residuals": tuple(Residual.model_fields),
    "sensitivity": tuple(Coefficients.model_fields),
}


def folder() -> Path:
    """Where names are looked up: inside the installed package, or beside it in a checkout."""
    inside = PACKAGE / "calibration"
    return inside if inside.is_dir() else PACKAGE.parent / "calibration"


def available() -> tuple[str, ...]:
    """The names of the coefficient files that come with the package."""
    root = folder()
    return tuple(sorted(path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.json")))


def load(name_or_path: str | Path, **host: float) -> Affine:
    """The model of a coefficient file. A run that leaves the file's range of validity warns (`OutsideRange`).

    **Arguments:**

    - `name_or_path`: a name such as `rtx-pro-6000/llama-3.1-70b/tp2`, or a path that ends in `.json`.
    - `host`: `overhead_s` and `wakeup_s` in place of the file's.

    Raises `InputError` for an unknown name, a missing file, or a file that does not have the format.
    """
    file = read(name_or_path)
    model = Affine(**{**file.coefficients.model_dump(), **host})
    remember(model, str(name_or_path), file.valid)
    return model


def read(name_or_path: str | Path) -> CoefficientFile:
    """A coefficient file with its provenance; arguments and errors as for `load`."""
    is_path = Path(name_or_path).suffix == ".json"
    if not is_path and str(name_or_path) not in available():
        raise complaint(
            "coefficients", repr(str(name_or_path)), f"a path ending in .json or one of {_listed()}"
        )
    path = Path(name_or_path) if is_path else folder() / f"{name_or_path}.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or "unreadable file"
        raise complaint(
            str(path), reason[0].lower() + reason[1:], f"a coefficient file, or one of {_listed()}"
        ) from None
    except UnicodeDecodeError:
        raise complaint(str(path), "bytes that are not UTF-8", "JSON") from None
    except json.JSONDecodeError as error:
        raise complaint(f"{path}, line {error.lineno}", "text that is not JSON", error.msg) from None
    try:
        return CoefficientFile.model_validate(content)
    except ValidationError as error:
        keyed = {str(key): fields for name, fields in _NAMES_BELOW.items() for key in _keys(content, name)}
        raise from_validation(error, str(path), {**keyed, **_NAMES}) from None


def _listed() -> str:
    return ", ".join(available()) or f"the files under {folder()}, which are missing"


def _keys(content: object, name: str) -> tuple[str, ...]:
    inner = content.get(name) if isinstance(content, dict) else None
    return tuple(inner) if isinstance(inner, dict) else ()
