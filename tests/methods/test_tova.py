"""TOVA against a token-by-token simulation."""

import numpy as np
import pytest

from kvjax import registry
from kvjax.methods.tova import TOVA
from tests import prompts
from tests.methods.test_h2o import SHAPE, STEPS, attention_of, run, sequence, turn
from tests.prompts import compress, fast_jit


def attention(q, k, v, query, kept, kv_heads):
    """Mean probability over all heads [len(kept)] of a query, and its output [N, H]."""
    group = q.shape[0] // kv_heads
    p = np.concatenate([attention_of(q, k, h, group, query, kept) for h in range(kv_heads)])
    return p.mean(0), np.einsum("ns,nsh->nh", p, np.repeat(v, group, 0)[:, kept])


def simulate(row, budget):
    q, k, v = (x.astype(np.float64) for x in sequence(SHAPE, row))
    n, total = SHAPE.lengths[row], q.shape[1]
    q, k = turn(q, range(total)), turn(k, range(total))
    kept = list(range(n))
    seen, _ = attention(q, k, v, n - 1, kept, SHAPE.kv_heads)
    order = sorted(range(n - 1), key=lambda j: (-seen[j], j))
    kept = sorted(order[: budget - 1] + [n - 1])
    scores = {j: seen[j] for j in kept}
    outs, positions = [], []
    for at in range(n, n + STEPS):
        if len(kept) > budget:  # all but the last token
            kept.remove(min(kept[:-1], key=lambda j: (scores[j], j)))
        kept.append(at)
        seen, out = attention(q, k, v, at, kept, SHAPE.kv_heads)
        scores = dict(zip(kept, seen, strict=True))
        outs.append(out)
        positions.append(list(kept))
    return np.stack(outs), positions


def test_every_step_is_the_simulations():
    budget = 11
    outs, kept, caches = run(TOVA(budget=budget), SHAPE)
    for row in range(3):
        want, positions = simulate(row, budget)
        for t in range(STEPS):
            assert kept[t][row] == [positions[t]] * 2, (row, t)  # all KV heads alike
        np.testing.assert_allclose(outs[row], want, atol=2e-5)
    for cache in caches:
        assert int(cache.lengths.max()) <= budget + 1 == cache.k.shape[2]


def test_the_prompt_form_keeps_what_the_last_query_sees():
    prompt, layer = prompts.prompt(SHAPE), prompts.info(SHAPE)
    method = TOVA(budget=9, when="prompt")
    columns, lengths = (
        np.asarray(x) for x in fast_jit(TOVA.select, static_argnums=2)(method, prompt, layer)
    )
    for row, n in enumerate(SHAPE.lengths):
        q, k, v = (x[:, :n].astype(np.float64) for x in sequence(SHAPE, row))
        seen, _ = attention(turn(q, range(n)), turn(k, range(n)), v, n - 1, list(range(n)), 2)
        want = sorted(np.argsort(-seen[:-1], kind="stable")[:8].tolist() + [n - 1])
        for head in range(2):
            assert (columns[row, head, : lengths[row, head]] - (44 - n)).tolist() == want
    cache = compress(method, prompt, layer)
    assert not cache.evicts and registry.make("kvpress:tova").when == "prompt"
    assert registry.make("paper:tova").when == "step"
    with pytest.raises(ValueError, match="when='never' must be"):
        TOVA(when="never").compress(prompt, layer)
