"""Bytes, floors, crossover, time limits; the whole benchmark runs in test_experiments.py."""

import dataclasses
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax.pallas
from experiments import (
    kernel_bench,
    kernel_check,
    kernel_methods,
    kernel_ops,
    kernel_plot,
    kernel_shapes,
)
from experiments import kernel_tables as tables
from experiments.kernel_bench import TINY
from experiments.kernel_clock import Clock, Program, Rates, compiled, num_copies
from experiments.kernel_shapes import CASES, MODELS, floor
from experiments.runner import Run

OPS = [m.name for m in pkgutil.iter_modules(kvjax.pallas.__path__) if m.ispkg]
RATES = Rates(10.0, 1.0, 1e-6)


def test_the_plan_covers_every_op():
    assert len(OPS) > 5
    assert (
        {case.op for case in CASES.values()}
        == set(OPS)
        == set(kernel_shapes.TOKENS_AT) | {"paged_decode"}
    )


@pytest.mark.parametrize(
    "name",  # every other under `slow`: making the arguments of an op takes seconds
    [pytest.param(n, marks=[pytest.mark.slow] if i % 2 else []) for i, n in enumerate(CASES)],
)
def test_bytes_of_a_plan_are_those_of_live_arrays(name):
    case = CASES[name]
    shape = case.shape(MODELS["smollm2_135m"], 128, 2)
    arrays, keywords = kernel_shapes.api(case.op).example(shape)
    live = sum(np.asarray(x).nbytes for x in jax.tree.leaves(arrays))
    row = kernel_shapes.plan_row(name, "smollm2_135m", 128, 2, ("H200",), None)
    assert row["argument_bytes"] == live > 0
    assert row["bytes"] == live + row["output_bytes"] and row["output_bytes"] > 0
    assert row["kind"] == "floor, not measured" and "seconds" not in row
    assert kernel_shapes.arguments(case.op, shape).keywords.keys() == keywords.keys()


def test_output_bytes_are_those_of_a_call():
    shape = CASES["pooled_decode"].shape(MODELS["smollm2_135m"], 64, 1)
    api = kernel_shapes.api("pooled_decode")
    out = api.pooled_decode(*api.example(shape)[0], impl="xla")
    moved = kernel_shapes.moved("pooled_decode", shape)
    assert moved.output_bytes == sum(x.nbytes for x in out)


def test_a_full_cache_moves_its_keys_and_values_and_a_coded_one_less():
    rows = {
        name: kernel_shapes.plan_row(name, "llama3_8b", 32768, 8, ("H200",), None)
        for name in ("pooled_decode", "quant_decode_4bit", "anchor_decode_20x", "ragged_decode_8x")
    }
    full = 4 * 8 * 32768 * 8 * 128
    assert full < rows["pooled_decode"]["bytes"] < 1.001 * full
    assert rows["quant_decode_4bit"]["full_over_bytes"] == pytest.approx(3.2, rel=0.01)
    assert rows["anchor_decode_20x"]["full_over_bytes"] == pytest.approx(20, rel=0.06)
    assert rows["ragged_decode_8x"]["full_over_bytes"] == pytest.approx(8, rel=0.01)


def test_tensor_parallel_leaves_one_kv_head():
    assert MODELS["llama3_70b_tp8"] == (8, 1, 128)


def test_a_floor_follows_from_bytes_and_bandwidth_or_from_products():
    assert floor(2e9, 0.0, 1000, None) == (2e-3, "bytes")
    assert floor(2e9, 4e12, 1000, 1) == (4.0, "products")
    row = kernel_shapes.plan_row("pooled_decode", "llama3_8b", 2048, 1, ("A100", "H200"), None)
    assert row["floor_seconds"]["A100"] == row["bytes"] / 2039e9
    assert row["floor_seconds"]["H200"] == row["bytes"] / 4800e9
    assert set(row["limited_by"].values()) == {"bytes"}
    row = kernel_shapes.plan_row("flash_prefill", "llama3_8b", 32768, 1, ("H100",), None)
    # Two products of 32 heads and 128 channels over half of the square, 2 a multiply-add.
    assert row["floor_seconds"]["H100"] == 2 * 32 * 128 * 32768**2 / 989e12
    row = kernel_shapes.plan_row("flash_prefill", "llama3_8b", 2048, 1, ("H100",), 500.0)
    assert row["floor_seconds"] == {"500 GB/s": row["bytes"] / 500e9}


def line(**seconds):
    return [{"context": int(name[1:]), "seconds": value} for name, value in seconds.items()]


def test_the_crossover_is_linear_in_log_context():
    base = line(t1000=1.0, t4000=3.0, t16000=9.0)
    assert tables.crossover(line(t1000=2.0, t4000=2.0, t16000=2.0), base) == pytest.approx(2000)
    assert tables.crossover(line(t1000=1.0, t4000=1.0, t16000=1.0), base) == 1000
    assert tables.crossover(line(t1000=2.0, t4000=4.0, t16000=10.0), base) is None
    # Faster, slower, faster again: from the last crossing on.
    again = line(t1000=0.5, t4000=4.0, t16000=8.0)
    assert tables.crossover(again, base) == pytest.approx(8000)
    assert tables.crossover(line(t64=1.0), base) is None


def op_row(case, impl, context, seconds, skipped=None):
    place = {"model": "llama3_8b", "batch": 1, "context": context, "skipped": skipped}
    return {
        "kind": "op",
        "case": case,
        "impl": impl,
        "seconds": seconds,
        "skipped": skipped,
    } | place


def test_ratios_are_to_the_other_ways_at_the_same_shape():
    rows = [
        op_row("pooled_decode", "gpu", 64, 2.0), op_row("pooled_decode", "eager", 64, 12.0),
        op_row("pooled_decode", "dot_product_attention:xla", 64, 6.0),
        op_row("pooled_decode", "dot_product_attention:cudnn", 64, None, "does not run"),
        op_row("paged_decode", "gpu", 64, 4.0), op_row("quant_decode_4bit", "gpu", 64, 1.0),
        op_row("quant_decode_4bit", "xla", 64, 8.0), op_row("quant_decode_4bit", "gpu", 128, 1.5),
        op_row("flash_prefill", "gpu", 64, 1.0),
    ]  # fmt: skip
    found = {(r["case"], r["impl"], r["context"]): r for r in tables.with_ratios(rows)}
    row = found["quant_decode_4bit", "gpu", 64]
    assert [row[f"over_{x}"] for x in ("full_kernel", "eager", "library", "paged", "xla")] == [
        2, 12, 6, 4, 8
    ]  # fmt: skip
    assert found["quant_decode_4bit", "gpu", 128]["over_full_kernel"] is None
    assert found["flash_prefill", "gpu", 64]["over_full_kernel"] is None
    assert ("pooled_decode", "dot_product_attention:cudnn", 64) not in found


def test_crossovers_and_plot_are_made_of_what_was_measured():
    rows = [op_row("pooled_decode", "gpu", n, 1e-9 * n) for n in (1024, 4096, 16384)]
    rows += [op_row("quant_decode_4bit", "gpu", n, 2048e-9) for n in (1024, 4096, 16384)]
    rows += [op_row("quant_decode_4bit", "xla", n, 1.0) for n in (1024, 4096, 16384)]
    rows += [op_row("gear_decode_4bit", "gpu", 1024, None, "memory: too large")]
    found = {(r["case"], r["impl"]): r["crossover_tokens"] for r in tables.crossovers(rows)}
    gaps = (1024, 2048)  # 1024 ns slower, then 2048 ns faster
    want = 1024 * 4 ** (gaps[0] / sum(gaps))
    assert found == {
        ("quant_decode_4bit", "gpu"): pytest.approx(want), ("quant_decode_4bit", "xla"): None
    }  # fmt: skip
    axes = kernel_plot.draw(rows, "title").axes[0]
    lines = {drawn.get_label(): drawn for drawn in axes.get_lines()}
    assert {"full cache: pooled_decode", "quant_decode_4bit"} <= set(lines)
    circles = [x for x in axes.get_lines() if x.get_fillstyle() == "none"]
    assert [x.get_xdata()[0] for x in circles] == [pytest.approx(want)]


def test_compress_is_split_and_flush_steps_stand_apart():
    parts = kernel_methods.split(1.0, 1.5, 4.0)
    assert (parts["select_seconds"], parts["quantize_seconds"]) == (0.5, 2.5)
    parts = kernel_methods.split(None, None, 4.0)
    assert parts["score_seconds"] is None and parts["quantize_seconds"] == 4.0
    times = kernel_methods.step_times([0.1, 0.2, 0.3], [0.9])
    assert times["step_seconds"] == 0.2 and 0.29 < times["step_p99_seconds"] <= 0.3
    assert (times["flush_step_seconds"], times["num_flush_steps"]) == (0.9, 1)
    assert kernel_methods.step_times([1.0], [])["flush_step_seconds"] is None


def test_cells_stand_once_and_xla_beside_kernels_comes_last():
    settings = (list(MODELS), (2048, 65536), (1, 8), list(CASES), 32768)
    found = [cell for group in kernel_ops.cells(*settings, "gpu") for cell in group]
    assert len(set(found)) == len(found)
    assert {cell.case for cell in found} == set(CASES)
    assert (found[0].model, found[0].batch) == ("llama3_8b", 8)
    xla = [cell.impl == "xla" for cell in found]
    assert any(xla) and xla == sorted(xla)
    assert {"triton", "eager", "dot_product_attention:cudnn"} < {cell.impl for cell in found}
    assert all(CASES[cell.case].decode or cell.context == 2048 for cell in found)
    here = [cell for group in kernel_ops.cells(*settings, "xla") for cell in group]
    assert {cell.impl for cell in here} == {"xla", "eager", "dot_product_attention:xla"}


def test_what_does_not_fit_is_a_row_with_its_reason():
    cell = kernel_ops.Cell("smollm2_135m", 64, 1, "pooled_decode", "xla")
    fine = Program(lambda *_: (), 0, None)

    def row(call=fine, clock=None, cell_seconds=9.0):
        made = kernel_ops.Prepared(fine, call)
        clock = clock or Clock(5.0)
        return kernel_ops.measure(cell, made, RATES, clock, cell_seconds, 0.01, 1)["skipped"]

    assert row() is None
    assert row(Program(fine.call, 10**18, None)).startswith("memory: needs 1000000000.0 GB")
    assert row(clock=Clock(0.0)).startswith("time")
    assert row(cell_seconds=0.1).startswith("time")
    assert row(Program(None, 0, "does not compile: x")) == "does not compile: x"


def test_a_kernel_that_does_not_exist_is_a_reason_and_a_broken_one_is_another():
    def missing(x):
        raise NotImplementedError("no such impl")

    assert compiled(missing, 1.0).refusal == "not implemented: no such impl"
    assert compiled(lambda x: x @ x, 1.0).refusal.startswith("does not compile")
    assert (num_copies(100, 250), num_copies(1, 10**9), num_copies(10**9, 1)) == (3, 8, 1)


def test_the_eager_baseline_and_the_library_attend_as_the_kernel_does():
    api = kernel_shapes.api("pooled_decode")
    q, k, v, _ = api.example((2, 6, 3, 64, 32))[0]
    lengths = jnp.asarray([[64] * 3, [40] * 3], jnp.int32)
    o, _, total = api.pooled_decode(q, k, v, lengths, impl="xla")
    want = np.asarray(o / total[..., None], np.float32)
    eager = kernel_ops.eager(q, k, v, lengths)
    given = kernel_ops.by_token(q, k, v, lengths)
    library = kernel_ops.attention_of_library(*given, which="xla").swapaxes(1, 2)
    for got in (eager, library):
        assert np.abs(np.asarray(got, np.float32) - want).max() < 2e-2 * np.abs(want).max()


def test_a_check_finds_a_wrong_kernel_and_passes_a_right_one():
    api = kernel_shapes.api("pooled_decode")
    shape = kernel_check.small("pooled_decode", api.SHAPES["smollm2_135m"], tokens=64)
    arrays = api.example(shape)[0]
    cut = kernel_check.with_length("pooled_decode", arrays, 7)
    assert cut[3].tolist() == [[7] * 3, [64] * 3]
    o, m, total = api.pooled_decode(*cut, impl="xla")
    shifted = (o * np.exp(-1.0), m + 1.0, total * np.exp(-1.0))  # the same partial
    assert kernel_check.compare("pooled_decode", shifted, (o, m, total))["error"] < 1e-6
    full = api.pooled_decode(*arrays, impl="xla")
    assert kernel_check.compare("pooled_decode", full, (o, m, total))["error"] > 0.1
    broken = (jnp.full_like(o, jnp.nan), m, total)
    assert kernel_check.compare("pooled_decode", broken, (o, m, total))["error"] > 1
    codes = np.arange(8, dtype=np.uint8)
    assert kernel_check.compare("group_quantize", codes, codes + 1)["mismatch"] == 1.0


@pytest.mark.parametrize("op", OPS)
def test_small_shapes_of_a_check_are_small_and_have_lengths_where_the_op_does(op):
    for shape in kernel_shapes.api(op).SHAPES.values():
        given = kernel_shapes.arguments(op, kernel_check.small(op, shape))
        assert 0 < kernel_shapes.array_bytes(given.arrays) < 2e7
        assert kernel_check.has_lengths(op, given.arrays) == op.endswith("_decode")


@pytest.mark.parametrize(
    "change, said",
    [({"models": ("gpt2",)}, "models"), ({"cases": ("matmul",)}, "cases"),
     ({"plan": True, "check": True}, "give one"), ({"bandwidth": 100.0}, "measured"),
     ({"contexts": (100,)}, "multiples of 64")],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        kernel_bench.check(dataclasses.replace(TINY, **change))


def test_a_plan_runs_nothing_and_says_so(tmp_path):
    config = dataclasses.replace(TINY, plan=True, bandwidth=100.0, contexts=(128,))
    with Run.create(config, tmp_path) as run:
        kernel_bench.run(config, run)
    assert len(run.rows) == len(config.cases)
    assert all(row["kind"] == "floor, not measured" for row in run.rows)
    assert "not measured" in (run.path / "summary.md").read_text()


def test_a_check_writes_rows_and_fails_where_a_kernel_does(tmp_path, monkeypatch):
    config = dataclasses.replace(TINY, check=True, cases=("group_quantize_keys_4bit",))
    monkeypatch.setattr(kernel_check, "cells", lambda ops, impls: [
        kernel_check.Cell("group_quantize", "smollm2_135m_keys_2bit", "xla", 0)
    ])  # fmt: skip
    with Run.create(config, tmp_path / "right") as run:
        kernel_bench.run(config, run)
    assert run.rows[0]["passed"] is True and run.rows[0]["error"] == 0
    monkeypatch.setattr(kernel_check, "compare", lambda *_: {"error": 1.0, "mismatch": 0.0})
    with Run.create(config, tmp_path / "wrong") as run:
        with pytest.raises(ValueError, match="group_quantize"):
            kernel_bench.run(config, run)
    assert run.rows[0]["passed"] is False
