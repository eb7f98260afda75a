"""Small models and workloads for tests of the toy engine."""

import torch
from hypothesis import strategies as st

from graphshare.adapters.toy.batch import Request
from graphshare.adapters.toy.checkpoint import new_models
from graphshare.adapters.toy.config import EngineConfig, ToyConfig

CONFIG = ToyConfig(
    hidden_size=32,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_size=8,
    intermediate_size=32,
    max_model_len=64,
)


def engine_config(**changes):
    sizes = {
        "max_num_reqs": 3,
        "max_num_tokens": 14,
        "num_draft_tokens": 3,
        "page_size": 4,
        "num_pages": 24,
        "max_model_len": 64,
    }
    return EngineConfig(**(sizes | changes))


def models_that_sometimes_agree(seed, liveliness):
    """A random target, and a draft that guesses it: by the next token alone.

    The less the target's layers add, the more often the draft is right.
    """
    target, draft = new_models(CONFIG, seed)
    with torch.no_grad():
        for layer in target.layers:
            layer.out.weight.mul_(liveliness)
            layer.down.weight.mul_(liveliness)
        # Scores far apart and no fixed point: each token leads to another one.
        generator = torch.Generator().manual_seed(seed)
        target.embedding.weight.normal_(generator=generator)
        draft.fc.weight.zero_()
        draft.fc.weight[:, CONFIG.hidden_size :] = torch.eye(CONFIG.hidden_size)
        draft.layer.out.weight.mul_(liveliness)
        draft.layer.down.weight.mul_(liveliness)
    return target, draft


@st.composite
def arrivals(draw, engine):
    """Requests that fit the engine, in any number, of any lengths, arriving whenever."""
    requests = []
    for request_id in range(draw(st.integers(1, 6))):
        prompt = draw(st.lists(st.integers(0, 255), min_size=1, max_size=30))
        new = draw(st.integers(1, engine.max_model_len - engine.num_draft_tokens - len(prompt)))
        arrival = draw(st.integers(0, 8))
        requests.append(Request(request_id, tuple(prompt), min(new, 16), arrival))
    return requests
