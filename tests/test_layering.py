"""Who may import whom, read from the sources; and what the tree must not hold."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kvjax", "models", "experiments")

# Bottom to top: a module imports its own layer and those before it. `quant` is at the bottom
# because the kernels' XLA specifications unpack its codes.
LAYERS = (
    ("pytree", "typed", "types", "rope", "quant", "pallas"),
    (
        "attention", "storage", "scores", "select", "eviction", "rolling", "ring", "anchors",
        "anchor_bytes", "anchor_choice", "anchor_residuals", "gear_body",
    ),
    ("methods", "registry"),
    ("decode", "turns", "accounting", "sharding", "metrics", "timing"),
    ("evaluation", "serving"),
)  # fmt: skip
SERVING_MAY_IMPORT = {"numpy", "sklearn", "kvjax"} | set(sys.stdlib_module_names)
PEERS = {"torch", "kvpress", "psutil"}


def sources(*folders):
    return [p for folder in folders for p in sorted((ROOT / folder).rglob("*.py"))]


def module_name(path, root=ROOT):
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path, root=ROOT):
    """Yield (module, inside a function) of every import; `from a import b` gives a.b too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lazy = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    package = module_name(path, root).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            yield name, id(node) in lazy


def layer(module):
    """Return the layer of a module of kvjax, None for the package itself."""
    parts = module.split(".")
    if parts[0] != "kvjax" or len(parts) == 1:
        return None
    found = [i for i, names in enumerate(LAYERS) if parts[1] in names]
    assert found, f"kvjax.{parts[1]} has no layer: add it to LAYERS in {Path(__file__).name}."
    return found[0]


def is_module(name, root=ROOT):
    path = root.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def upward(path, root=ROOT):
    mine = layer(module_name(path, root))
    return [
        name
        for name, _ in imports(path, root)
        if name.split(".")[0] == "kvjax" and is_module(name, root)
        if mine is not None and (layer(name) or 0) > mine
    ]


def wrong_packages(path, allowed, root=ROOT):
    return [n for n, _ in imports(path, root) if n.split(".")[0] in PACKAGES and not allowed(n)]


def test_kvjax_never_imports_upwards():
    wrong = {module_name(p): names for p in sources("kvjax") if (names := upward(p))}
    assert not wrong


def test_kvjax_imports_neither_models_nor_experiments():
    paths = sources("kvjax")
    wrong = {p.name: w for p in paths if (w := wrong_packages(p, lambda n: n.startswith("kvjax")))}
    assert len(paths) > 5 and not wrong


def test_models_see_only_types_and_rope_of_kvjax():
    def allowed(name):
        known = ("models", "kvjax.types", "kvjax.rope")
        return name == "kvjax" or any(name == k or name.startswith(k + ".") for k in known)

    wrong = {p.name: w for p in sources("models") if (w := wrong_packages(p, allowed))}
    assert not wrong


def test_serving_needs_no_jax():
    wrong = {
        module_name(p): names
        for p in sources("kvjax/serving")
        if (names := [n for n, _ in imports(p) if n.split(".")[0] not in SERVING_MAY_IMPORT])
        or (
            names := [
                n
                for n, _ in imports(p)
                if n.startswith("kvjax.") and is_module(n) and not n.startswith("kvjax.serving")
            ]
        )
    }
    assert not wrong


def torch_where_it_may_not_be(path, root=ROOT):
    """Return what is wrong with a file's imports of the extra `peers`.

    An experiment may import them inside a function; a script beside the golden values of the
    tests, which no test imports, may do so at its top. Both say that they need the extra.
    """
    where = path.relative_to(root)
    peers = [(n, lazy) for n, lazy in imports(path, root) if n.split(".")[0] in PEERS]
    if not peers:
        return []
    script = where.parts[0] == "tests" and where.parent.name == "golden"
    wrong = [
        f"{where} imports {name}"
        for name, lazy in peers
        if not script and (where.parts[0] != "experiments" or not lazy)
    ]
    named = "peers" in path.read_text(encoding="utf-8")
    return wrong + ([] if named else [f"{where} does not name the extra `peers`"])


def test_torch_only_lazily_in_experiments_and_in_golden_scripts():
    wrong = [w for p in sources(*PACKAGES, "tests") for w in torch_where_it_may_not_be(p)]
    imported = [n for p in sources(*PACKAGES, "tests") for n, _ in imports(p)]
    assert not wrong and not [n for n in imported if ".golden." in n]


def test_importing_everything_imports_no_torch():
    names = [module_name(p) for p in sources("kvjax", "models", "experiments")]
    unneeded = ("gpu", "tpu", "triton_kernel", "__main__")
    names = [n for n in names if n.rsplit(".", 1)[-1] not in unneeded]
    code = (
        f"import importlib, sys\nfor n in {names!r}: importlib.import_module(n)\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'tensorflow')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_walk_finds_what_is_wrong(tmp_path):
    """The checks above can fail: each of these lines must be found."""
    folder = tmp_path / "kvjax" / "methods"
    folder.mkdir(parents=True)
    for name in ("decode", "select"):
        (tmp_path / "kvjax" / f"{name}.py").touch()
    bad = folder / "bad.py"
    bad.write_text(
        "from kvjax import decode, select\nimport models.hub\nfrom . import base\n"
        "def f():\n    import torch\n"
    )
    assert upward(bad, tmp_path) == ["kvjax.decode"]
    assert wrong_packages(bad, lambda n: n.startswith("kvjax"), tmp_path) == ["models.hub"]
    found = dict(imports(bad, tmp_path))
    assert found["torch"] is True and found["models.hub"] is False
    assert "kvjax.methods.base" in found
    assert torch_where_it_may_not_be(bad, tmp_path) == [
        "kvjax/methods/bad.py imports torch",
        "kvjax/methods/bad.py does not name the extra `peers`",
    ]
    with pytest.raises(AssertionError, match="kvjax.novelty has no layer"):
        layer("kvjax.novelty.part")


def tree_files():
    """Return the text files of the project: those git knows or would add, or all but caches."""
    command = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        paths = [ROOT / line for line in listed.splitlines()]
    except (OSError, subprocess.CalledProcessError):
        skipped = {"runs", "build", "dist", ".git", ".venv"}
        paths = [p for p in ROOT.rglob("*") if not skipped & set(p.relative_to(ROOT).parts)]
    kept = {".py", ".md", ".toml", ".json", ".jsonl", ".sh", ".txt", ".yml", ".cfg", ""}
    return [p for p in paths if p.is_file() and p.suffix in kept]


def test_no_machine_path_and_no_index_host_in_the_tree():
    folders = ["/" + name + "/" for name in ("work", "root", "home")]
    hosts = ["pypi" + ".org", "pythonhosted" + ".org"]
    wrong = []
    for path in tree_files():
        text = path.read_text(encoding="utf-8", errors="ignore")
        wrong += [(str(path.relative_to(ROOT)), w) for w in folders + hosts if w in text]
    assert len(tree_files()) > 20 and not wrong
