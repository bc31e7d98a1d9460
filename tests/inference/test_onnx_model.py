"""Exported models without torch: by the API, `speakerlab embed` and the examples of docs/."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from models_on_disk import CALIBRATION, publish_xvector
from refusals import refuses
from voices import RATE, make_wave

import speakerlab
from speakerlab.bin import embed
from speakerlab.data import audio
from speakerlab.inference.export import export_onnx
from speakerlab.inference.onnx_model import OnnxModel
from speakerlab.scoring.embeddings import EmbeddingTable

EXAMPLES = Path(__file__).parents[2] / "docs" / "onnx"
WITHOUT_TORCH = """
import sys, speakerlab
print(*speakerlab.load(sys.argv[1]).embed(sys.argv[2]))
sys.exit("torch" in sys.modules)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """A model that takes two seconds at once."""
    folder = tmp_path_factory.mktemp("exported")
    return export_onnx(publish_xvector(folder / "exp"), folder / "model.onnx")


@pytest.fixture
def wavs(tmp_path) -> list[Path]:
    """0.1 s, which is too short, 1.3 s, and 5.1 s, which is three windows."""
    paths = [tmp_path / f"{name}.wav" for name in ("short", "fit", "long wave")]
    for take, (path, seconds) in enumerate(zip(paths, (0.1, 1.3, 5.1))):
        audio.write(path, make_wave(take, take, seconds), RATE)
    return paths


@pytest.fixture
def with_texts(file, tmp_path):
    """with_texts(vad="{}", sha256=None) -> the file with other texts; None takes one away."""

    def make(**texts: str | None) -> Path:
        import onnx

        model = onnx.load(file)
        kept = {prop.key: prop.value for prop in model.metadata_props} | texts
        del model.metadata_props[:]
        onnx.helper.set_model_props(model, {k: v for k, v in kept.items() if v is not None})
        onnx.save(model, tmp_path / "other.onnx")
        return tmp_path / "other.onnx"

    return make


def run(*words: object) -> subprocess.CompletedProcess:
    return subprocess.run([*map(str, words)], capture_output=True, text=True)


def check_program(file: Path, wavs: list[Path], *program: object) -> None:
    """Prints an embedding a line; of two files, the cosine; refuses another rate in a line."""
    emb_ND = speakerlab.load(file).embed_many(wavs)
    done = run(*program, file, *wavs)
    assert done.returncode == 0, done.stderr
    printed_ND = np.array([line.split() for line in done.stdout.splitlines()], dtype=np.float64)
    assert printed_ND.shape == (3, 16)
    assert np.abs(printed_ND - emb_ND).max() / np.abs(emb_ND).max() < 1e-5
    a, b = emb_ND[1].astype(np.float64), emb_ND[2].astype(np.float64)
    done = run(*program, file, wavs[1], wavs[2])
    assert float(done.stdout) == pytest.approx(
        a @ b / np.linalg.norm(a) / np.linalg.norm(b), abs=2e-6
    )
    audio.write(wavs[0], make_wave(0, 0, 1.0, rate=8000), 8000)
    done = run(*program, file, wavs[0])
    assert done.returncode == 1 and "short.wav: must" in done.stderr and "16000 Hz" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_python_example_needs_no_torch_and_agrees(file, wavs, with_texts):
    source = (EXAMPLES / "embed.py").read_text()
    assert len(source.splitlines()) <= 40 and "torch" not in source and "speakerlab." not in source
    check_program(file, wavs, sys.executable, EXAMPLES / "embed.py")
    done = run(sys.executable, EXAMPLES / "embed.py", with_texts(vad="{}"), wavs[1])
    assert done.returncode == 1 and "leaves out silence" in done.stderr


def test_the_cpp_example_agrees(file, wavs, with_texts, tmp_path):
    """Compiled where there is a compiler, the headers (ONNXRUNTIME_INCLUDE) and a library."""
    onnxruntime = pytest.importorskip("onnxruntime")
    places = [os.environ.get("ONNXRUNTIME_INCLUDE", ""), "/usr/include/onnxruntime"]
    headers = [p for p in places if p and (Path(p) / "onnxruntime_cxx_api.h").exists()]
    compiler = shutil.which("g++") or shutil.which("clang++")
    libraries = sorted((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*"))
    if not (headers and compiler and libraries):
        pytest.skip("needs a C++ compiler and onnxruntime's headers and library")
    (tmp_path / "libonnxruntime.so.1").symlink_to(libraries[0])
    words = ["-std=c++17", "-Wall", "-Wextra", "-Werror", EXAMPLES / "embed.cpp", "-I", headers[0]]
    links = [tmp_path / "libonnxruntime.so.1", f"-Wl,-rpath,{tmp_path}"]
    built = run(compiler, *words, *links, "-o", tmp_path / "embed")
    assert built.returncode == 0, built.stderr
    check_program(file, wavs, tmp_path / "embed")
    done = run(tmp_path / "embed", with_texts(vad="{}"), wavs[1])
    assert done.returncode == 1 and "leaves out silence" in done.stderr


def test_the_runtime_never_imports_torch(file, wavs):
    done = run(sys.executable, "-c", WITHOUT_TORCH, file, wavs[0])
    assert done.returncode == 0, done.stderr
    found_D = np.array(done.stdout.split(), dtype=np.float32)
    wanted_D = OnnxModel(file).embed_window(np.resize(audio.read(wavs[0]) / 32768, (1, 2800)))[0]
    assert np.abs(found_D - wanted_D).max() <= 1e-6 * np.abs(wanted_D).max()


def test_vad_and_calibration_come_with_the_file(file, with_texts):
    calibration = json.dumps(asdict(CALIBRATION))
    facts = {"calibration": calibration, "diarization": '{"threshold": 0.55}'}
    model = speakerlab.load(with_texts(vad='{"range_db": 20.0}', **facts))
    assert model.tuning.threshold == 0.55
    speech_S = make_wave(0, 0, 0.4)
    wave_S = np.concatenate([speech_S, np.zeros(8000, np.int16)])
    kept_S = np.concatenate([speech_S, np.zeros(3 * 320, np.int16)])  # three frames more
    assert np.array_equal(model.embed(wave_S), speakerlab.load(file).embed(kept_S))
    assert model.verify(wave_S, speech_S).threshold == 0.5


def test_embedding_files_by_onnx(file, wavs, tmp_path):
    words = [str(wavs[1]), "--model", str(file), "--out", str(tmp_path / "out"), "--runtime"]
    embed.main([*words, "onnx"])
    table, model = EmbeddingTable.load(tmp_path / "out"), speakerlab.load(file)
    assert table.model_sha256 == model.sha256
    assert np.array_equal(table.emb_ND[0], model.embed(wavs[1]))
    with refuses("--runtime", "model.onnx runs with onnx"):
        embed.main([*words, "torch"])


@pytest.mark.parametrize(("option", "value"), [("device", "cuda"), ("precision", "bf16")])
def test_an_onnx_file_runs_on_the_cpu_in_its_own_precision(tmp_path, option, value):
    with refuses(option, value):
        speakerlab.load(tmp_path / "a.onnx", **{option: value})


def test_files_that_are_not_ours_are_refused_with_one_line(file, with_texts, tmp_path):
    with refuses(str(tmp_path / "none.onnx"), error=FileNotFoundError):
        OnnxModel(tmp_path / "none.onnx")
    half = tmp_path / "half.onnx"
    half.write_bytes(file.read_bytes()[:100_000])
    with refuses(str(half)) as caught:
        OnnxModel(half)
    assert "\n" not in str(caught.value)
    foreign = dict.fromkeys(("sha256", "max_samples", "frontend", "calibration"))
    other = str(tmp_path / "other.onnx")
    with refuses(other, "sample_rate, "):
        OnnxModel(with_texts(**foreign))
    with refuses(other, "calibrat"):
        OnnxModel(with_texts(calibration='{"slope": 1}'))
