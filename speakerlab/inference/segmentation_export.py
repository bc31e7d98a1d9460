"""Segmentation network as an ONNX file, with the layout of pyannote/segmentation-3.0 in ONNX.

In: (1, 1, S), a window of 10 s. Out: (1, F, C), log-probabilities of the sets of speakers.
Letters: S samples, F frames, C sets of speakers.
"""

import logging
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from speakerlab.checkpoints.published import load_segmenter
from speakerlab.core.atomic import replacing
from speakerlab.inference.export import OPSET, finish
from speakerlab.inference.onnx_model import INSTALL
from speakerlab.inference.segmentation import (
    WINDOW_SAMPLES,
    OnnxRuntime,
    TorchRuntime,
)

log = logging.getLogger(__name__)
# Largest difference of a probability; in fp32, the published network differs by less than 1e-5.
MAX_DIFFERENCE = 1e-3


class OfChannel(nn.Module):
    """Takes the one channel of a window."""

    def __init__(self, segmenter: nn.Module) -> None:
        super().__init__()
        self.segmenter = segmenter

    def forward(self, x: Tensor) -> Tensor:
        return self.segmenter(x[:, 0])


def export_segmentation(source: Path, out: Path) -> Path:
    """Export a segmentation network to `out`; write nothing if its output differs.

    Raises ValueError with the difference, ModuleNotFoundError if optional packages are missing.
    """
    for name in ("onnx", "onnxscript", "onnxruntime"):
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"export: {name} is not installed; {INSTALL}")
    published = load_segmenter(source)
    original = TorchRuntime(source, device="cpu")
    rng = np.random.default_rng(0)
    window_S = 0.1 * rng.standard_normal(WINDOW_SAMPLES).astype(np.float32)
    module = OfChannel(published.segmenter).eval()
    program = _trace(module, window_S)
    texts = {
        "sample_rate": str(published.segmenter.sample_rate),
        "architecture": published.config.model.name,
        "sha256": published.sha256,
    }
    model = finish(program.model_proto, texts=texts)
    with replacing(out) as partial:
        partial.write_bytes(model.SerializeToString(deterministic=True))
        prob_FC = np.exp(OnnxRuntime(partial).log_prob(window_S))
        original_prob_FC = np.exp(original.log_prob(window_S))
        difference = np.abs(prob_FC - original_prob_FC).max()
        # Not `>`: NaN would pass.
        if not difference <= MAX_DIFFERENCE:
            raise ValueError(
                f"{out}: differs from PyTorch by a probability of {difference:.2g};"
                " nothing was written"
            )
    log.info("%s: equal to PyTorch, probabilities to %.1g", out, difference)
    return out


def _trace(module: nn.Module, window_S: np.ndarray) -> torch.onnx.ONNXProgram:
    """Return the graph of a module for windows of this length."""
    wave_11S = torch.from_numpy(window_S)[None, None]
    # The exporter warns about its own parts and torchvision.
    disabled_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                module,
                (wave_11S,),
                dynamo=True,
                input_names=["x"],
                output_names=["y"],
                opset_version=OPSET,
                verbose=False,
                optimize=False,
            )
    finally:
        logging.disable(disabled_level)
    assert program is not None  # with dynamo=False only
    return program
