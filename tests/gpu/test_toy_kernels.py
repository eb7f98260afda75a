"""The toy engine on real kernels: the tokens of eager runs, and no build for draft prefills."""

from __future__ import annotations

import random
from typing import Any

import pytest

from graphshare.adapters.toy.batch import Request
from graphshare.adapters.toy.checkpoint import load_models
from graphshare.adapters.toy.config import BOS, EngineConfig
from graphshare.adapters.toy.demo.arguments import engine_config
from graphshare.adapters.toy.forwards import Forwards
from graphshare.adapters.toy.graphs import GraphRunner, decode_keys, target_keys
from graphshare.adapters.toy.kernel import ATTENTION, kernel_named
from graphshare.adapters.toy.reference import greedy_tokens
from graphshare.adapters.toy.speculation import EagerRunner, SpeculativeEngine
from graphshare.adapters.toy.text import shipped_passages
from tests.required_kernels import required

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[name for name in ATTENTION if name != "torch"])
def forwards(request: pytest.FixtureRequest) -> Forwards:
    kernel = kernel_named(request.param)
    sizes = engine_config(3, request.param)
    engine = EngineConfig(
        max_num_reqs=8,
        max_num_tokens=64,
        page_size=sizes.page_size,
        num_pages=1 + 8 * sizes.max_pages,
    )
    models = load_models(device="cuda")
    return required(lambda: Forwards(*models, engine, "cuda", kernel))


def _requests(seed: int) -> list[Request]:
    """Passages that the models were not trained on, cut anywhere, arriving in any step."""
    rng = random.Random(seed)
    requests = []
    for number in range(rng.randint(5, 12)):
        passage = rng.choice(shipped_passages())
        length = rng.randint(1, min(len(passage.encode()), 120))
        prompt = (BOS, *passage.encode()[:length])
        requests.append(Request(number, prompt, rng.randint(1, 64), rng.randint(0, 12)))
    return requests


@pytest.mark.parametrize("sharing", [True, False])
def test_lossless_against_the_eager_self(forwards: Forwards, sharing: bool) -> None:
    """Any prompts, any arrivals: the same tokens, and no build for a draft's prefill."""
    keys = (target_keys(forwards.engine), decode_keys(forwards.engine))
    eager = EagerRunner(forwards, *(forwards.make_owner() for _ in range(3)), keys=keys)
    owners: list[Any] = [forwards.make_owner() for _ in range(3)]
    with GraphRunner(
        forwards,
        sharing=sharing,
        device="cuda",
        target_owner=owners[0],
        prefill_owner=owners[1],
        decode_owner=owners[2],
    ) as runner:
        runner.capture()
        accepted = []
        for seed in range(8):
            expected, got = _requests(seed), _requests(seed)
            SpeculativeEngine(forwards, eager).run(expected)
            engine = SpeculativeEngine(forwards, runner)
            engine.run(got)
            assert [r.output for r in got] == [r.output for r in expected], f"seed {seed}"
            accepted.append(engine.counts.tokens_per_step)
        # The draft is of use: a wrong state would let it guess nothing.
        assert min(accepted) > 1.5
        assert owners[0].num_builds > 0
        assert (owners[1].num_builds == 0) is sharing


def test_as_good_as_plain_greedy_decoding(forwards: Forwards) -> None:
    """Rounding by the batch's shape may turn a near tie, and nearly never does."""
    prompts = [(BOS, *passage.encode()[:60]) for passage in shipped_passages()[:8]]
    requests = [Request(n, prompt, 48) for n, prompt in enumerate(prompts)]
    with GraphRunner(forwards, device="cuda") as runner:
        runner.capture()
        SpeculativeEngine(forwards, runner).run(requests)
    plain = [
        greedy_tokens(
            forwards.target_model,
            forwards.engine,
            prompt,
            48,
            device="cuda",
            kernel=forwards.kernel,
        )
        for prompt in prompts
    ]
    same = [r.output == expected for r, expected in zip(requests, plain, strict=True)]
    print(f"{forwards.kernel.name}: {sum(same)} of {len(same)} texts the same as plain")
    # Texts part at a near tie only: what is said before is the same.
    shared = [
        next((i for i, (a, b) in enumerate(zip(r.output, e, strict=False)) if a != b), len(e))
        for r, e in zip(requests, plain, strict=True)
    ]
    assert sum(shared) >= 0.8 * sum(map(len, plain))


def test_verify_finds_no_difference(forwards: Forwards) -> None:
    with GraphRunner(forwards, device="cuda") as runner:
        runner.capture()
        compared = 0
        prepare = runner.prepare_target

        def verifying(batch: Any) -> Any:
            nonlocal compared
            key = prepare(batch)
            runner.shared.verify(batch)
            runner.target.refresh(key, batch)
            compared += 1
            return key

        runner.prepare_target = verifying
        SpeculativeEngine(forwards, runner).run(_requests(0))
        assert compared > 5
