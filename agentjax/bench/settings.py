"""What a benchmark run is asked to do, checked before anything is sent."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import httpx
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from agentjax.errors import complaint, expecting, from_validation, shown

_Text = Annotated[str, Field(min_length=1), expecting("text")]
_Flag = Annotated[bool, expecting("true or false")]
_Whole = Annotated[int, Field(ge=0, le=10**9), expecting("an integer of at least 0")]
_Count = Annotated[int, Field(ge=1, le=10**6), expecting("an integer from 1 to 1000000")]
_MaybeWhole = Annotated[
    Annotated[int, Field(ge=0, le=10**6)] | None, expecting("null or an integer of at least 0")
]
_MaybeCount = Annotated[
    Annotated[int, Field(ge=1, le=10**6)] | None, expecting("null or an integer of at least 1")
]
_Seconds = Annotated[
    float, Field(gt=0, le=1e6, allow_inf_nan=False), expecting("a number of seconds greater than 0")
]
_Share = Annotated[float, Field(ge=0, le=1), expecting("a number from 0 to 1")]


def _differ(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) < len(values):
        raise ValueError("values that differ")
    return values


_Differ = AfterValidator(_differ)
_Counts = Annotated[tuple[_Count, ...], Field(min_length=1), _Differ]
_Shares = Annotated[tuple[_Share, ...], Field(min_length=1), _Differ]


class Settings(BaseModel):
    """The keys of `conf/bench.yaml`, where each is explained; those of both modes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    url: _Text
    model: _Text
    out: Annotated[str | None, expecting("null or the name of a file, such as bench.jsonl")] = None
    endpoint: Annotated[Literal["chat", "completions"], expecting("chat or completions")] = "chat"
    prompts: Annotated[Literal["text", "ids"], expecting("text or ids")] = "text"
    token_ids: Annotated[
        tuple[_Whole, _Whole], expecting("a list of two integers, the first below the second")
    ] = (300, 4000)
    api_key_env: Annotated[str | None, expecting("null or the name of an environment variable")] = (
        "OPENAI_API_KEY"
    )
    extra_body: Annotated[dict[str, Any], expecting("an object")] = {}
    temperature: Annotated[
        Annotated[float, Field(ge=0, le=100)] | None, expecting("null or a number of at least 0")
    ] = 0.0
    max_tokens_field: Annotated[
        Literal["max_tokens", "max_completion_tokens"], expecting("max_tokens or max_completion_tokens")
    ] = "max_tokens"
    seed: _Whole = 0
    salt: Annotated[str | None, expecting("null or text")] = None
    resume: _Flag = False

    prompt_tokens: _Counts = (64, 256, 1024)
    output_tokens: _Counts = (64,)
    concurrency: _Counts = (1, 2, 4, 8)
    cached_share: _Shares = (0.0,)
    repeats: _Count = 1
    requests: _MaybeCount = None
    warmup_requests: _MaybeWhole = None

    max_concurrency: _MaybeCount = None

    timeout_s: _Seconds = 600.0
    stall_timeout_s: _Seconds = 60.0
    max_attempts: _Count = 4
    backoff_s: _Seconds = 0.5
    longest_wait_s: _Seconds = 60.0

    @property
    def base_url(self) -> str:
        """The address that `/chat/completions` is added to; `/v1` where the url has no path of its own."""
        url = self.url.rstrip("/")
        return url if urlsplit(url).path else f"{url}/v1"


def check_settings(values: Mapping[str, Any]) -> Settings:
    """The settings of a run from plain values, lists and dictionaries.

    Raises:
        InputError: names the key that cannot be used.
    """
    values = {key: _tuples(value) for key, value in values.items()}
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        raise from_validation(error, "bench", {"": Settings.model_fields}) from None
    _check_url(settings.url)
    low, high = settings.token_ids
    if low >= high:
        raise complaint("token_ids", f"[{low}, {high}]", "two integers, the first below the second")
    if settings.prompts == "ids" and settings.endpoint != "completions":
        raise complaint("endpoint", settings.endpoint, "completions, since prompts=ids sends token ids")
    if settings.api_key_env and not re.fullmatch(r"[A-Za-z_]\w*", settings.api_key_env):
        # Not shown: it may be a key that was given in place of the name of its variable.
        raise complaint("api_key_env", "something else", "the name of an environment variable")
    return settings


def _check_url(url: str) -> None:
    expected = "an address such as http://127.0.0.1:8080, with or without /v1"
    if "@" in url.partition("//")[2].partition("/")[0]:
        raise complaint("url", "a user name or password in it", "the key in the variable of api_key_env")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):
        raise complaint("url", shown(url), expected) from None
    if not usable or parts.query or parts.fragment:
        raise complaint("url", shown(url), expected)


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
