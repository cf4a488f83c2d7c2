"""Coefficient files: fitted coefficients with where they come from, as JSON under `calibration/`."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentjax.errors import InputError, among, complaint, expecting, from_validation, shown
from agentjax.performance.affine import Affine
from agentjax.performance.base import MOST_S
from agentjax.performance.piecewise import Piecewise
from agentjax.performance.valid import remember

PACKAGE = Path(__file__).resolve().parents[1]

_Seconds = Annotated[
    float,
    Field(ge=0, le=MOST_S, allow_inf_nan=False),
    expecting(f"a number of seconds from 0 to {MOST_S:g}"),
]
_Tokens = Annotated[float, Field(ge=0, allow_inf_nan=False), expecting("a number of tokens from 0")]
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


_AtKnots = Annotated[list[_Seconds], Field(min_length=1)]
_Knot = Annotated[float, Field(ge=1, allow_inf_nan=False), expecting("a number of decodes from 1")]


class PiecewiseCoefficients(_Object):
    """The coefficients of `Piecewise`, in seconds; `decode_s` and `decode_context_s` at each of the knots."""

    knots: Annotated[list[_Knot], Field(min_length=1)]
    decode_s: _AtKnots
    decode_context_s: _AtKnots
    prefill_s: _Seconds
    prefill_tok_s: _Seconds
    prefill_work_s: _Seconds = 0.0
    short_prefill_tokens: _Tokens = 0.0
    short_prefill_work_s: _Seconds = 0.0
    prefill_context_s: _Seconds = 0.0
    shared_s: _Seconds = 0.0
    overhead_s: _Seconds = 0.0
    wakeup_s: _Seconds = 0.0


class Source(_Object):
    """One file of measurements that the coefficients were fitted to; of a published one, where it is from."""

    file: _Text
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$"), expecting("64 hexadecimal digits")]
    repository: _Text | None = None
    commit: _Text | None = None
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


_Bound = Annotated[float, Field(ge=0, allow_inf_nan=False), expecting("a number of seconds >= 0")]


class Confidence(_Object):
    """Between which values a coefficient lies with so much confidence; lists for one at several knots."""

    low: _Bound | list[_Bound]
    high: _Bound | list[_Bound]


class Rung(_Object):
    """One of the models that were compared, from simple to rich, by their mean absolute error held out."""

    terms: _Text
    form: Literal["affine", "piecewise"]
    coefficients: _Count
    error_pct: float
    held_out_pct: float
    standard_error_pct: float
    chosen: bool


class Software(_Object):
    """What fitted the coefficients."""

    agentjax: _Text
    seed: Annotated[int, Field(ge=0), expecting("an integer from 0")]


class CoefficientFile(_Object):
    """All that a coefficient file says. Only `coefficients` changes a simulation; the rest is provenance."""

    form: Literal["affine"] = "affine"
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
    intervals: dict[str, Confidence] = {}
    ladder: list[Rung] = []
    undetermined: list[_Text] = []
    software: Software | None = None


class PiecewiseFile(CoefficientFile):
    """The same for the piecewise model."""

    form: Literal["piecewise"] = "piecewise"  # pyright: ignore[reportIncompatibleVariableOverride]
    coefficients: PiecewiseCoefficients  # pyright: ignore[reportIncompatibleVariableOverride]
    sensitivity: dict[str, PiecewiseCoefficients] = {}  # pyright: ignore[reportIncompatibleVariableOverride]


_FORMS: dict[str, type[CoefficientFile]] = {"affine": CoefficientFile, "piecewise": PiecewiseFile}


def _names(form: type[CoefficientFile], content: object) -> dict[str, tuple[str, ...]]:
    """The fields that each object of a file may have, by the name of the field that holds it."""
    coefficients = tuple(
        PiecewiseCoefficients.model_fields if form is PiecewiseFile else Coefficients.model_fields
    )
    below = {
        "valid": tuple(Range.model_fields),
        "residuals": tuple(Residual.model_fields),
        "intervals": tuple(Confidence.model_fields),
        "sensitivity": coefficients,
    }
    keyed = {key: fields for name, fields in below.items() for key in _keys(content, name)}
    return {
        **keyed,
        "": tuple(form.model_fields),
        "coefficients": coefficients,
        "inputs": tuple(Source.model_fields),
        "ladder": tuple(Rung.model_fields),
        "software": tuple(Software.model_fields),
    }


def folder() -> Path:
    """Where names are looked up: inside the installed package, or beside it in a checkout."""
    inside = PACKAGE / "calibration"
    return inside if inside.is_dir() else PACKAGE.parent / "calibration"


def available() -> tuple[str, ...]:
    """The names of the coefficient files that come with the package."""
    root = folder()
    return tuple(sorted(path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.json")))


def load(name_or_path: str | Path, **host: float) -> Affine | Piecewise:
    """The model of a coefficient file. A run that leaves the file's range of validity warns (`OutsideRange`).

    **Arguments:**

    - `name_or_path`: a name such as `rtx-pro-6000/llama-3.1-70b/tp2`, or a path that ends in `.json`.
    - `host`: `overhead_s` and `wakeup_s` in place of the file's.

    Raises `InputError` for an unknown name, a missing file, or a file that does not have the format.
    """
    file = read(name_or_path)
    kind = Piecewise if isinstance(file, PiecewiseFile) else Affine
    try:
        model = kind(**{**file.coefficients.model_dump(), **host})
    except InputError as error:
        raise InputError(f"{name_or_path}, coefficients.{error}") from None
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
    return check(str(path), content)


def check(path: str, content: Any) -> CoefficientFile:
    """The fields of a coefficient file as one; `path` is named in errors.

    Raises:
        InputError: content that does not have the format.
    """
    name = content.get("form", "affine") if isinstance(content, dict) else "affine"
    form = _FORMS.get(name) if isinstance(name, str) else None
    if form is None:
        raise complaint(f"{path}, form", shown(name), among(name, _FORMS))
    try:
        return form.model_validate(content)
    except ValidationError as error:
        raise from_validation(error, path, _names(form, content)) from None


def _listed() -> str:
    return ", ".join(available()) or f"the files under {folder()}, which are missing"


def _keys(content: object, name: str) -> tuple[str, ...]:
    inner = content.get(name) if isinstance(content, dict) else None
    return tuple(inner) if isinstance(inner, dict) else ()
