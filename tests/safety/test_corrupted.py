"""Corrupted corpora through stages 1 to 3: no recording is lost, nothing hangs, no code runs."""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from corrupted_audio import MARKER, clean_wave, encoded
from corrupting import KINDS, Case, write_corpus

from speakerlab.data.manifest import Manifest, read_manifest
from speakerlab.data.tables import one_line, read_rejected

ROOT = Path(__file__).parents[2]
RATE = 16000
SPEAKERS = [
    "anna",
    "b o b",
    "说话人",
    "it's",
    f"$(touch {MARKER})",
    f";touch {MARKER}",
    "-rf",
    "é",
]
BAD_SPEAKERS = ["new\nline", "\udcff", "b_o_b"]  # the last is another's id
SETTINGS = [
    (
        "model.args={embed_dim: 16, head_channels: 4, init_channels: 16, growth_rate:"
        " 4, blocks: [1, 1, 1]}"
    ),
    *("data.crop_seconds=0.6", "data.valid_speakers=2", "training.global_batch=8"),
    *("training.num_epochs=1", "training.epoch_hours=0.01", "runtime.num_workers=1"),
    *("training.valid_every_epochs=1", "runtime.precision=fp32"),
    *("augment.noise_prob=0", "augment.room_prob=0"),
]


def run(place: Path, *arguments: object, timeout: float, code: int = 0) -> str:
    """Run `python *words` in an empty folder until it ends with that code; return stderr."""
    (place / "here").mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error::RuntimeWarning", *map(str, arguments)]
    done = subprocess.run(
        command,
        cwd=place / "here",
        env=environment,
        capture_output=True,
        timeout=timeout,
    )
    text = done.stderr.decode()
    assert done.returncode == code, text[-2999:]
    assert "Traceback" not in text, text[-2999:]
    # A warning of Python has a category; "Warning: Xing stream size off" is the MP3 decoder's.
    assert not re.search(r"\wWarning: ", text), text[-2999:]
    assert list((place / "here").iterdir()) == []
    return text


def stages_1_and_2(
    place: Path, data: Path, arguments: Sequence[object], num_cases: int
) -> None:
    """Prepare, check and pack; checked without --allow-rejected, broken files are refused."""
    timeout = 60 + 0.1 * num_cases
    run(place, *arguments, "--data", data, timeout=timeout)
    check = ["-m", "speakerlab", "check", data / "train", "--num-workers", 2]
    text = run(place, *check, timeout=timeout, code=1)
    *_, over_limit, verdict = text.splitlines()
    assert verdict.startswith(f"{data}/train: ")
    assert "--allow-rejected 0 allows" in over_limit
    assert re.search(r"\d+ more broken recordings", text)
    text = run(place, *check, "--allow-rejected", 1, timeout=timeout)
    assert f"{data}/train/rejected.tsv" in text
    pack = ["-m", "speakerlab", "pack", data / "train", "--num-workers", 2]
    run(place, *pack, "--allow-rejected", 1, timeout=timeout)


def check_every_case(data: Path, cases: Iterable[Case], id_of) -> Counter[str]:
    """Check that each case is in the manifest or in rejected.tsv; return counts of reasons."""
    manifest = read_manifest([data / "train"], sample_rate=RATE)
    rows = {utterance: row for row, utterance in enumerate(manifest.ids)}
    rejected = read_rejected(data / "train")
    listed = dict(rejected.values())
    wrong: list[str] = []
    for case in cases:
        row = rows.get(id_of(case.path))
        reason = listed.get(one_line(case.path))
        is_kept = row is not None and is_of(case.path, manifest.paths[row], data)
        if is_kept == (reason is not None):
            wrong.append(f"{case}: must be kept or listed, got both or neither")
        if case.fate not in ("either", "kept" if is_kept else "rejected"):
            wrong.append(f"{case}: must be {case.fate}, got {reason}")
        if row is not None and is_kept and case.wave_S is not None:
            wave_S = manifest.read(row, 0, len(case.wave_S))
            if not np.array_equal(wave_S, case.wave_S):
                wrong.append(f"{case}: other samples")
    assert wrong == []
    check_every_read(manifest)
    reasons = (re.sub(r"'.*'|/\S.*?: ", "", reason) for _, reason in rejected.values())
    return Counter(
        re.sub(r"\d[\d.e+]*", "N", reason).partition(";")[0] for reason in reasons
    )


def is_of(path: Path, listed: str, data: Path) -> bool:
    """Return whether a file in wav.scp is this recording, a link to it, or its conversion."""
    return listed == str(path.resolve()) or listed.startswith(f"{data}/wav/")


def check_every_read(manifest: Manifest) -> None:
    """Check that shards and files give the same samples for every second."""
    (part,) = manifest.parts
    assert part.waves is not None
    loose = replace(manifest, parts=(replace(part, waves=None),))
    for row, num_samples in enumerate(map(int, manifest.num_samples_N)):
        wave_S = manifest.read(row, 0, num_samples)
        assert wave_S.dtype == np.int16
        assert len(wave_S) == num_samples > 0
        for first in range(0, num_samples, RATE):
            second_S = manifest.read(row, first, RATE)
            assert np.array_equal(
                second_S, np.resize(wave_S[first : first + RATE], RATE)
            )
        assert np.array_equal(loose.read(row, 0, num_samples), wave_S), manifest.paths[
            row
        ]


def through_own(place: Path, *, count: int, seed: int) -> Counter[str]:
    """Take a corrupted corpus through all three stages of egs/own."""
    corpus = place / f"a corpus `touch {MARKER}`"
    data = place / "data"
    cases = write_corpus(corpus, SPEAKERS, count=count, seed=seed)
    wav = encoded(clean_wave(np.random.default_rng(seed)))
    bad_files = [corpus / name / "0.wav" for name in BAD_SPEAKERS]
    bad_files += [
        corpus / "anna" / "tw_in.wav",
        corpus / "anna" / "deep.wav" / "empty.wav",
    ]
    for path in (*bad_files, corpus / "anna" / "tw in.wav"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"" if path.name == "empty.wav" else wav)
    cases += [
        Case(path, "more", "rejected", i, seed) for i, path in enumerate(bad_files)
    ]
    arguments = [ROOT / "egs/own/prepare.py", "--corpus", corpus, "--num-jobs", 2]
    stages_1_and_2(place, data, arguments, len(cases))

    def id_of(path: Path) -> str:
        return re.sub(
            r"[\s\0-\x1f\x7f]", "_", str(path.relative_to(corpus).with_suffix(""))
        )

    reasons = check_every_case(data, cases, id_of)
    manifest = read_manifest([data / "train"], sample_rate=RATE)
    assert len(manifest) + reasons.total() == len(cases) + 1  # "tw in.wav"
    config = [
        "--config",
        ROOT / "conf/campplus_tiny.yaml",
        "--set",
        f"data.dir={data}",
        *SETTINGS,
    ]
    train = ["-m", "speakerlab", "train", "--exp", place / "exp", *config]
    run(place, *train, timeout=100)
    assert (place / "exp" / "model" / "embedder.safetensors").exists()
    assert [path for path in place.rglob(MARKER) if path.is_file()] == []
    return reasons


def test_a_corrupted_librispeech(tmp_path):
    """Its ids are the names of the files; nothing is converted."""
    corpus = tmp_path / "corpus"
    data = tmp_path / "data"
    cases = []
    for chapter, count in (("19-198", len(KINDS)), ("26-495", 9)):
        place = corpus / "train-clean-5" / chapter.replace("-", "/")
        cases += write_corpus(
            place, ["."], count=count, seed=3, prefix=f"{chapter}-".encode()
        )
    for name in ("61-1-0", "61-1-1", "84-7-0", "84-7-1"):
        path = corpus / "test-clean" / Path(*name.split("-")[:2]) / f"{name}.flac"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(clean_wave(np.random.default_rng(4)), "FLAC"))
    arguments = [ROOT / "egs/librispeech/prepare.py", "--corpus", corpus]
    stages_1_and_2(tmp_path, data, arguments, len(cases))
    for number, case in enumerate(cases):
        if re.search(r"\s", case.path.name) or re.match(r"rate \d", case.kind):
            cases[number] = replace(case, fate="rejected")
    reasons = check_every_case(data, cases, lambda path: path.stem)
    assert len(
        read_manifest([data / "train"], sample_rate=RATE)
    ) + reasons.total() == len(cases)


def test_a_corrupted_corpus_of_150_files(tmp_path):
    reasons = through_own(tmp_path, count=150, seed=1)
    assert len(reasons) > 15  # a corpus that is rejected for one reason tests one thing


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_corrupted_corpus_of_5000_files(tmp_path):
    reasons = through_own(tmp_path, count=5000, seed=2)
    for reason, count in reasons.most_common():
        print(f"{count:5d} {reason}")
    assert reasons.total() > 1500
