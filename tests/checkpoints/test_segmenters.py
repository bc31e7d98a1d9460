"""Segmentation networks of pyannote.audio: imported with the objects beside them, or refused."""

import sys
from dataclasses import dataclass
from enum import Enum
from types import ModuleType

import pytest
import torch
import torch.torch_version
from refusals import refuses

from speakerlab.checkpoints.foreign import import_checkpoint
from speakerlab.checkpoints.model_files import SEGMENTER, read_card
from speakerlab.checkpoints.published import PublishedSegmenter, load_segmenter
from speakerlab.models.pyannet import PyanNet

TASK = "pyannote.audio.core.task"


def tensors_of(network):
    """Tensors with the names of pyannote.audio, the constants of the filters among them."""
    tensors = dict(network.state_dict())
    filterbank = network.sincnet.conv1d[0].filterbank
    for name in ("window_", "n_"):
        tensors[f"sincnet.conv1d.0.filterbank.{name}"] = getattr(filterbank, name)
    return tensors


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    sizes = {"num_filters": 8, "channels": 6, "lstm_layers": 2, "lstm_dim": 5}
    return PyanNet(**sizes, linear_layers=1, linear_dim=4, dropout=0.0).eval()


@pytest.fixture
def checkpoint(network, tmp_path, monkeypatch):
    """A checkpoint as PyTorch Lightning writes it, with objects of pyannote.audio."""
    module = ModuleType(TASK)

    class Problem(Enum):
        MONO_LABEL_CLASSIFICATION = 1

    @dataclass
    class Specifications:
        problem: Problem
        duration: float

    for kind in (Problem, Specifications):
        kind.__module__ = TASK
        kind.__qualname__ = kind.__name__
        setattr(module, kind.__name__, kind)
    for name in ("pyannote", "pyannote.audio", "pyannote.audio.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, TASK, module)
    specifications = Specifications(Problem.MONO_LABEL_CLASSIFICATION, 10.0)
    path = tmp_path / "pytorch_model.bin"
    content = {
        "state_dict": tensors_of(network),
        "pyannote.audio": {
            "versions": {"torch": torch.torch_version.TorchVersion("2.0.1")},
            "specifications": specifications,
        },
    }
    torch.save(content, path)
    monkeypatch.delitem(sys.modules, TASK)
    # The file beside the published one, which is of no toolkit that is known otherwise.
    path.with_name("config.yaml").write_text("task: {duration: 10.0}\n")
    return path


def test_a_checkpoint_is_imported_with_its_sizes(checkpoint, network, tmp_path):
    published = import_checkpoint(checkpoint, tmp_path / "model")
    assert isinstance(published, PublishedSegmenter)
    args = published.config.model.args
    assert (args["num_filters"], args["lstm_layers"], args["linear_dim"]) == (8, 2, 4)
    wave_1S = torch.randn(1, 4000, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = network(wave_1S[:, :, None])
        assert load_segmenter(tmp_path / "model").segmenter(wave_1S).equal(expected)
    card = read_card(tmp_path / "model", SEGMENTER)
    assert card["source"]["toolkit"] == "pyannote"
    assert card["sha256"] == published.sha256


def test_other_networks_are_refused(checkpoint, network, tmp_path):
    out = tmp_path / "model"
    tensors = tensors_of(network)
    for name, value, text in (
        ("classifier.weight", torch.zeros(4, 4), "4 classes"),
        ("lstm.bias_hh_l0", torch.zeros(3), "lstm.bias_hh_l0"),
        ("extra", torch.zeros(3), "extra"),
    ):
        torch.save({**tensors, name: value}, checkpoint)
        with refuses(str(checkpoint), text):
            import_checkpoint(checkpoint, out)
    torch.save(tensors, checkpoint)
    with refuses(str(checkpoint), "--speakers"):
        import_checkpoint(checkpoint, out, speakers=tmp_path / "utt2spk")
    assert not out.exists()


def test_another_model_is_not_replaced(checkpoint, network, tmp_path):
    out = tmp_path / "model"
    import_checkpoint(checkpoint, out)
    import_checkpoint(checkpoint, out)  # the same
    tensors = tensors_of(network)
    torch.save({**tensors, "classifier.bias": torch.ones(7)}, checkpoint)
    with refuses(str(out), "--force"):
        import_checkpoint(checkpoint, out)
    import_checkpoint(checkpoint, out, force=True)
    (out / "embedder.safetensors").touch()
    (out / SEGMENTER).unlink()
    with refuses(str(out), "--force"):
        import_checkpoint(checkpoint, out)


def test_a_damaged_model_is_refused(checkpoint, tmp_path):
    out = tmp_path / "model"
    import_checkpoint(checkpoint, out)
    weights = out / SEGMENTER
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with refuses(str(weights), "sha256"):
        load_segmenter(out)
