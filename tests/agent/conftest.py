"""Where the shared data lies (tests that read it skip when it is absent), and a model on disk."""

import os
from pathlib import Path

import pytest
import tiny

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model and its tokenizer on disk."""
    lm = tiny.make_lm("llama", "bytes")
    path = tmp_path_factory.mktemp("model")
    lm.model.save_pretrained(path)
    lm.tokenizer.save_pretrained(path)
    return str(path)
