"""An hour of audio: the Python API, stage 5 and ONNX agree, each in bounded memory."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from models_on_disk import publish_small
from voices import make_wave, manifest_of

from speakerlab.config.build import build_embedder
from speakerlab.config.schema import load_config
from speakerlab.data import audio
from speakerlab.data.convert import read_wave
from speakerlab.inference.export import export_onnx

ROOT = Path(__file__).parents[2]
RATE = 16000
GIB = 2**30
# One runtime embeds one file and prints its peak memory in bytes.
MEASURED = """
import sys
from pathlib import Path
import numpy as np, torch
torch.set_num_threads(1)
runtime, model, wav, out = sys.argv[1:]
if runtime == "stage 5":
    from speakerlab.data.manifest import read_manifest
    from speakerlab.inference.batches import embed_pieces
    from speakerlab.checkpoints.published import load_published
    manifest = read_manifest([Path(wav).with_suffix(".data")], sample_rate=16000)
    pieces = manifest.pieces()
    embedder = load_published(Path(model)).embedder
    emb_D = embed_pieces(embedder, pieces, device=torch.device("cpu"))[0]
else:
    import speakerlab
    emb_D = speakerlab.load(model, device="cpu").embed(wav)
np.save(out, emb_D)
# Not getrusage: its maximum includes the process that forked this one, which may be larger.
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(status["VmHWM"].split()[0]) * 1024)
"""


def write_long(path: Path, minutes: int) -> None:
    """At 48 kHz a voice a minute, ten in turn; in the second channel another one."""
    voices = []
    for speaker in range(10):
        ten_seconds_S = make_wave(speaker, 0, 10.0, 48000)
        voices.append(np.tile(ten_seconds_S, 6))
    with soundfile.SoundFile(path, "w", 48000, 2, subtype="PCM_16") as file:
        for minute in range(minutes):
            first_S = voices[minute % 10]
            second_S = voices[(minute + 5) % 10]
            file.write(np.stack([first_S, second_S], axis=1))


def write_at_the_models_rate(wide: Path, path: Path) -> None:
    """The same as stage 5 takes it: 16 kHz, 16 bits."""
    wave_S = read_wave(wide, sample_rate=RATE)
    raw_S = np.rint(wave_S * 32767).astype(np.int16)
    audio.write(path, raw_S, RATE)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    lengths = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / lengths)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_hour_takes_less_than_2_gib_and_all_agree(tmp_path):
    torch.manual_seed(0)
    config = load_config([ROOT / "conf" / "campplus.yaml"])
    embedder = build_embedder(config)
    # So that BatchNorm has seen data.
    noise_BS = 0.1 * torch.randn(4, 2 * RATE)
    with torch.no_grad():
        embedder.train()(noise_BS)
    exp = publish_small(tmp_path / "exp", config, embedder.eval())
    del embedder
    export_onnx(exp, tmp_path / "model.onnx")

    wide = tmp_path / "wide.wav"
    narrow = tmp_path / "a.wav"
    write_long(wide, 60)
    write_at_the_models_rate(wide, narrow)
    manifest_of(narrow)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    embs = {}
    peaks = {}
    for runtime, model, wav in (
        ("api", "exp", "wide.wav"),
        ("stage 5", "exp", "a.wav"),
        ("onnx", "model.onnx", "wide.wav"),
    ):
        out = tmp_path / f"{runtime}.npy"
        arguments = [
            sys.executable,
            "-c",
            MEASURED,
            runtime,
            tmp_path / model,
            tmp_path / wav,
            out,
        ]
        done = subprocess.run(
            arguments,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        embs[runtime] = np.load(out)
        peaks[runtime] = int(done.stdout) / GIB
    wide.unlink()  # 0.7 GB
    print({runtime: round(peak, 2) for runtime, peak in peaks.items()})
    assert max(peaks.values()) < 2
    assert cosine(embs["api"], embs["stage 5"]) >= 0.99999
    assert cosine(embs["api"], embs["onnx"]) >= 0.99999
