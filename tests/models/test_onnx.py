"""Every registered model leaves as ONNX, with its front end, and gives the same embeddings.

To export takes seconds a layer. `make test` therefore takes models of as few layers as they can
have, but for the slowest (`exporting.SLOW`), `make test-all` every model, as the other tests have
it too, and two as they are published. Those
of residual maps are in test_onnx_residual.py, so that another process may take them.
"""

import pytest
from exporting import RESIDUAL, SHALLOW, check, usually
from members import SMALL

from speakerlab.models import MODELS


@pytest.mark.parametrize("name", usually(MODELS.keys() - RESIDUAL))
def test_the_file_equals_the_model(name, tmp_path):
    check(name, SMALL[name] | SHALLOW[name], tmp_path / "model.onnx")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(name for name in MODELS if SHALLOW[name]))
def test_the_file_equals_the_model_with_more_layers(name, tmp_path):
    check(name, SMALL[name], tmp_path / "model.onnx")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["campplus", "eres2net"])
def test_the_file_equals_the_model_as_published(name, tmp_path):
    check(name, {}, tmp_path / "model.onnx")
