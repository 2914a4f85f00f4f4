"""The kernels in the Triton language: interpreted, compiled to machine code, lowered by jax-triton.

None of it needs a GPU. What needs Triton, or jax-triton with a GPU plugin of JAX, is skipped where
that is missing.
"""

import functools
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import quant
from kvjax.pallas import compat
from kvjax.pallas.anchor_decode import api as anchor_api
from kvjax.pallas.anchor_decode import triton as anchor
from kvjax.pallas.quant_decode import api as quant_api
from kvjax.pallas.quant_decode import triton as quantized
from kvjax.rope import Rope
from tests.pallas.tolerances import TOLERANCES

FOLDER = pathlib.Path(__file__).parent
TYPES = {
    "bfloat16": "bf16", "float32": "fp32", "float16": "fp16", "int32": "i32", "uint32": "u32",
    "uint8": "u8", "uint16": "u16", "int8": "i8",
}  # fmt: skip


def needs_triton():
    return pytest.importorskip("triton", reason="Triton is not installed: pip install triton")


def quant_arguments(dim, bits, group=32, dtype=jnp.bfloat16, tokens=2048):
    """Shapes of `quant_decode`'s arrays for 8 query and 2 KV heads."""

    def shaped(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    codes = shaped(jnp.uint8, 1, 2, tokens, quant.packed_size(dim, bits))
    key = shaped(jnp.float16, 1, 2, tokens // group, dim)
    value = shaped(jnp.float16, 1, 2, tokens, dim // group)
    q, lengths = shaped(dtype, 1, 8, 1, dim), shaped(jnp.int32, 1)
    return q, codes, key, key, codes, value, value, lengths


def anchor_arguments(dim, dtype=jnp.bfloat16, lean=False):
    """Shapes of `anchor_decode`'s arrays for 8 query and 2 KV heads, and its widths and rope."""

    def make():
        return anchor_api.example((1, 8, 2, 2048, dim, 64, 16, 0.2))[0]

    q, coded = jax.eval_shape(make)
    widths = anchor_api.Widths(0, 0, (2, 4), 0)
    if lean:

        def shaped(dtype, *shape):
            return jax.ShapeDtypeStruct((1, 2, 2, *shape), dtype)

        coded = coded._replace(
            anchors=shaped(jnp.int8, 64, dim), anchor_scales=shaped(jnp.float16, 64),
            window=shaped(jnp.bfloat16, 16, dim), mean=shaped(jnp.bfloat16, dim),
            index=shaped(jnp.uint8, 1, 7 * 256), gamma=shaped(jnp.uint8, 1, 1024),
            gamma_range=shaped(jnp.float16, 1, 2),
        )  # fmt: skip
        small = [
            r._replace(
                scales=jax.ShapeDtypeStruct(r.scales.shape, jnp.uint8),
                prefix=jax.ShapeDtypeStruct(r.prefix.shape, jnp.uint16),
            )
            for r in coded.residuals
        ]
        coded, widths = coded._replace(residuals=tuple(small)), widths._replace(index=7, gamma=4)
    rope = Rope(tuple(float(f) for f in 1e4 ** (-np.arange(0, dim, 2) / dim)))
    return (jax.ShapeDtypeStruct(q.shape, dtype), coded), widths, rope


@pytest.mark.parametrize("op", ["quant_decode", "anchor_decode"])
def test_interpreted_kernel_meets_the_specification(op):
    needs_triton()
    root = str(FOLDER.parents[1])
    environment = os.environ | {
        "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": root,
    }  # fmt: skip
    command = [sys.executable, str(FOLDER / "triton_interpreter.py"), op]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    errors = json.loads(done.stdout.splitlines()[-1])
    limit = TOLERANCES["decode"]["float32"]
    assert len(errors) >= 6
    assert not {case: e for case, e in errors.items() if not max(e) < limit}  # NaN fails too


def resources(kernel, plan, arguments, capability):
    """Compile a kernel without a GPU: registers, bytes of stack (spills) and matrix instructions.

    Returns:
        regs, stack, number of tensor core instructions.
    """
    triton = needs_triton()
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    held = []

    def arrays(*arguments):
        held.append(plan(*arguments))
        return held[0].arrays

    given = [*jax.eval_shape(arrays, *arguments), *held[0].outputs]
    names, call = kernel.arg_names, held[0]
    signature = dict.fromkeys(names, "constexpr")
    signature |= {name: "*" + TYPES[x.dtype.name] for name, x in zip(names, given, strict=False)}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(given))}
    built = triton.compile(
        ASTSource(kernel, signature, constexprs=call.constants, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": call.num_warps, "num_stages": call.num_stages},
    )
    file = FOLDER / f".{os.getpid()}.cubin"
    file.write_bytes(built.asm["cubin"])
    tools = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    try:
        used, code = (
            subprocess.run([*command, file], capture_output=True, text=True, check=True).stdout
            for command in ([tools / "cuobjdump", "-res-usage"], [tools / "nvdisasm", "-c"])
        )
    finally:
        file.unlink()
    regs, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", used).groups())
    return regs, stack, len(re.findall(r"\b(?:HMMA|HGMMA)\b", code))


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    "dim, bits, dtype",
    [
        (80, 4, "bfloat16"),
        (128, 3, "bfloat16"),
        pytest.param(128, 2, "bfloat16", marks=pytest.mark.slow),
        pytest.param(256, 4, "bfloat16", marks=pytest.mark.slow),
        pytest.param(64, 2, "bfloat16", marks=pytest.mark.slow),
        pytest.param(96, 4, "bfloat16", marks=pytest.mark.slow),
        pytest.param(128, 8, "bfloat16", marks=pytest.mark.slow),
        pytest.param(128, 4, "float32", marks=pytest.mark.slow),
    ],
)
def test_quant_decode_compiles_without_spills(dim, bits, dtype, capability):
    needs_triton()
    kernel = importlib.import_module("kvjax.pallas.quant_decode.triton_kernel").quant_decode
    arguments = quant_arguments(dim, bits, 16 if dim == 80 else 32, jnp.dtype(dtype))
    regs, stack, products = resources(
        kernel, lambda *arrays: quantized.plan(arrays, bits, bits), arguments, capability
    )
    assert stack == 0 and regs <= 255 and products > 0


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    "dim, dtype, lean",
    [
        (128, "bfloat16", True),
        pytest.param(80, "bfloat16", False, marks=pytest.mark.slow),
        pytest.param(64, "bfloat16", True, marks=pytest.mark.slow),
        pytest.param(96, "bfloat16", False, marks=pytest.mark.slow),
        pytest.param(256, "bfloat16", True, marks=pytest.mark.slow),
        pytest.param(128, "float32", False, marks=pytest.mark.slow),
    ],
)
def test_anchor_decode_compiles_without_spills(dim, dtype, lean, capability):
    needs_triton()
    kernel = importlib.import_module("kvjax.pallas.anchor_decode.triton_kernel").anchor_decode
    arguments, widths, rope = anchor_arguments(dim, jnp.dtype(dtype), lean)
    regs, stack, products = resources(
        kernel, lambda q, coded: anchor.plan(q, coded, widths, rope), arguments, capability
    )
    assert stack == 0 and regs <= 255 and products > 0


@pytest.mark.parametrize("target", ["sm80", "sm90"])
@pytest.mark.parametrize("op", ["quant_decode", "anchor_decode"])
def test_jax_triton_lowers(op, target):
    try:
        compat.jax_triton()
    except NotImplementedError:
        pytest.skip("jax-triton or a GPU plugin of JAX is not installed")
    if compat.version() < (0, 11):
        pytest.skip("JAX before 0.11 takes the target from a GPU, and there may be none")
    if op == "quant_decode":
        arguments = quant_arguments(64, 4)

        def step(*arrays):
            return quant_api.quant_decode(*arrays, k_bits=4, v_bits=4, impl="triton")
    else:
        arguments, widths, rope = anchor_arguments(64)

        def step(q, coded):
            return anchor_api.anchor_decode(q, coded, widths=widths, rope=rope, impl="triton")

    with compat.target_device(target):
        lowered = jax.jit(step).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@triton_kernel_call") == 1


@pytest.mark.parametrize("op", ["quant_decode", "anchor_decode"])
def test_without_jax_triton_the_message_names_the_extra(op, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    arguments, widths, rope = anchor_arguments(64)
    with pytest.raises(NotImplementedError, match=re.escape('pip install "kvjax[gpu]"')):
        if op == "quant_decode":
            jax.eval_shape(
                lambda *arrays: quant_api.quant_decode(*arrays, k_bits=4, v_bits=4, impl="triton"),
                *quant_arguments(64, 4),
            )
        else:
            jax.eval_shape(
                lambda *arrays: anchor_api.anchor_decode(
                    *arrays, widths=widths, rope=rope, impl="triton"
                ),
                *arguments,
            )


def test_what_the_kernels_cannot_do_is_named():
    (q, coded), widths, rope = anchor_arguments(64)
    three = coded._replace(residuals=coded.residuals[:1] * 3)
    with pytest.raises(NotImplementedError, match="3 residuals"):
        anchor.plan(q, three, widths, rope)
    with pytest.raises(NotImplementedError, match="head_dim 20"):
        quantized.plan(quant_arguments(20, 8, 4), 8, 8)
    with pytest.raises(NotImplementedError, match="head_dim 256 of float32"):
        quantized.plan(quant_arguments(256, 4, dtype=jnp.float32), 4, 4)
    wide, widths, rope = anchor_arguments(256, jnp.float32)
    for impl in ("gpu", "triton"):  # registers spill
        op = functools.partial(anchor_api.anchor_decode, widths=widths, rope=rope, impl=impl)
        with pytest.raises(NotImplementedError, match="head_dim 256 of float32|jax-triton"):
            jax.eval_shape(op, *wide)


def test_split_bounds_follow_the_capacity():
    """No more programs than blocks to share, and one where there is little."""
    from kvjax.pallas import triton_launch

    assert triton_launch.splits(8, 1) == 1
    assert triton_launch.splits(8, 1024) == 66
    assert triton_launch.splits(10_000, 1024) == 1
