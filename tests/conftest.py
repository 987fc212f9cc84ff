"""Fixtures of the whole suite: one core, and the inputs of a tiny run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))  # for `tiny` and `reference`

import pytest
import tiny
import torch

torch.set_num_threads(1)  # the same sums everywhere; the models are too small for more


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prompts, an encyclopedia and a corpus."""
    folder = tmp_path_factory.mktemp("inputs")
    tiny.write_inputs(folder)
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers, a file's tests stay together (they share fixtures), but for those
    that each start a pytest of their own."""
    for item in items:
        if item.path.name != "test_mistakes.py":
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
