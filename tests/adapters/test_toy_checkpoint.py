"""The toy engine's files: what is written is what is read; held-out text stays out."""

import sys

import pytest
import torch

from graphshare.adapters.toy.checkpoint import load_models, new_models, read_facts, save_models
from graphshare.adapters.toy.config import ToyConfig
from graphshare.adapters.toy.text import load_corpus, shipped_passages

CONFIG = ToyConfig(hidden_size=32, num_layers=1, head_size=8, intermediate_size=32)


def test_what_is_saved_is_loaded(tmp_path):
    """Weights come back rounded to float16, with their sizes and facts, as float32."""
    path = tmp_path / "models.safetensors"
    models = new_models(CONFIG, seed=3)
    save_models(path, *models, {"held_out_tokens_per_step": 2.5})
    loaded = load_models(path)
    assert loaded[0].config == CONFIG
    assert read_facts(path) == {"held_out_tokens_per_step": 2.5}
    for before, after in zip(models, loaded, strict=True):
        for name, tensor in after.state_dict().items():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, before.state_dict()[name].half().float())


def test_new_models_are_the_same_for_a_seed_and_leave_the_generator_alone():
    state = torch.get_rng_state()
    first, second = new_models(CONFIG, seed=1), new_models(CONFIG, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    for one, other in zip(first, second, strict=True):
        for name, tensor in one.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name])


def test_a_file_that_is_missing_or_something_else_is_refused(tmp_path):
    from safetensors.torch import save_file

    with pytest.raises(FileNotFoundError):
        load_models(tmp_path / "nothing.safetensors")
    other = tmp_path / "other.safetensors"
    save_file({"x": torch.zeros(1)}, str(other))
    with pytest.raises(ValueError, match="not a checkpoint"):
        load_models(other)


def test_without_safetensors_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"graphshare\[cli\]"):
        save_models(tmp_path / "x.safetensors", *new_models(CONFIG), {})


def test_held_out_text_is_never_trained_on():
    """No paragraph of a held-out document, or of a shipped passage, occurs in the training text."""
    corpus = load_corpus()
    assert sum(map(len, corpus.train)) > 500_000
    assert sum(map(len, corpus.held_out)) > 20_000
    learned = {
        " ".join(paragraph.split()) for text in corpus.train for paragraph in text.split("\n\n")
    }
    passages = shipped_passages()
    assert len(passages) >= 8
    for text in (*corpus.held_out, *corpus.validation, *passages):
        for paragraph in text.split("\n\n"):
            plain = " ".join(paragraph.split())
            assert len(plain) < 24 or plain not in learned
