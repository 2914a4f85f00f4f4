import pytest

from models import hub


@pytest.fixture(scope="session")
def default_model():
    """The default model as users get it; skipped only where it cannot be fetched."""
    try:
        return hub.load()
    except FileNotFoundError as error:
        pytest.skip(f"the default model cannot be fetched: {error}")
