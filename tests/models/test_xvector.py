"""X-vector: the frames that its unpadded convolutions use up."""

import torch

from speakerlab.models.xvector import XVector


def small(pooling: str) -> XVector:
    torch.manual_seed(0)
    return XVector(embed_dim=4, hidden_channels=6, stats_channels=8, pooling=pooling).eval()


@torch.no_grad()
def test_a_frame_is_seen_within_seven_frames_on_either_side():
    model = small("tstp")
    seen = []
    model.frame_5.register_forward_hook(lambda _m, _i, output: seen.append(output))
    feats_BTF = torch.randn(1, 60, 80)
    model(feats_BTF)
    feats_BTF[0, 30] += 1
    model(feats_BTF)
    changed_T = (seen[0] != seen[1]).any(dim=1)[0]
    # offsets 0..14 of the three kernels: sums of {0..4}, {0, 2, 4} and {0, 3, 6}
    reach = {a + b + c for a in range(5) for b in (0, 2, 4) for c in (0, 3, 6)}
    assert set(changed_T.nonzero().flatten().tolist()) <= {30 - offset for offset in reach}
    assert {16, 30} <= set(changed_T.nonzero().flatten().tolist())
