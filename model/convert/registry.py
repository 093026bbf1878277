"""Hugging Face formats by the model_type of their config.json."""

from typing import Any

from model.config import ModelConfig
from model.convert.fla import FLA_KDA
from model.convert.formats import ConvertError, Format, Json
from model.convert.kimi_linear import KIMI_LINEAR

FORMATS = {fmt.name: fmt for fmt in (KIMI_LINEAR, FLA_KDA)}


def read_config(config: Json, **options: Any) -> tuple[Format, ModelConfig]:
    """The format and the model of a config.json.

    Args:
        options: of `ModelConfig`, in addition to those of the file or overriding them (such as
            compute_dtype).

    Raises:
        ConvertError: another model, a missing field, or a feature that the model lacks.
    """
    kind = config.get("model_type")
    if kind not in FORMATS:
        raise ConvertError(f"model_type is {kind!r}; supported: {', '.join(FORMATS)}")
    try:
        found = FORMATS[kind].options(config) | {"vocab_size": config["vocab_size"]}
    except KeyError as error:
        raise ConvertError(f"config.json has no {error.args[0]!r}") from None
    try:
        return FORMATS[kind], ModelConfig(**{**found, **options})
    except ValueError as error:
        raise ConvertError(str(error)) from None
