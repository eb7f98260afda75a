"""Model folders without weights, and weights that make a model say something.

vLLM's dummy weights are tiny: whatever the attention does is lost beside the embedding. Here each
layer adds a share of its own, so that the next token hangs on all that was said before; scores are
those of random vectors, so that there is no fixed point. The EAGLE head is the embedding of the
token and a little of its own: it is right now and then.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch

_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_SMALL = _8B | {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Head size 128, as the 8B pair: at 64 FlashAttention 3 captures mixed batches without their mask.
_SMALL_128 = _SMALL | {"num_attention_heads": 8, "num_key_value_heads": 2}
PAIRS = {"small": _SMALL, "small128": _SMALL_128, "8b": _8B}


def write_pair(folder: Path, pair: str, method: str) -> tuple[Path, Path]:
    """Write the folders of a target and its draft; return them."""
    target = PAIRS[pair]
    draft = target | {"num_hidden_layers": 1}
    if method == "eagle3":
        draft = draft | {"draft_vocab_size": target["vocab_size"]}
    paths = []
    for name, config in ((pair, target), (f"{method}-{pair}", draft)):
        path = folder / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
        paths.append(path)
    return paths[0], paths[1]


@torch.no_grad()
def fill(model: torch.nn.Module, liveliness: float) -> None:
    """Give a model its weights, the same in each process.

    Args:
        model: As vLLM made it, a target or a draft.
        liveliness: What a layer adds beside what it is given, about.
    """
    draft = any(".fc." in f".{name}." for name, _ in model.named_parameters())
    for name, weight in model.named_parameters():
        if not torch.is_floating_point(weight):
            weight.zero_()
            continue
        seed = zlib.crc32(f"{name} {tuple(weight.shape)}".encode())
        generator = torch.Generator(weight.device).manual_seed(seed)
        if weight.ndim == 1:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
        elif "embed_tokens" in name or "lm_head" in name:
            weight.normal_(generator=generator)
        elif ".fc." in f".{name}.":
            weight.normal_(generator=generator).mul_(0.02 / weight.shape[1] ** 0.5)
            size = min(weight.shape)
            weight[:, :size] += torch.eye(size, dtype=weight.dtype, device=weight.device)
        else:
            scale = weight.shape[1] ** -0.5
            if "o_proj" in name or "down_proj" in name:
                scale *= liveliness * (0.5 if draft else 1.0)
            weight.normal_(generator=generator).mul_(scale)


def use_in(vllm_loader: Any, liveliness: float) -> None:
    """Let ``load_format="dummy"`` give these weights, in this process."""

    def load_weights(_: Any, model: torch.nn.Module, model_config: Any) -> None:
        del model_config
        fill(model, liveliness)

    vllm_loader.DummyModelLoader.load_weights = load_weights
