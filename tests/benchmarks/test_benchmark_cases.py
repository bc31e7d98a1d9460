"""The cases of benchmarks/, on inputs so small that their numbers mean nothing.

SPEAKERLAB_3DSPEAKER, _WESPEAKER and _SPEECHBRAIN = DIR give checkouts to compare with; without
them, only models have a peer: a package in 3D-Speaker's layout.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from refusals import refused
from voices import RATE, make_noise, make_wave

from speakerlab.data import audio

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import sides

ROOT = Path(__file__).parents[2]
CHECKOUTS = {
    name: os.environ.get(f"SPEAKERLAB_{name.upper()}", "") for name in sides.TOOLKITS
}
ALWAYS = ["name", "ours", "peer", "ratio", "unit"]
FRONTEND = ["--micro-batch=4", "--seconds=0.1", "--crop-seconds=1"]
MODELS = [
    "--micro-batch=2",
    "--frames=40",
    "--seconds=0.1",
    "--models",
    "campplus",
]
SCORING = ["--enrol=6", "--test=60", "--dim=16"]


def run(case: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, f"benchmarks/{case}.py", "--device=cpu", "--threads=1"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    # A command that ran in this process has set it; a case imports the files beside it.
    environ.pop("PYTHONSAFEPATH", None)
    arguments = tuple(map(str, arguments))
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environ, capture_output=True, text=True
    )


def rows_of(path: Path, case: str, *arguments: object) -> dict[str, dict]:
    """Return the rows that a case writes and prints, by name."""
    done = run(case, *arguments, f"--json={path}")
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())
    assert all(
        list(row)[:5] == ALWAYS and row["date"] and row["commit"] for row in rows
    )
    for row in rows:
        assert row["ours"] > 0 and row["name"] in done.stdout
        if row["ratio"] is not None:
            assert row["ratio"] == pytest.approx(row["ours"] / row["peer"])
            assert row["quartiles"][0] <= row["quartiles"][1]
    return {row["name"]: row for row in rows}


def test_encoders_have_the_features_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    rows = rows_of(tmp_path / "rows.json", "encoder_features", *FRONTEND)
    families = ["w2v-bert", "wav2vec2", "whisper"]
    assert list(rows) == [f"frontend.{family}.peer_transformers" for family in families]
    assert all(row["peer"] > 0 for row in rows.values())


@pytest.mark.slow
def test_a_step_over_a_pretrained_encoder_is_timed_in_both_precisions(tmp_path):
    pytest.importorskip("transformers")
    options = ["--micro-batch=2", "--crop-seconds=1", "--seconds=1"]
    rows = rows_of(tmp_path / "rows.json", "encoder_step", *options)
    names = [f"train.w2vbert2_mfa.lora.{kind}.wespeaker" for kind in ("fp32", "bf16")]
    assert list(rows) == names


@pytest.mark.parametrize(
    ("case", "toolkit"),
    [
        pytest.param("data", "3D-Speaker", marks=pytest.mark.slow),
        pytest.param("scoring", "WeSpeaker", marks=pytest.mark.slow),
        pytest.param("frontend", "SpeechBrain", marks=pytest.mark.slow),
    ],
)
def test_a_folder_that_is_not_a_peer_is_refused(tmp_path, case, toolkit):
    done = run(case, "--peer", tmp_path)
    assert done.returncode == 2
    assert (
        f"--peer: {tmp_path}: not a checkout of " in done.stderr
        and toolkit in done.stderr
    )


@pytest.mark.slow
def test_models_alone_have_peak_memory_and_only_the_rows_asked_for(tmp_path):
    names = ["infer.campplus.fp32", "train.campplus.fp32"]
    rows = rows_of(tmp_path / "rows.json", "models", *MODELS, "--rows", *names)
    assert list(rows) == names
    assert all(row["peer"] is None for row in rows.values())
    if sys.platform == "linux":  # weights, gradients, momentum; weights alone
        megabytes = 4 * 7.2
        infer, train = (row["peak_mib"] for row in rows.values())
        assert 3 * megabytes < train < 500 and megabytes < infer < train


# 3D-Speaker's package whose model is ours, its embeddings multiplied by a factor.
OPEN = "__path__.append({path!r})\n"
PEER_MODEL = """
import importlib.util
spec = importlib.util.spec_from_file_location("ours", {path!r})
ours = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ours)

class CAMPPlus(ours.CAMPPlus):
    def __init__(self, feat_dim, embedding_size):
        super().__init__(feat_dim=feat_dim, embed_dim=embedding_size)

    def forward(self, feats_BTF):
        return {factor} * super().forward(feats_BTF)
"""


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1, 1.00001])
def test_only_models_that_are_equal_are_timed(tmp_path, factor):
    package = ROOT / "speakerlab"
    model = PEER_MODEL.format(path=str(package / "models/campplus.py"), factor=factor)
    sources = {
        "__init__.py": OPEN.format(path=str(package)),
        "models/__init__.py": OPEN.format(path=str(package / "models")),
        "models/campplus/__init__.py": "",
        "models/campplus/DTDNN.py": model,
    }
    for name, source in sources.items():
        path = tmp_path / "speakerlab" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    arguments = [*MODELS, "--work", "infer", "--precisions", "bf16", "--peer", tmp_path]
    if factor == 1:
        rows = rows_of(tmp_path / "rows.json", "models", *arguments)
        assert list(rows) == ["infer.campplus.bf16", "infer.campplus.bf16.peer_bf16"]
    else:
        done = run("models", *arguments)
        assert done.returncode == 1
        assert (
            refused(done.stderr, "campplus")
            and "embeddings are not equal" in done.stderr
        )


@pytest.fixture
def audio_words(tmp_path) -> list[str]:
    """Options of the cases that read audio: six recordings, a noise, a room, and little work."""
    for speaker in range(3):
        (tmp_path / f"audio/{speaker}").mkdir(parents=True)
        for take in range(2):
            path = tmp_path / f"audio/{speaker}/{take}.flac"
            audio.write(path, make_wave(speaker, take, 1.5), RATE)
    for name in ("noise", "rirs"):
        (tmp_path / name).mkdir()
    audio.write(
        tmp_path / "noise/hiss.wav", audio.to_int16(make_noise(2.0)[0].numpy()), RATE
    )
    room_S = make_noise(0.1)[0].numpy()
    room_S[0] = 0.9
    audio.write(tmp_path / "rirs/hall.wav", audio.to_int16(room_S), RATE)
    folders = [f"--{name}={tmp_path / name}" for name in ("audio", "noise", "rirs")]
    return [*folders, "--crop-seconds=1", "--seconds=0.1"]


@pytest.mark.slow
def test_every_source_of_audio_has_rows(tmp_path, audio_words):
    rows = rows_of(tmp_path / "rows.json", "data", *audio_words, "--micro-batch=4")
    works = ("data.to_device", "data.full_cpu")
    assert list(rows) == [
        work + source for source in (".flac", ".wav", "") for work in works
    ]
    assert {row["unit"] for row in rows.values()} == {"crops/s"}
    for source in (".flac", ".wav", ""):
        assert (
            rows[f"data.to_device{source}"]["ours"]
            > rows[f"data.full_cpu{source}"]["ours"]
        )


def count_up(counter) -> None:
    while True:
        counter.value += 1
        time.sleep(0.001)


def test_workers_sleep_outside_of_their_turn():
    context = multiprocessing.get_context("fork")
    counter = context.Value("q", 0)
    worker = context.Process(target=count_up, args=(counter,), daemon=True)
    worker.start()

    def work() -> None:
        began = counter.value
        while counter.value < began + 5:
            time.sleep(0.001)

    try:
        for _ in range(2):
            assert sides.timed(work) > 0
            time.sleep(0.05)  # the signal has arrived
            before = counter.value
            time.sleep(0.05)
            assert counter.value == before
    finally:
        worker.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "arguments", "names"),
    [
        (
            "end_to_end",
            ["--model=campplus", "--seconds=0.1", "--crop-seconds=1"],
            [
                f"end_to_end.campplus{precision}{end}"
                for precision in (".fp32", "")
                for end in ("", ".data_wait")
            ],
        ),
        (
            "extract",
            [
                "--model=campplus",
                "--seconds=0.1",
                "--utterance-seconds=2",
                "--utterances=10",
            ],
            ["extract.campplus.fp32", "extract.campplus.bf16"],
        ),
        (
            "diarization",
            ["--audio-seconds=6", "--windows=100", "--seconds=0.1"],
            [f"diarize.campplus.{precision}" for precision in ("fp32", "bf16")]
            + ["cluster.spectral", "cluster.ahc"],
        ),
        (
            "self_supervised",
            ["--micro-batch=2", "--seconds=0.1", "--rows", "self_supervised.sdpn.bf16"],
            ["self_supervised.sdpn.bf16"],
        ),
    ],
)
def test_cases_that_begin_with_files(tmp_path, case, arguments, names):
    peer = ["--peer", CHECKOUTS["3dspeaker"]] if CHECKOUTS["3dspeaker"] else []
    assert list(rows_of(tmp_path / "rows.json", case, *arguments, *peer)) == names


@pytest.mark.skipif(
    not all(CHECKOUTS.values()), reason="SPEAKERLAB_3DSPEAKER ... are not set"
)
@pytest.mark.parametrize(
    ("case", "arguments", "count"),
    [
        ("models", [*MODELS, "eres2net", "--precisions", "fp32"], 9),
        ("data", ["--source=wav", "--micro-batch=4"], 2),
        ("frontend", FRONTEND, 3),
        ("self_supervised", ["--micro-batch=2", "--seconds=0.1"], 4),
        ("scoring", [*SCORING, "--head=100", "--turns=2", "--repeats=2"], 6),
    ],
)
def test_rows_of_the_peers(tmp_path, audio_words, case, arguments, count):
    if case == "data":
        arguments = [*arguments, *audio_words]
    peers = list(CHECKOUTS.values())
    # Only 3D-Speaker has these cases.
    if case in ("data", "self_supervised"):
        peers = [CHECKOUTS["3dspeaker"]]
    rows = rows_of(tmp_path / "rows.json", case, *arguments, "--peer", *peers)
    assert len(rows) == count
    for row in rows.values():
        assert row["peer"] is not None
