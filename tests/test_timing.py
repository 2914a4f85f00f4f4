import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import timing


def test_measure_counts_calls_and_orders_its_numbers():
    calls = []

    def sleep(seconds):
        calls.append(seconds)
        time.sleep(seconds if len(calls) > 2 else 0.1)

    got = timing.measure(sleep, 0.005, warmup=2, repeats=5)
    assert len(calls) == 7 and len(got.all_seconds) == 5
    assert 0.005 <= got.min_seconds <= got.median_seconds <= got.p99_seconds
    assert got.median_seconds < 0.1  # the two slow warm-up calls are not counted


def test_measure_waits_for_the_device():
    def slow(x):
        return jax.lax.fori_loop(0, 400, lambda _, y: y @ x / jnp.linalg.norm(y), x)

    x, jitted = jnp.ones((200, 200)), jax.jit(slow)
    jax.block_until_ready(jitted(x))
    start = time.perf_counter()
    jax.block_until_ready(jitted(x))
    whole = time.perf_counter() - start
    assert timing.measure(jitted, x, warmup=1, repeats=3).median_seconds > whole / 5


def test_measure_steps_threads_a_donated_state():
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    first = jnp.zeros(8)
    got, last = timing.measure_steps(step, first, warmup=3, repeats=4)
    assert last.tolist() == [7.0] * 8 and len(got.all_seconds) == 4
    assert first.is_deleted()


def test_wrong_counts_are_errors():
    with pytest.raises(ValueError, match="repeats=0"):
        timing.measure(lambda: None, repeats=0)


def test_peak_memory_sees_an_allocation():
    before = timing.peak_rss_bytes()
    held = np.ones(max(0, before - timing.current_rss_bytes()) // 8 + 8_000_000)
    assert timing.peak_rss_bytes() >= before + 40_000_000
    assert timing.current_rss_bytes() >= held.nbytes
    del held
    assert timing.peak_rss_bytes() >= timing.current_rss_bytes()
    if timing.reset_peak_rss():
        assert timing.peak_rss_bytes() < before + 40_000_000
