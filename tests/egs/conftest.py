"""Recipes as modules: their folders have names that cannot be imported."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # for egs.common and egs.mini


@pytest.fixture
def recipe():
    """recipe("3dspeaker") -> the module egs/3dspeaker/prepare.py."""

    def load(name):
        path = ROOT / "egs" / name / "prepare.py"
        spec = importlib.util.spec_from_file_location(f"prepare_{name}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
