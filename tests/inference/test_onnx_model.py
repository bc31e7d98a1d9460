"""Exported models without torch: by the API, `speakerlab embed` and the examples of docs/."""

import base64
import json
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from models_on_disk import CALIBRATION, publish_xvector
from refusals import refuses
from safetensors.numpy import save
from voices import RATE, make_wave

import speakerlab
from speakerlab.bin import embed
from speakerlab.data import audio
from speakerlab.inference.export import export_onnx
from speakerlab.inference.onnx_model import OnnxModel
from speakerlab.scoring.embeddings import EmbeddingTable

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = DOCS / "onnx"
PLDA = {"mean_D": np.ones(16), "transform_DD": np.eye(16), "psi_D": np.arange(16.0)}
WITHOUT_TORCH = """
import sys, speakerlab
print(*speakerlab.load(sys.argv[1]).embed(sys.argv[2]))
sys.exit("torch" in sys.modules)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """A model that takes two seconds at once."""
    folder = tmp_path_factory.mktemp("exported")
    exp = publish_xvector(folder / "exp")
    return export_onnx(exp, folder / "model.onnx")


@pytest.fixture
def wavs(tmp_path) -> list[Path]:
    """0.1 s, which is too short, 1.3 s, and 5.1 s, which is three windows."""
    seconds = {"short": 0.1, "fit": 1.3, "long wave": 5.1}
    paths = []
    for take, name in enumerate(seconds):
        path = tmp_path / f"{name}.wav"
        wave_S = make_wave(take, take, seconds[name])
        audio.write(path, wave_S, RATE)
        paths.append(path)
    return paths


@pytest.fixture
def with_texts(file, tmp_path):
    """with_texts(vad="{}", sha256=None) -> the file with other texts; None takes one away."""

    def make(**texts: str | None) -> Path:
        import onnx

        model = onnx.load(file)
        texts_in_file = {prop.key: prop.value for prop in model.metadata_props}
        texts_in_file.update(texts)
        kept_texts = {k: v for k, v in texts_in_file.items() if v is not None}
        del model.metadata_props[:]
        onnx.helper.set_model_props(model, kept_texts)
        other_file = tmp_path / "other.onnx"
        onnx.save(model, other_file)
        return other_file

    return make


def run(*arguments: object) -> subprocess.CompletedProcess:
    command = [str(argument) for argument in arguments]
    return subprocess.run(command, capture_output=True, text=True)


def check_program(file: Path, wavs: list[Path], *program: object) -> None:
    """Prints an embedding a line; of two files, the cosine; refuses another rate in a line."""
    short, fit, long_wave = wavs

    # An embedding a line.
    emb_ND = speakerlab.load(file).embed_many(wavs)
    done = run(*program, file, *wavs)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    printed_ND = np.array(rows, dtype=np.float64)
    assert printed_ND.shape == (3, 16)
    largest = np.abs(emb_ND).max()
    error_ND = np.abs(printed_ND - emb_ND) / largest
    assert error_ND.max() < 1e-5

    # The cosine of two files.
    _, a_D, b_D = emb_ND.astype(np.float64)
    lengths = np.linalg.norm(a_D) * np.linalg.norm(b_D)
    cosine = a_D @ b_D / lengths
    done = run(*program, file, fit, long_wave)
    assert float(done.stdout) == pytest.approx(cosine, abs=2e-6)

    # Another rate is refused in a line.
    wave_S = make_wave(0, 0, 1.0, rate=8000)
    audio.write(short, wave_S, 8000)
    done = run(*program, file, short)
    assert done.returncode == 1
    assert "short.wav: must" in done.stderr
    assert "16000 Hz" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_python_example_needs_no_torch_and_agrees(file, wavs, with_texts):
    example = EXAMPLES / "embed.py"
    source = example.read_text()
    assert "torch" not in source
    assert "speakerlab." not in source
    check_program(file, wavs, sys.executable, example)

    with_vad = with_texts(vad="{}")
    done = run(sys.executable, example, with_vad, wavs[1])
    assert done.returncode == 1
    assert "leaves out silence" in done.stderr


def test_the_cpp_example_agrees(file, wavs, with_texts, tmp_path):
    """Compiled where there is a compiler, the headers (ONNXRUNTIME_INCLUDE) and a library."""
    onnxruntime = pytest.importorskip("onnxruntime")
    folders = [os.environ.get("ONNXRUNTIME_INCLUDE", ""), "/usr/include/onnxruntime"]
    headers = [
        folder
        for folder in folders
        if folder and Path(folder, "onnxruntime_cxx_api.h").exists()
    ]
    compiler = shutil.which("g++") or shutil.which("clang++")
    capi = Path(onnxruntime.__file__).parent / "capi"
    libraries = sorted(capi.glob("libonnxruntime.so.*"))
    if not (headers and compiler and libraries):
        pytest.skip("needs a C++ compiler and onnxruntime's headers and library")

    library = tmp_path / "libonnxruntime.so.1"
    library.symlink_to(libraries[0])
    program = tmp_path / "embed"
    built = run(
        compiler,
        "-std=c++17",
        "-Wall",
        "-Wextra",
        "-Werror",
        EXAMPLES / "embed.cpp",
        "-I",
        headers[0],
        library,
        f"-Wl,-rpath,{tmp_path}",
        "-o",
        program,
    )
    assert built.returncode == 0, built.stderr
    check_program(file, wavs, program)

    with_vad = with_texts(vad="{}")
    done = run(program, with_vad, wavs[1])
    assert done.returncode == 1
    assert "leaves out silence" in done.stderr


def test_the_runtime_never_imports_torch(file, wavs):
    path = wavs[0]
    done = run(sys.executable, "-c", WITHOUT_TORCH, file, path)
    assert done.returncode == 0, done.stderr
    printed_D = np.array(done.stdout.split(), dtype=np.float32)

    # A wave that is too short is repeated up to 2800 samples.
    window_BS = np.resize(audio.read(path) / 32768, (1, 2800))
    (wanted_D,) = OnnxModel(file).embed_window(window_BS)
    error_D = np.abs(printed_D - wanted_D)
    largest = np.abs(wanted_D).max()
    assert error_D.max() <= 1e-6 * largest


def test_windows_are_each_as_their_samples_alone(file):
    model = speakerlab.load(file)
    wave_S = make_wave(0, 0, 4.1)
    times_W2, emb_WD = model.embed_windows(wave_S, window=2.5, step=0.8)
    assert times_W2 == pytest.approx(np.array([[0, 2.5], [0.8, 3.3], [1.6, 4.1]]))
    for (start, end), emb_D in zip(times_W2, emb_WD):
        first = round(start * RATE)
        last = round(end * RATE)
        alone_D = model.embed(wave_S[first:last])
        assert np.abs(emb_D - alone_D).max() < 1e-5 * np.abs(alone_D).max()


def test_it_has_no_frames(file):
    with refuses(str(file), "frames"):
        speakerlab.load(file).frames(make_wave(0, 0, 1.0))


def test_a_pickled_model_opens_its_file_again(file, with_texts):
    model = speakerlab.load(file)
    copied = pickle.loads(pickle.dumps(model))
    wave_S = make_wave(0, 0, 1.3)
    assert np.array_equal(copied.embed(wave_S), model.embed(wave_S))

    # Another model has taken the place of the file.
    changed = with_texts()
    pickled = pickle.dumps(speakerlab.load(changed))
    with_texts(sha256="0" * 64)
    with refuses(str(changed), "000000000000", "load it again"):
        pickle.loads(pickled)


def test_vad_and_calibration_come_with_the_file(file, with_texts):
    calibration = json.dumps(asdict(CALIBRATION))
    with_settings = with_texts(
        vad='{"range_db": 20.0}',
        calibration=calibration,
        diarization='{"threshold": 0.55}',
        plda=base64.b64encode(save(PLDA)).decode(),
    )
    model = speakerlab.load(with_settings)
    assert model.tuning.threshold == 0.55
    plda = model.read_plda()
    for name, values in PLDA.items():
        assert np.array_equal(getattr(plda, name), values)
    with refuses(str(file), "has no PLDA", "--development"):
        speakerlab.load(file).read_plda()

    # The VAD leaves three frames of the silence.
    speech_S = make_wave(0, 0, 0.4)
    silence_S = np.zeros(8000, np.int16)
    three_frames_S = silence_S[: 3 * 320]
    wave_S = np.concatenate([speech_S, silence_S])
    kept_S = np.concatenate([speech_S, three_frames_S])
    expected_D = speakerlab.load(file).embed(kept_S)
    assert np.array_equal(model.embed(wave_S), expected_D)
    result = model.verify(wave_S, speech_S)
    assert result.threshold == 0.5


def test_embedding_files_by_onnx(file, wavs, tmp_path):
    out = tmp_path / "out"
    arguments = [
        str(wavs[1]),
        "--model",
        str(file),
        "--out",
        str(out),
        "--runtime",
    ]
    embed.main([*arguments, "onnx"])
    table = EmbeddingTable.load(out)
    model = speakerlab.load(file)
    emb_D = model.embed(wavs[1])
    assert table.model_sha256 == model.sha256
    assert np.array_equal(table.emb_ND[0], emb_D)
    with refuses("--runtime", "model.onnx runs with onnx"):
        embed.main([*arguments, "torch"])


@pytest.mark.parametrize(
    ("option", "value"),
    [("device", "cuda"), ("precision", "bf16")],
)
def test_an_onnx_file_runs_on_the_cpu_in_its_own_precision(tmp_path, option, value):
    with refuses(option, value):
        speakerlab.load(tmp_path / "a.onnx", **{option: value})


def test_files_that_are_not_ours_are_refused_with_one_line(file, with_texts, tmp_path):
    missing = tmp_path / "none.onnx"
    with refuses(str(missing), error=FileNotFoundError):
        OnnxModel(missing)

    half = tmp_path / "half.onnx"
    first_bytes = file.read_bytes()[:100_000]
    half.write_bytes(first_bytes)
    with refuses(str(half)) as caught:
        OnnxModel(half)
    assert "\n" not in str(caught.value)

    other = str(tmp_path / "other.onnx")
    foreign = dict.fromkeys(("sha256", "max_samples", "frontend", "calibration"))
    with refuses(other, "sample_rate, "):
        OnnxModel(with_texts(**foreign))
    with refuses(other, "calibrat"):
        OnnxModel(with_texts(calibration='{"slope": 1}'))
