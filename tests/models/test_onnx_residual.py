"""The models of residual maps leave as ONNX and give the same embeddings; see test_onnx.py."""

import pytest
from exporting import RESIDUAL, SHALLOW, check, usually
from members import SMALL


@pytest.mark.parametrize("name", usually(RESIDUAL))
def test_the_file_equals_the_model(name, tmp_path):
    check(name, SMALL[name] | SHALLOW[name], tmp_path / "model.onnx")
