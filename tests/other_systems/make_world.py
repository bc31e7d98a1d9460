"""Make a small model and a data directory on Linux, and what they are there.

python tests/other_systems/make_world.py WORLD
"""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from models_on_disk import CALIBRATION, publish_xvector
from voices import write_voices

import speakerlab


def make_world(world: Path) -> None:
    """Write exp/, test/, wav/ and expected.json; the tables have line ends of Windows."""
    publish_xvector(world / "exp", CALIBRATION)
    data = write_voices(
        world / "test", speakers=range(3), seconds=(1.0, 1.2), trials="all", check=False
    )
    for name in ("utt2spk", "trials"):
        text = (data / name).read_bytes().replace(b"\n", b"\r\n")
        (data / name).write_bytes(text)
    wavs = sorted((world / "wav").iterdir())
    model = speakerlab.load(world / "exp")
    expected = {
        "embedding": model.embed(wavs[0]).tolist(),
        "score": model.verify(wavs[0], wavs[1]).score,
    }
    (world / "expected.json").write_text(json.dumps(expected), encoding="utf-8")


if __name__ == "__main__":
    make_world(Path(sys.argv[1]))
