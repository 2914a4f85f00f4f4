"""Compile kernels for devices that are not there: one process for one compiler, rows on stdout.

    python -m experiments.kernel_compile gpu FOLDER < cases.json

`experiments.kernel_report` starts it, in an environment that has the extra `aot`, and reads one
line of JSON a case. Only JAX and `kvjax.pallas` are needed besides, so that an interpreter with
another JAX can run it too.
"""

import faulthandler
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

MARK = "kernel_compile: "  # of the lines that are rows: compilers write to stdout as well

# Modules that each implementation needs besides JAX.
NEEDS = {
    "gpu": ("jax_plugins.xla_cuda12", "triton"),
    "triton": ("jax_plugins.xla_cuda12", "triton", "jax_triton"),
    "tpu": ("libtpu",),
}
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
MATRIX = ("HMMA", "HGMMA")


class Gpu(NamedTuple):
    """What XLA asks of a GPU that it compiles for; limits are the architecture's."""

    capability: tuple[int, int]
    kernel_shared: int  # bytes, the most that one block may have
    core_shared: int  # bytes of one multiprocessor
    lanes: int  # float32 units of one multiprocessor
    bandwidth: int  # bytes a second, as advertised; only XLA's cost model reads it
    cache: int  # bytes of the second level
    clock: float  # GHz


GPUS = {
    "sm80": Gpu((8, 0), 166912, 167936, 64, 2_039_000_000_000, 41943040, 1.41),
    "sm90": Gpu((9, 0), 232448, 233472, 128, 3_352_000_000_000, 52428800, 1.98),
}


def description(name: str, kind: str, cores: int) -> str:
    """The text proto that stands for a GPU, XLA's `GpuTargetConfigProto`."""
    gpu = GPUS[name]
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.core_shared}
  shared_memory_per_block_optin: {gpu.kernel_shared}
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: {gpu.lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {gpu.bandwidth}
  l2_cache_size: {gpu.cache}
  clock_rate_ghz: {gpu.clock}
  device_memory_size: 85899345920
  cuda_compute_capability {{ major: {gpu.capability[0]} minor: {gpu.capability[1]} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{kind}"
"""


def environment(impl: str, folder: Path, root: Path) -> dict[str, str]:
    """Variables of a process that compiles, to be set before it starts.

    A spilled register is an error, machine code is kept for a look, and nothing comes from a cache.
    """
    gpu = [f"--xla_dump_to={folder}", "--xla_dump_emitter_re=ptx",
           "--xla_gpu_fail_ptx_compilation_on_register_spilling=true"]  # fmt: skip
    return {
        "PYTHONPATH": str(root),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "XLA_FLAGS": "" if impl == "tpu" else " ".join(gpu),
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TRITON_CACHE_DIR": f"{folder}-triton",
    }


def missing(impl: str) -> list[str]:
    """The modules that this interpreter lacks."""
    lacking = []
    for name in ("jax", "jaxtyping", "beartype", *NEEDS[impl]):
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # its package is not there
            found = None
        lacking += [] if found else [name]
    return lacking


def compile_case(case: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Compile one operation at one shape for one target; an error is a row too."""
    start = time.monotonic()
    try:
        row = {"status": "ok", "error": None} | _compile(case, folder)
    except Exception as error:
        row = {"status": "failed", "error": one_line(error)}
    finally:
        shutil.rmtree(folder)
        folder.mkdir()
    return row | {"seconds": round(time.monotonic() - start, 2)}


def _compile(case: Mapping[str, str], folder: Path) -> dict[str, Any]:
    import jax
    from jax.sharding import SingleDeviceSharding

    from kvjax.pallas import compat

    api = importlib.import_module(f"kvjax.pallas.{case['op']}.api")
    keywords: dict[str, Any] = {}

    def arrays() -> Any:
        args, others = api.example(api.SHAPES[case["shape"]])
        keywords.update(others)
        return args

    shapes = jax.eval_shape(arrays)
    sharding = SingleDeviceSharding(_device(case["target"]))
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
    )

    def call(*args: Any) -> Any:
        return getattr(api, case["op"])(*args, **keywords, impl=case["impl"])

    lowered = compat.lower(call, shapes, case["target"])
    calls = list(_custom_calls(lowered))
    try:
        compiled = lowered.compile()
    except Exception as error:
        failed = {"status": "failed", "error": one_line(error)}
        try:  # a kernel that spills has been compiled: say by how much
            return _FIGURES[case["impl"]](None, calls, folder) | failed
        except Exception:
            return failed
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return {"temporary_bytes": temporary} | _FIGURES[case["impl"]](compiled, calls, folder)


def one_line(error: Exception) -> str:
    """An error as text for a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def _device(target: str) -> Any:
    from jax.experimental import topologies

    from kvjax.pallas import compat

    if target in TOPOLOGIES:
        return topologies.get_topology_desc(TOPOLOGIES[target], platform="tpu").devices[0]
    about = compat.TARGETS[target]
    return topologies.get_topology_desc(
        "", platform="cuda", topology="1x1x1",
        target_config=description(target, about.kind, about.cores),
    ).devices[0]  # fmt: skip


def _custom_calls(lowered: Any) -> Any:
    """Yield (target, backend configuration) of the custom calls of a lowered program."""
    from jax.interpreters.mlir import ir

    def walk(operation: Any) -> Any:
        for region in operation.regions:
            for block in region.blocks:
                for op in block.operations:
                    if op.operation.name == "stablehlo.custom_call":
                        attributes = op.operation.attributes
                        name = "mhlo.backend_config"
                        name = name if name in attributes else "backend_config"
                        config = attributes[name] if name in attributes else None
                        yield ir.StringAttr(attributes["call_target_name"]).value, config
                    yield from walk(op.operation)

    yield from walk(lowered.compiler_ir("stablehlo").operation)


# GPU: XLA's own machine code


def _gpu_figures(compiled: Any, calls: Sequence[tuple], folder: Path) -> dict[str, Any]:
    from jax.interpreters.mlir import ir

    configs = [config for target, config in calls if target == "__gpu$xla.gpu.triton"]
    names = {ir.StringAttr(ir.DictAttr(config)["name"]).value for config in configs}
    if not names:
        raise ValueError("no Pallas kernel in the program: it runs without one.")
    shared = {}
    for file in folder.glob("*thunk_sequence.txt"):
        shared |= shared_memory(file.read_text(encoding="utf-8"))
    kernels = []
    for file in sorted(folder.glob("*.ptx")):
        entry = re.search(r"\.entry (\w+)", text := file.read_text(encoding="utf-8"))
        if entry and any(_same(entry[1], name) for name in names):
            kernels.append(machine_code(text) | {"shared_bytes": shared.get(entry[1])})
    if len(kernels) < len(names):
        raise ValueError(f"PTX of {len(kernels)} of the kernels {sorted(names)} was found.")
    return summary(kernels)


def _same(entry: str, name: str) -> bool:
    """Whether a function is the kernel: XLA numbers those that share a name."""
    return re.fullmatch(re.escape(re.sub(r"\W", "_", name)) + r"(_+\d+)*", entry) is not None


def shared_memory(thunks: str) -> dict[str, int]:
    """Bytes of dynamic shared memory of each kernel, from XLA's dump of what it launches."""
    found = re.findall(r"(\w+) grid: \[.*?\] threads: \[.*?\]\s+shared_memory: (\d+) bytes", thunks)
    return {name: int(size) for name, size in found}


# Triton: its own PTX, inside the custom call


def _triton_figures(compiled: Any, calls: Sequence[tuple], folder: Path) -> dict[str, Any]:
    kernels = []
    for target, config in calls:
        if "triton" not in target or config is None:
            continue
        proto = zlib.decompress(_opaque(config))
        text = ptx_within(proto)
        if text is None:
            raise ValueError(f"no PTX in the custom call {target}.")
        figures = machine_code(text)
        if figures["spill_bytes"]:
            raise ValueError(f"{figures['name']} spills {figures['spill_bytes']} bytes.")
        kernels.append(figures | {"shared_bytes": dynamic_shared(proto)})
    if not kernels:
        raise ValueError("no Triton kernel in the program: it runs without one.")
    return summary(kernels)


def ptx_within(proto: bytes) -> str | None:
    """The PTX that stands among the fields of a serialized kernel: text that ends with a brace."""
    found = re.search(rb"//[\t\n\r\x20-\x7e]*?\.version[\t\n\r\x20-\x7e]*", proto)
    return found[0][: found[0].rfind(b"}") + 1].decode() + "\n" if found else None


def _opaque(config: Any) -> bytes:
    """The bytes that a custom call carries, alone or, newer, in a dictionary."""
    from jax.interpreters.mlir import ir

    try:
        return ir.StringAttr(config).value_bytes
    except ValueError:
        return ir.StringAttr(ir.DictAttr(config)["opaque"]).value_bytes


def dynamic_shared(proto: bytes) -> int:
    """jaxlib's TritonKernel: warps in field 2, bytes of shared memory in field 3, code in 4."""
    found = re.search(rb"\x10.\x18([\x80-\xff]*[\x00-\x7f])\x22", proto, re.S)
    if found is None:
        return 0  # a zero is not written
    return sum((byte & 127) << (7 * i) for i, byte in enumerate(found[1]))


def machine_code(ptx: str) -> dict[str, Any]:
    """Assemble PTX and count registers, spilled bytes and matrix instructions."""
    tools = _tools()
    arch = re.search(r"^\.target (\w+)", ptx, re.M)[1]
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx, encoding="utf-8")
        # The newer of the two assemblers reads every PTX version.
        said = _output(tools / "ptxas-blackwell", "-v", f"-arch={arch}", source, "-o", binary)
        code = _output(tools / "nvdisasm", "-c", binary)
    return assembler_figures(said) | instruction_counts(code)


def assembler_figures(text: str) -> dict[str, Any]:
    """Read what `ptxas -v` says of one kernel.

    Raises:
        ValueError: if it names no registers.
    """
    used = re.search(r"Used (\d+) registers", text)
    name = re.search(r"Compiling entry function '(\w+)'", text)
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    stack = re.search(r"(\d+) bytes stack frame", text)
    if used is None or name is None or spilled is None:
        raise ValueError(f"ptxas tells no registers: {text.strip()[:200]!r}.")
    return {
        "name": name[1],
        "registers": int(used[1]),
        "stack_bytes": int(stack[1]) if stack else 0,
        "spill_bytes": int(spilled[1]) + int(spilled[2]),
    }


def instruction_counts(code: str) -> dict[str, int]:
    """Count matrix instructions in what `nvdisasm` prints."""
    line = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)", re.M)
    found = line.findall(code)
    return {name.lower(): found.count(name) for name in MATRIX}


def summary(kernels: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of all kernels of one operation: the most registers and shared memory, the sum of others."""
    shared = [k["shared_bytes"] for k in kernels if k["shared_bytes"] is not None]
    return {
        "kernels": [k["name"] for k in kernels],
        "registers": max(k["registers"] for k in kernels),
        "shared_bytes": max(shared) if shared else None,
        "spill_bytes": sum(k["spill_bytes"] for k in kernels),
        "stack_bytes": max(k["stack_bytes"] for k in kernels),
        **{name.lower(): sum(k[name.lower()] for k in kernels) for name in MATRIX},
    }


def _output(*command: Any) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{Path(command[0]).name}: {done.stderr.strip()[:200]}")
    return done.stdout + done.stderr


# TPU


def _tpu_figures(compiled: Any, calls: Sequence[tuple], folder: Path) -> dict[str, Any]:
    names = [target for target, _ in calls if target == "tpu_custom_call"]
    if not names:
        raise ValueError("no Pallas kernel in the program: it runs without one.")
    sizes = vector_memory(compiled.as_text())
    return {"kernels": len(names) * ["tpu_custom_call"], "vmem_bytes": max(sizes, default=None)}


def vector_memory(program: str) -> list[int]:
    """Bytes of VMEM that each kernel of a compiled program uses beyond what XLA places there."""
    lines = [line for line in program.splitlines() if '"tpu_custom_call"' in line]
    scopes = r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"'
    return [int(found[1]) for line in lines if (found := re.search(scopes, line))]


def _tools() -> Path:
    """The programs of NVIDIA's that the package triton brings."""
    spec = importlib.util.find_spec("triton")
    return Path(spec.submodule_search_locations[0]) / "backends/nvidia/bin"


def _offer_assembler(folder: Path) -> None:
    """Put the newer assembler first on PATH: XLA's own reads no PTX as new as Triton's."""
    place = Path(f"{folder}-bin")
    place.mkdir()
    (place / "ptxas").symlink_to(_tools() / "ptxas-blackwell")
    os.environ["PATH"] = f"{place}{os.pathsep}{os.environ.get('PATH', '')}"


_FIGURES = {"gpu": _gpu_figures, "triton": _triton_figures, "tpu": _tpu_figures}


def main(impl: str, folder: Path, seconds: float) -> None:
    """Read the cases from stdin, print a row each; first, what is missing or which JAX this is."""
    cases = json.load(sys.stdin)
    lacking = missing(impl)
    if lacking:
        print(MARK + json.dumps({"missing": lacking}), flush=True)
        return
    if impl == "triton":
        _offer_assembler(folder)
    import jax

    print(MARK + json.dumps({"jax": jax.__version__}), flush=True)
    for case in cases:
        faulthandler.dump_traceback_later(seconds, exit=True)  # compilers cannot be interrupted
        print(MARK + json.dumps(compile_case(case, folder)), flush=True)
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
