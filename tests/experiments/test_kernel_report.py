"""The report can fail: figures over a ceiling, no verdict, a compiler that dies or is not there."""

import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from experiments import kernel_ceilings, kernel_compile, kernel_coverage, kernel_report
from experiments.kernel_ceilings import CEILINGS, Ceiling, excess, problems
from experiments.kernel_report import TINY, Config, compile_all, discover
from experiments.runner import main
from kvjax import registry
from kvjax.pallas.compat import TARGETS

# What ptxas 13 said of a kernel that spills.
SPILLS = """\
ptxas info    : 16 bytes gmem
ptxas info    : Compiling entry function 'gear_decode' for 'sm_80'
ptxas info    : Function properties for gear_decode
    304 bytes stack frame, 336 bytes spill stores, 340 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 304 bytes cumulative stack size
ptxas info    : Compile time = 412.5 ms
"""
FITS = """\
ptxas info    : Compiling entry function 'pooled_decode_1' for 'sm_90a'
ptxas info    : Function properties for pooled_decode_1
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
"""
CODE = """\
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*1a70*/                   HMMA.16816.F32.BF16 R4, R8, R12, RZ ;
        /*1a80*/             @!P0  HMMA.16816.F32.BF16 R4, R8, R14, R4 ;
        /*1a90*/             @P2   BRA `(.L_x_3) ;
        /*10a90*/                  HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
"""
THUNKS = """\
001: kCustomKernel [source | next=002 (1)] loop_fusion grid: [512, 1, 1] threads: [128, 1, 1]  \
shared_memory: 0 bytes
002: kCustomKernel [prev=001 (1) | sink] body_1 grid: [4, 1, 1] threads: [128, 1, 1]  \
shared_memory: 65536 bytes
"""
KEY = {"kind": "kernel", "op": "op", "shape": "small", "impl": "gpu", "target": "sm80"}
ROW = KEY | {"status": "ok", "error": None, "registers": 128, "shared_bytes": 4096,
             "spill_bytes": 0, "vmem_bytes": None}  # fmt: skip
MOST = {"op": {"gpu": Ceiling(registers=128, shared_bytes=4096)}}


def test_the_assembler_is_read():
    assert kernel_compile.assembler_figures(SPILLS) == {
        "name": "gear_decode", "registers": 255, "stack_bytes": 304, "spill_bytes": 676,
    }  # fmt: skip
    assert kernel_compile.assembler_figures(FITS)["spill_bytes"] == 0
    assert kernel_compile.assembler_figures(FITS)["registers"] == 168
    with pytest.raises(ValueError, match="tells no registers"):
        kernel_compile.assembler_figures("ptxas fatal   : Unsupported .version 9.0")


def test_instructions_and_shared_memory_are_read():
    assert kernel_compile.instruction_counts(CODE) == {"hmma": 2, "hgmma": 1}
    assert kernel_compile.shared_memory(THUNKS) == {"loop_fusion": 0, "body_1": 65536}
    kernels = [
        kernel_compile.assembler_figures(text) | {"hmma": 2, "hgmma": 0, "shared_bytes": shared}
        for text, shared in ((SPILLS, None), (FITS, 512))
    ]
    together = kernel_compile.summary(kernels)
    assert together["registers"] == 255 and together["spill_bytes"] == 676
    assert together["hmma"] == 4 and together["shared_bytes"] == 512


def test_ptx_is_found_within_a_serialized_kernel():
    ptx = "//\n// Generated\n.version 8.7\n.target sm_90a\n{\nret;\n}\n.section .debug\n{\n}\n"
    proto = b"\n\x04kern\x10\x04\x18\x80\x20\x22\xf0\x01" + ptx.encode() + b"\x2a\x85\x01module {}"
    assert kernel_compile.ptx_within(proto) == ptx
    assert kernel_compile.ptx_within(b"no code") is None
    assert kernel_compile.dynamic_shared(proto) == 4096


def test_vector_memory_is_read():
    line = '%f = custom-call(), custom_call_target="{}", backend_config={{"a":[],{}}}'
    used = '"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"131072"}]'
    program = "\n".join(
        [line.format("tpu_custom_call", used), line.format("other", used), "ROOT %a = add()"]
    )
    assert kernel_compile.vector_memory(program) == [131072]


def test_a_figure_over_its_ceiling_is_a_problem():
    assert excess(ROW, MOST) == []
    for field in ("registers", "shared_bytes", "spill_bytes"):
        wrong = problems([ROW | {field: ROW[field] + 1}], [KEY], MOST)
        assert len(wrong) == 1 and field in wrong[0] and "over the ceiling" in wrong[0]
    assert "no ceiling for op" in problems([ROW], [KEY], {})[0]


def test_a_row_that_is_missing_or_failed_is_a_problem():
    assert problems([ROW], [KEY], MOST) == []
    assert problems([], [KEY], MOST) == ["op small gpu sm80: no verdict."]
    assert problems([ROW], [KEY | {"target": "sm90"}], MOST) == ["op small gpu sm90: no verdict."]
    for status in ("failed", "no verdict", "not installed"):
        row = ROW | {"status": status, "error": "because"}
        assert problems([row], [KEY], MOST) == [f"op small gpu sm80: {status}: because"]
    assert problems([row], [KEY], MOST, allow_missing=True) == []
    row = ROW | {"status": "failed", "error": "because"}
    assert problems([row], [KEY], MOST, allow_missing=True)


def test_the_command_fails_and_says_why(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(kernel_report, "compile_all", lambda *_: None)  # no verdict on anything
    arguments = ["--ops", "pooled_decode", "--shapes", "smollm2_135m", "--methods", "full"]
    with pytest.raises(SystemExit) as stopped:
        main(Config, kernel_report.run, [*arguments, "--runs-dir", str(tmp_path)])
    assert stopped.value.code == 1
    assert "no verdict" in capsys.readouterr().err
    assert "no verdict" in next(tmp_path.glob("*/*/summary.md")).read_text()


def test_every_kernel_file_is_discovered():
    cases = discover(Config())
    named = {(case["op"], case["impl"]) for case in cases}
    have = {
        (op, impl) for op in kernel_report.operations() for impl in kernel_report.kernels_of(op)
    }
    assert named == have and ("pooled_decode", "gpu") in have
    for case in cases:
        assert (TARGETS[case["target"]].platform == "tpu") == (case["impl"] == "tpu")
    assert {case["target"] for case in cases if case["impl"] == "gpu"} == {"sm80", "sm90"}
    assert len(discover(TINY)) < len(cases)
    with pytest.raises(ValueError, match="ops="):
        discover(Config(ops=("pooled_decoed",)))


def test_every_kernel_has_a_ceiling_and_every_ceiling_a_kernel():
    have = {
        (op, impl) for op in kernel_report.operations() for impl in kernel_report.kernels_of(op)
    }
    assert have == {(op, impl) for op, impls in CEILINGS.items() for impl in impls}
    for impls in CEILINGS.values():
        for impl, ceiling in impls.items():
            assert ceiling.spill_bytes == 0
            assert (ceiling.registers is None) == (impl == "tpu")
    wide = {(c["op"], c["impl"]) for c in discover(Config()) if "float32" in c["shape"]}
    assert wide == set(kernel_ceilings.FLOAT32)
    row = {"op": "pooled_decode", "impl": "tpu", "shape": "x"}
    assert kernel_ceilings.of_row(row) == CEILINGS["pooled_decode"]["tpu"]
    row["shape"] = "x_float32"
    assert kernel_ceilings.of_row(row) == kernel_ceilings.FLOAT32["pooled_decode", "tpu"]


@pytest.fixture
def compiler(monkeypatch):
    """Replace the compiling process by a few lines of Python."""
    verdict = '{"status": "ok", "error": null, "registers": 7}'
    lines = {
        "good": f"for _ in json.load(sys.stdin): say('{verdict}')",
        "dies": f"say('{verdict}'); os._exit(9)",
        "lacks": """say('{"missing": ["libtpu"]}'); sys.exit()""",
        "broken": "raise ImportError('no such thing')",
    }

    real = kernel_report.subprocess.Popen

    def start(how):
        code = (
            "import json, os, sys\n"
            f"def say(text): print({kernel_compile.MARK!r} + text, flush=True)\n"
            "print('noise of a compiler')\n"
            + ("" if how in ("lacks", "broken") else """say('{"jax": "0.0"}')\n""")
            + lines[how]
        )
        monkeypatch.setattr(
            kernel_report.subprocess, "Popen",
            lambda command, **rest: real([command[0], "-c", code], **rest),
        )  # fmt: skip
        rows = []
        cases = [KEY | {"shape": name} for name in ("a", "b", "c")]
        compile_all(sys.executable, "gpu", cases, 5.0, rows.append)
        assert [row["shape"] for row in rows] == ["a", "b", "c"]
        return rows

    return start


def test_each_case_gets_the_row_that_its_process_printed(compiler):
    rows = compiler("good")
    assert [row["status"] for row in rows] == ["ok"] * 3
    assert [row["registers"] for row in rows] == [7] * 3 and rows[0]["jax"] == "0.0"


def test_a_compiler_that_dies_costs_the_case_it_was_at(compiler):
    rows = compiler("dies")
    assert [row["status"] for row in rows] == ["ok", "no verdict", "ok"]
    assert "exit status 9" in rows[1]["error"]


def test_a_missing_or_broken_interpreter_is_said(compiler):
    rows = compiler("lacks")
    assert {row["status"] for row in rows} == {"not installed"}
    assert "libtpu" in rows[0]["error"]
    rows = compiler("broken")
    assert {row["status"] for row in rows} == {"failed"} and "no such thing" in rows[0]["error"]


def test_a_compiler_gets_none_of_this_processs_settings(monkeypatch):
    seen = {}

    def start(command, **rest):
        seen.update(rest["env"])
        raise OSError("seen enough")

    monkeypatch.setenv("TPU_LIBRARY_PATH", "libtpu of another JAX")
    monkeypatch.setenv("KVJAX_KEPT", "yes")
    monkeypatch.setattr(kernel_report.subprocess, "Popen", start)
    compile_all(sys.executable, "tpu", [KEY], 5.0, lambda row: None)
    assert "TPU_LIBRARY_PATH" not in seen and seen["KVJAX_KEPT"] == "yes"
    assert seen["XLA_FLAGS"] == "" and seen["JAX_PLATFORMS"] == "cpu"


def test_an_interpreter_that_is_not_there_is_said():
    rows = []
    compile_all("/no/such/python", "tpu", [KEY], 5.0, rows.append)
    assert rows[0]["status"] == "failed" and "/no/such/python" in rows[0]["error"]


def test_every_method_and_preset_is_listed():
    labels = kernel_coverage.labels()
    for name in registry.names():
        assert name in labels
        assert all(f"{preset}:{name}" in labels for preset in registry.get(name).presets)
    assert any("+" in label for label in labels) and len(set(labels)) == len(labels)


@pytest.mark.parametrize("label", ["full", "kivi", "anchorkv", "turboquant", "gear", "adakv"])
def test_a_step_calls_its_kernel_in_interpret_mode(label):
    row = kernel_coverage.method_row(label)
    kernels = dict.fromkeys(row["step_ops"], "gpu")
    assert kernels and row["interpret"] == row["gpu"] == kernels
    assert row["fallback"] is None


def test_a_step_without_a_kernel_is_a_named_fallback():
    row = kernel_coverage.method_row("symmetric")
    assert row["step_ops"] == [] and "segments of absmax codes" in row["fallback"]
    assert "no operation" in kernel_coverage.fallback([], {})
    assert kernel_coverage.fallback(["op"], "op has no impl='gpu'") == "op has no impl='gpu'"
    assert "no kernel in the step for b" in kernel_coverage.fallback(["a", "b"], {"a": "gpu"})
    assert kernel_coverage.fallback(["a"], {"a": "gpu"}) is None


def test_the_table_says_what_each_device_runs():
    column = kernel_report.runs("tpu")
    assert column({"step_ops": ["a", "b"], "tpu": {"a": "tpu", "b": "tpu"}}) == "tpu"
    assert column({"step_ops": ["a", "b"], "tpu": {"a": "tpu"}}) == "tpu; b: xla"
    assert column({"step_ops": ["a"], "tpu": "a has no impl='tpu'"}) == "xla"
    assert column({"step_ops": [], "tpu": {}}) == "xla" and column({}) is None
    asked = kernel_report.runs("triton")
    assert asked({"step_ops": ["a"], "triton": "a has no impl='triton'"}) == "refused"
    beside = {"compress_ops": ["a"], "compress_triton": {"a": "gpu"}}
    assert kernel_report.runs("triton", "compress")(beside) == "gpu"


def test_only_a_pallas_call_counts_as_a_kernel():
    def plain(x):
        return jnp.sin(x)

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    def kernel(x):  # not from a file of an operation
        return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
                              interpret=True)(x)  # fmt: skip

    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    assert kernel_coverage.kernels(plain, x) == kernel_coverage.kernels(kernel, x) == {}


def test_a_description_holds_what_the_architecture_has():
    for name, gpu in kernel_compile.GPUS.items():
        target = TARGETS[name]
        text = kernel_compile.description(name, target.kind, target.cores)
        assert f"core_count: {target.cores}" in text and target.kind in text
        assert f"major: {gpu.capability[0]} minor: {gpu.capability[1]}" in text
        assert name == f"sm{gpu.capability[0]}{gpu.capability[1]}"
        assert text.count("{") == text.count("}")


def test_ceilings_are_no_higher_than_the_hardware():
    for impls in kernel_ceilings.CEILINGS.values():
        for ceiling in impls.values():
            assert (ceiling.registers or 0) <= 255
            assert (ceiling.shared_bytes or 0) <= kernel_compile.GPUS["sm90"].kernel_shared
