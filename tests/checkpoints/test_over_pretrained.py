"""Checkpoints over a pretrained model give the embeddings of the original code."""

import sys
from pathlib import Path

import pytest
import torch
import yaml
from refusals import refuses

sys.path.insert(0, str(Path(__file__).parent / "toolkits"))
sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from over_pretrained import CASES, checkpoint_of, embeddings_of, waves, write_base

from speakerlab.checkpoints.foreign import import_checkpoint


@pytest.fixture
def checkpoint(tmp_path):
    """checkpoint("wavlm") -> (checkpoint with its config.yaml, folder of the pretrained model)."""

    def write(case, **changes):
        folder = tmp_path / case
        folder.mkdir()
        torch.save(checkpoint_of(case, **changes), folder / "avg_model.pt")
        settings = CASES[case][2]
        if settings is not None:
            (folder / "config.yaml").write_text(yaml.safe_dump(settings))
        return folder / "avg_model.pt", write_base(folder, case)

    return write


@pytest.mark.parametrize("case", CASES)
def test_embeddings_are_those_of_the_original_code(checkpoint, tmp_path, case):
    file, base = checkpoint(case)
    published = import_checkpoint(file, tmp_path / "ours", pretrained=str(base))
    with torch.inference_mode():
        emb_BD = published.embedder(waves())
    expected_BD = embeddings_of(case)
    assert (emb_BD - expected_BD).abs().max() < 1e-4 * expected_BD.abs().max()


def test_a_checkpoint_that_does_not_fit_is_refused(checkpoint, tmp_path):
    out = tmp_path / "ours"
    file, base = checkpoint("w2vbert")
    with refuses(f"{file}", "add --pretrained DIR"):
        import_checkpoint(file, out)
    other = write_base(tmp_path, "wavlm")
    with refuses("--pretrained", other, "is a wavlm", "wav2vec2-bert"):
        import_checkpoint(file, out, pretrained=str(other))
    more, base = checkpoint("whisper", **{"frontend.encoder.more": torch.zeros(1)})
    with refuses(f"{more}", "unexpected", "frontend.encoder.more"):
        import_checkpoint(more, out, pretrained=str(base))
    weight = "front.encoder.base_model.model.encoder.layers.0.linear_q.lora_A.default"
    adapted, base = checkpoint(
        "w2vbert_authors", **{f"{weight}.weight": torch.zeros(4, 32)}
    )
    with refuses(f"{adapted}", "LoRA", "lora_merge.py"):
        import_checkpoint(adapted, out, pretrained=str(base))
    assert not out.exists()
