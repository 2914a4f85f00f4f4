"""Eight CPU devices, no implicit rank promotion, outside data by KVJAX_DATA."""

import os
from pathlib import Path

# Eight devices for the laws of sharding; tests compile many programs and run each once.
_FLAGS = ("--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0")
for _flag in _FLAGS:
    if _flag.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}".strip()

import jax  # noqa: E402
import pytest  # noqa: E402

from experiments.runner import bound_programs  # noqa: E402
from models import hub  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run a file's tests of one method in a row: a worker compiles what they share once."""
    files = {path: i for i, path in enumerate(dict.fromkeys(item.path for item in items))}

    def place(item):
        case = getattr(getattr(item, "callspec", None), "params", {}).get("case")
        return files[item.path], case if isinstance(case, str) else ""

    items.sort(key=place)


@pytest.fixture(autouse=True)
def bounded():
    """Programs of earlier tests are dropped before they use up the process's memory maps."""
    yield
    bound_programs()


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of outside data; a test that asks for it is skipped without it."""
    folder = os.environ.get("KVJAX_DATA")
    if not folder:
        pytest.skip("KVJAX_DATA is not set: it names a folder of outside data")
    if not Path(folder).is_dir():
        pytest.fail(f"KVJAX_DATA={folder} is not a folder")
    return Path(folder)


@pytest.fixture(scope="session")
def default_model() -> hub.Loaded:
    """The default model as users get it; skipped only where it cannot be fetched."""
    try:
        return hub.load()
    except FileNotFoundError as error:
        pytest.skip(f"the default model cannot be fetched: {error}")
