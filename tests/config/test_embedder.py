"""The embedder at lengths its backbone does not take, and what may share a batch."""

import numpy as np
import pytest
import torch
from voices import make_noise


def test_long_input_is_the_mean_of_equal_windows(make_embedder):
    embedder = make_embedder("model.max_seconds=0.5")
    assert embedder.max_samples == 8000
    wave_BS = make_noise(1.25, rows=2)[:, :19918]  # three windows of 6639 samples
    with torch.inference_mode():
        # the first of the three has one sample more, which would make a frame more: it is left out
        starts = [0, 6640, 13279]
        windows = [embedder(wave_BS[:, start : start + 6639]) for start in starts]
        assert (
            embedder.frontend.num_frames(6640) == embedder.frontend.num_frames(6639) + 1
        )
        assert torch.equal(embedder(wave_BS), torch.stack(windows).mean(0))
        # at the limit nothing is cut
        whole = make_embedder()
        whole.load_state_dict(embedder.state_dict())
        assert torch.equal(embedder(wave_BS[:, :8000]), whole(wave_BS[:, :8000]))
        assert not torch.allclose(embedder(wave_BS), whole(wave_BS), rtol=1e-4)


def test_short_input_is_repeated(make_embedder):
    embedder = make_embedder()
    assert embedder.min_samples == 400 + 2 * 160  # three frames
    wave_BS = make_noise(1.0)
    with torch.inference_mode():
        for num_samples in (1, 300, 719):
            short = wave_BS[:, :num_samples]
            emb_BD = embedder(short)
            assert emb_BD.isfinite().all()
            again = np.resize(short.numpy(), (1, 720))
            assert torch.equal(emb_BD, embedder(torch.from_numpy(again)))
        with pytest.raises(ValueError, match="recording: is empty"):
            embedder(wave_BS[:, :0])


def test_what_shares_a_batch_key_may_be_trimmed(make_embedder):
    embedder = make_embedder("model.max_seconds=0.5")
    pairs = [(720, 879), (7920, 8000)]  # the last of these frames would end at 8080
    for fewer, longer in pairs:
        assert embedder.batch_key(fewer) == embedder.batch_key(longer)
        wave_BS = make_noise(1.0)[:, :longer]
        with torch.inference_mode():
            assert torch.equal(embedder(wave_BS), embedder(wave_BS[:, :fewer]))
    # repeated, one frame more, and cut in windows
    for a, b in ((300, 301), (719, 720), (879, 880), (8000, 8001), (8001, 8002)):
        assert embedder.batch_key(a) != embedder.batch_key(b), (a, b)
    for other in (
        "frontend.kind=tfmel",
        "frontend.snip_edges=false",
    ):  # every sample matters
        embedder = make_embedder(other)
        assert embedder.batch_key(7930) != embedder.batch_key(7931)
