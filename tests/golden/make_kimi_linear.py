"""Makes kimi_linear.npz: results of transformers' `kimi_linear` with small random weights.

    python3.11 -m venv /tmp/hf && /tmp/hf/bin/pip install torch==2.13.0 transformers==5.24.0
    /tmp/hf/bin/python tests/golden/make_kimi_linear.py

The model's own code runs with its casts to float32 replaced by float64, so the results are exact to
the last digit of float32. Names are the model's own: "w:" is a weight, "g:" the loss's gradient
with respect to it; two rows of 70 tokens (more than a chunk, and not a multiple of it).
"""

import pathlib
import types

import numpy as np
import torch
import transformers
from transformers.models.kimi_linear import KimiLinearConfig, modeling_kimi_linear

HERE = pathlib.Path(__file__).parent


def in_float64(module: types.ModuleType) -> types.ModuleType:
    """A copy of the module's code in which every float32 is a float64."""
    source = pathlib.Path(module.__file__).read_text()
    source = source.replace("torch.float32", "torch.float64").replace(".float()", ".double()")
    source = source.replace("torch.float)", "torch.float64)")
    lifted = types.ModuleType(module.__name__)
    lifted.__package__ = module.__package__
    lifted.__file__ = module.__file__
    exec(compile(source, module.__file__, "exec"), lifted.__dict__)
    return lifted


def make_weights(model: torch.nn.Module, random: np.random.Generator) -> None:
    """Random weights, exact in float32, large enough that every nonlinearity bends."""
    for name, weight in model.named_parameters():
        shape = tuple(weight.shape)
        if name.endswith("A_log"):
            value = np.log(random.uniform(1, 16, shape))
        elif name.endswith("dt_bias"):
            step = np.exp(random.uniform(np.log(1e-3), np.log(0.1), shape))
            value = step + np.log(-np.expm1(-step))
        elif "norm" in name:
            value = random.uniform(0.5, 1.5, shape)
        elif "conv1d" in name:
            value = random.uniform(-0.5, 0.5, shape)
        elif "embed" in name:
            value = random.normal(size=shape)
        else:
            value = random.normal(size=shape) / np.sqrt(shape[-1])
        weight.data = torch.tensor(value.astype(np.float32), dtype=torch.float64)


def main() -> None:
    random = np.random.default_rng(0)
    config = KimiLinearConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        linear_head_dim=16,
        linear_num_heads=2,
        layer_types=["linear_attention"] * 2,
        mlp_layer_types=["dense"] * 2,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    model = in_float64(modeling_kimi_linear).KimiLinearForCausalLM(config).double()
    make_weights(model, random)

    tokens = random.integers(0, 61, (2, 70))
    x = torch.tensor(random.normal(size=(2, 70, 32)).astype(np.float32)).double().requires_grad_()
    cotangent = random.normal(size=(2, 70, 32)).astype(np.float32)
    mixed = model.model.layers[0].self_attn(x)
    (mixed * torch.tensor(cotangent)).sum().backward()
    model.zero_grad()

    logits = model(input_ids=torch.tensor(tokens), use_cache=False).logits
    targets = np.roll(tokens, -1, axis=1)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten())
    loss.backward()
    assert logits.dtype == torch.float64

    arrays = {"tokens": tokens, "targets": targets, "loss": loss.detach()}
    arrays |= {
        "logits": logits[:, -20:].detach(),
        "mixer_in": x.detach(),
        "mixer_out": mixed.detach(),
    }
    arrays |= {"mixer_d_out": cotangent, "mixer_d_in": x.grad}
    for name, weight in model.named_parameters():
        arrays |= {f"w:{name}": weight.detach(), f"g:{name}": weight.grad}
    stored = {
        name: np.asarray(a, np.int32 if name in ("tokens", "targets") else np.float32)
        for name, a in arrays.items()
    }
    np.savez_compressed(HERE / "kimi_linear.npz", **stored)
    size = (HERE / "kimi_linear.npz").stat().st_size
    print(f"transformers {transformers.__version__}, loss {loss.item():.6f}, {size} bytes")


if __name__ == "__main__":
    main()
