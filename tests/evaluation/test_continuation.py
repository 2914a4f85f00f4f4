"""The materialised view of a cache, for every kind of cache."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attention import finish
from kvjax.rope import rotate
from kvjax.storage import Dense
from tests import prompts
from tests.prompts import Shape, compress, fast_jit, step

SHAPE = Shape(16, 4, 2, (70, 96))
FIRST = {case.partition("-")[0]: case for case in reversed(prompts.cases())}.values()


@fast_jit
def attend(view, q, positions):
    return finish(view.attend(q, positions))


@pytest.mark.parametrize(
    "case",
    # the forms of a method materialise by the same code: the first by default
    [pytest.param(c, marks=[] if c in FIRST else [pytest.mark.slow]) for c in prompts.cases()],
)
def test_a_view_is_what_the_cache_of_a_prompt_attends_to(case):
    method, layer = prompts.setting(case, SHAPE.row), prompts.info(SHAPE, 1)
    cache = compress(method, prompts.prompt(SHAPE), layer)
    view = Dense.of(cache, 160)
    assert view.k.shape == (2, 2, 160, 16)
    q, k, v, positions = prompts.step_inputs(SHAPE, 1)
    out, after = step(cache, q, k, v, positions)
    _, _, where = (np.asarray(x) for x in after.materialize())
    held = np.asarray(view.positions)
    for row in range(2):
        for head in range(2):
            new = set(where[row, head].tolist()) - {-1}
            old = set(held[row, head].tolist()) - {-1}
            assert new - old == {int(positions[row, 0])}
            assert len(old - new) <= (1 if cache.evicts else 0)
    rotated = rotate(layer.rope, q, positions)
    seen = attend(view, rotated, positions)
    assert jnp.isfinite(seen).all() and float(jnp.abs(seen).max()) > 0.05
    with pytest.raises(ValueError, match="slots=8 must be at least"):
        Dense.of(cache, 8)
