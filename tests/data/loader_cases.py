"""A corpus, its loader and plain batches, for the tests of the loader."""

from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from data.batch import Batch
from data.loader import Loader, make_loader
from data.options import DataConfig

ROOT = Path(__file__).parents[2]


def make_mesh(data: int = 1, fsdp: int = 1, context: int = 1, tensor: int = 1) -> Mesh:
    shape = (data, fsdp, 1, context, tensor)
    devices = np.asarray(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, ("data", "fsdp", "expert", "context", "tensor"))


def make_config(tmp_path: Path) -> DataConfig:
    """Forty documents of 1 to 400 bytes, in rows of 64."""
    generator = np.random.default_rng(0)
    for number, size in enumerate(generator.integers(1, 400, 40)):
        text = generator.integers(32, 126, size, dtype=np.uint8).tobytes()
        (tmp_path / f"{number:02}.txt").write_bytes(text)
    return DataConfig(
        source="text",
        path=str(tmp_path),
        sequence_length=64,
        global_batch_size=4,
        eval_fraction=0.2,
    )


def change(config: DataConfig, **options) -> DataConfig:
    return DataConfig(**{**config.__dict__, **options})


def loader(config: DataConfig, split: str = "train", mesh: Mesh | None = None, **more) -> Loader:
    return make_loader(
        config, split=split, mesh=mesh or make_mesh(), seed=7, **{"positions": True, **more}
    )


def take(source: Loader, count: int) -> list[dict[str, list]]:
    return [plain(next(source)) for _ in range(count)]


def plain(batch: Batch) -> dict[str, list]:
    fields = batch._asdict().items()
    return {name: np.asarray(field).tolist() for name, field in fields if field is not None}
