"""Both models in one safetensors file: float16 on disk, float32 in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from graphshare.adapters.toy.config import ToyConfig
from graphshare.adapters.toy.draft import DraftModel
from graphshare.adapters.toy.model import TargetModel

__all__ = ["SHIPPED", "load_models", "new_models", "read_facts", "save_models"]

SHIPPED = Path(__file__).with_name("checkpoint.safetensors")
"""The checkpoint that comes with the package."""

_PREFIXES = ("target.", "draft.")


def _safetensors() -> Any:
    try:
        return import_module("safetensors.torch")
    except ImportError as error:
        raise ImportError(
            "the toy engine's checkpoint needs safetensors: pip install 'graphshare[cli]'"
        ) from error


def new_models(config: ToyConfig, seed: int = 0) -> tuple[TargetModel, DraftModel]:
    """Make both models with random weights, on the CPU, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        target, draft = TargetModel(config), DraftModel(config)
        for model in (target, draft):
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    # What adds to the residual stream starts smaller (GPT-2).
                    adds = name.endswith(("out.weight", "down.weight"))
                    scale = (2 * config.num_layers) ** -0.5 if adds else 1.0
                    torch.nn.init.normal_(parameter, std=0.04 * scale)
    return target, draft


def save_models(
    path: Path | str, target: TargetModel, draft: DraftModel, facts: Mapping[str, Any]
) -> None:
    """Write both models.

    Args:
        path: Of the file.
        target: The target.
        draft: The draft.
        facts: What to remember about the training; must go into JSON.

    Raises:
        TypeError: For facts that do not go into JSON.
        ImportError: Without safetensors.
    """
    about = {"config": json.dumps(asdict(target.config)), "facts": json.dumps(dict(facts))}
    library = _safetensors()
    tensors = {
        prefix + name: tensor.detach().to("cpu", torch.float16).contiguous()
        for prefix, model in zip(_PREFIXES, (target, draft), strict=True)
        for name, tensor in model.state_dict().items()
    }
    library.save_file(tensors, str(path), metadata=about)


def _metadata(path: Path | str) -> dict[str, str]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    with _safetensors().safe_open(str(path), framework="pt") as opened:
        return opened.metadata() or {}


def read_facts(path: Path | str = SHIPPED) -> dict[str, Any]:
    """Return what :func:`save_models` was told about the training."""
    return json.loads(_metadata(path).get("facts", "{}"))


def load_models(
    path: Path | str = SHIPPED, device: torch.device | str = "cpu"
) -> tuple[TargetModel, DraftModel]:
    """Read both models, float32, without gradients.

    Raises:
        FileNotFoundError: Without that file.
        ImportError: Without safetensors.
        ValueError: For a file that holds something else.
    """
    about = _metadata(path)
    if "config" not in about:
        raise ValueError(f"{path} is not a checkpoint of the toy engine")
    target, draft = new_models(ToyConfig(**json.loads(about["config"])))
    tensors = _safetensors().load_file(str(path))
    for prefix, model in zip(_PREFIXES, (target, draft), strict=True):
        own = {
            name.removeprefix(prefix): tensor.float()
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        model.load_state_dict(own)
        model.to(device).requires_grad_(False).eval()
    return target, draft
