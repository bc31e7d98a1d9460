"""VoxBlink2, small, in the layout that its cropping scripts write."""

from itertools import product
from pathlib import Path

from tests.egs.corpora import NUM_TRAIN, write_wav

VIDEOS = ("DwgYRqnQZHM", "-w2q1bQ3g_0")  # ids of videos may begin with a hyphen
SPEAKERS = tuple(f"id{number:06d}" for number in range(NUM_TRAIN))
FIRST = f"{SPEAKERS[0]}/{VIDEOS[0]}/00000"


def write_voxblink2(corpus: Path) -> None:
    """Two videos a speaker, two utterances each, and the list of videos, one of which is gone."""
    lines = []
    for number, speaker in enumerate(SPEAKERS):
        for take, (video, name) in enumerate(product(VIDEOS, ("00000", "00003"))):
            write_wav(corpus / f"{speaker}/{video}/{name}.wav", number, take)
        lines.append(f"{speaker} {' '.join(VIDEOS)}\n")
    lines.append("id012345 aaaaaaaaaaa\n")
    (corpus / "data").mkdir()
    (corpus / "data/spk2videos").write_text("".join(lines))
    # The cropping script makes this folder, and writes beside it.
    (corpus / "audio").mkdir()
