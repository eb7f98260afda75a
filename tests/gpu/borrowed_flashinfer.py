"""A target and a borrower on FlashInfer, small, for compute-sanitizer.

    FLASHINFER_DISABLE_JIT=1 compute-sanitizer --tool memcheck \\
        python -m tests.gpu.borrowed_flashinfer fa2 graphs
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 FLASHINFER_DISABLE_JIT=1 compute-sanitizer \\
        --tool initcheck python -m tests.gpu.borrowed_flashinfer decode eager

With graphs, PyTorch's allocator must keep its blocks, so an access past a tensor may still lie in
a block; run eagerly, on the very states, each tensor is an allocation of its own.
"""

from __future__ import annotations

import argparse
import dataclasses

import torch

from graphshare import GraphPool, Phase, share_states
from tests.flash_attn_models import batches_of
from tests.flashinfer_models import (
    CAPACITY,
    KINDS,
    TOLERANCE,
    Model,
    keys_of,
    make_borrower,
    make_owner,
)
from tests.paged_kernels import Shapes

SMALL = dataclasses.replace(CAPACITY, max_num_tokens=32, max_num_reqs=16, max_seq_len=400)
TARGET = Shapes(num_q_heads=8, num_kv_heads=2)
# Where the rules allow other heads, other heads.
DRAFTS = {
    "decode": Shapes(num_q_heads=4, num_kv_heads=1),
    "fa2": Shapes(num_q_heads=4, num_kv_heads=1),
    "fa3": Shapes(num_q_heads=8, num_kv_heads=8),
    "batch_attention": TARGET,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=tuple(KINDS))
    parser.add_argument("how", choices=("graphs", "eager"))
    options = parser.parse_args()
    shapes = DRAFTS[options.kind]
    keys = keys_of(options.kind, (1, 32))
    owner = make_owner(options.kind, TARGET, SMALL)
    kernel = make_borrower(shapes, SMALL)
    model, draft = Model(owner, TARGET, SMALL), Model(kernel, shapes, SMALL)
    worst = 0.0
    if options.how == "graphs":
        target = GraphPool("target", owner=owner, spec=owner.spec, device="cuda")
        prefill = GraphPool("draft.prefill", spec=kernel.spec, device="cuda")
        shared = share_states(target, prefill)
        target.capture(keys, model.forward)
        prefill.capture(keys, draft.forward)
    for key in keys:
        for batch in batches_of(key, 2, capacity=SMALL):
            model.prepare(batch)
            draft.prepare(batch)
            if options.how == "graphs":
                target.refresh(key, batch)
                outs = target.replay(key)
                borrowed = prefill.replay(shared.live_key)
            else:
                state = owner.build(key, batch, Phase.REPLAY)
                outs, borrowed = model.forward(key, state), draft.forward(key, state)
            worst = max(worst, model.errors(outs, batch), draft.errors(borrowed, batch))
    torch.cuda.synchronize()
    print(f"{options.kind}, {options.how}: relative error {worst:.1e}")
    if not worst < TOLERANCE:
        raise SystemExit("wrong numbers")


if __name__ == "__main__":
    main()
