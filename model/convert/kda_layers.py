"""Names that the formats' KDA and SwiGLU layers share, and checks for options that they lack."""

from model.config import ModelConfig
from model.convert.formats import FLAT, SAME, TAPS, TRANSPOSED, ConvertError, Names

KDA_NAMES: Names = {
    **{name: (f"{name}_proj.weight", TRANSPOSED) for name in ("q", "k", "v")},
    **{f"{name}_conv": (f"{name}_conv1d.weight", TAPS) for name in ("q", "k", "v")},
    "dt_bias": ("dt_bias", FLAT),
    "beta": ("b_proj.weight", TRANSPOSED),
    "output_norm": ("o_norm.weight", SAME),
    "output": ("o_proj.weight", TRANSPOSED),
}
SWIGLU_NAMES: Names = {name: (f"{name}_proj.weight", TRANSPOSED) for name in ("gate", "up", "down")}


def check_kda(fmt: str, cfg: ModelConfig, sizes: tuple[str, ...], **only: object) -> None:
    """Refuses KDA options that a format lacks.

    Args:
        sizes: options that the format has as one. only: options of which it has this value alone.

    Raises:
        ConvertError: naming the option.
    """
    for name, needed in {**only, "learned_initial_state": False}.items():
        value = getattr(cfg, name)
        if value != needed:
            raise ConvertError(
                f"format {fmt!r} has no config.model.{name}={value!r}; only {needed!r}"
            )
    given = {name: getattr(cfg, name) for name in sizes}
    if len(set(given.values())) > 1:
        text = ", ".join(f"{name}={value}" for name, value in given.items())
        raise ConvertError(f"format {fmt!r} has one head size; config.model has {text}")
