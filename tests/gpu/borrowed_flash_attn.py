"""A target and a borrower on FlashAttention, small, for compute-sanitizer.

    compute-sanitizer --tool memcheck python -m tests.gpu.borrowed_flash_attn fa2 graphs
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool initcheck \\
        python -m tests.gpu.borrowed_flash_attn fa3 eager

With graphs, PyTorch's allocator must keep its blocks, so an access past a tensor may still lie in
a block; run eagerly, on the very states, each tensor is an allocation of its own. ``planted``
launches with room for two splits on a plan for more: to see that the tool sees it.
"""

from __future__ import annotations

import argparse
import dataclasses

import torch

from graphshare import AttentionState, GraphPool, Phase, capture_descriptors, share_states
from graphshare.adapters.paged import PagedCapacity
from tests.flash_attn_models import TOLERANCE, Model, batches_of, make_borrower, make_owner
from tests.paged_kernels import Shapes

CAPACITY = PagedCapacity(max_num_tokens=32, max_num_reqs=8, max_seq_len=1024, page_size=256)
TARGET = Shapes(num_q_heads=8, num_kv_heads=2)
DRAFT = Shapes(num_q_heads=4, num_kv_heads=1)
KEYS = capture_descriptors([1, 32], 8, uniform_query_lens=[1, 4])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=("fa2", "fa3"))
    parser.add_argument("how", choices=("graphs", "eager", "planted"))
    options = parser.parse_args()
    owner = make_owner(options.kind, TARGET, CAPACITY)
    kernel = make_borrower(options.kind, DRAFT, CAPACITY)
    model, draft = Model(owner, TARGET, CAPACITY), Model(kernel, DRAFT, CAPACITY)
    worst = 0.0
    if options.how == "graphs":
        target = GraphPool("target", owner=owner, spec=owner.spec, device="cuda")
        prefill = GraphPool("draft.prefill", spec=kernel.spec, device="cuda")
        shared = share_states(target, prefill)
        target.capture(KEYS, model.forward)
        prefill.capture(KEYS, draft.forward)
    for key in KEYS:
        for batch in batches_of(key, 2, capacity=CAPACITY):
            model.prepare(batch)
            draft.prepare(batch)
            if options.how == "graphs":
                target.refresh(key, batch)
                outs = target.replay(key)
                borrowed = prefill.replay(shared.live_key)
            else:
                state = owner.build(key, batch, Phase.REPLAY)
                if options.how == "planted":
                    told = dataclasses.replace(state.attn_metadata, num_splits=2)
                    state = AttentionState(told, state.slot_mappings)
                outs, borrowed = model.forward(key, state), draft.forward(key, state)
            worst = max(worst, model.errors(outs, batch), draft.errors(borrowed, batch))
    torch.cuda.synchronize()
    print(f"{options.kind}, {options.how}: relative error {worst:.1e}")
    if not worst < TOLERANCE and options.how != "planted":
        raise SystemExit("wrong numbers")


if __name__ == "__main__":
    main()
