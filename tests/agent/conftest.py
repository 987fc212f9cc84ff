"""Where the shared data lies; tests that read it skip when it is absent."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def shared_data():
    folder = Path(os.environ.get("CALLSIEVE_SHARED") or ROOT.parent / "shared")

    def locate(name):
        path = folder / "data" / name
        if not path.exists():
            pytest.skip(f"{name} is not here")
        return path

    return locate
