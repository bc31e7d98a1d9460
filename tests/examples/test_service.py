"""examples/service in this process: every endpoint, limits, and uploads that mean harm."""

import ast
import asyncio
import errno
import io
import json
import logging
import logging.config
import os
import re
import shutil
import socket
import sqlite3
import stat
import struct
import tempfile
import threading
import time
import unicodedata
import wave as wave_files
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models_on_disk import CALIBRATION
from voices import RATE, make_wave

pytest.importorskip("fastapi", reason="needs the extra `serve`")

import httpx2
from fastapi.testclient import TestClient
from service_clients import (
    encode,
    publish_tiny,
    silent_flac,
    voice,
    wav_of_10_gb,
)

import speakerlab
from examples.service import load_test
from examples.service import recordings as uploads
from examples.service.__main__ import main
from examples.service.app import create_app, from_environment
from examples.service.database import BUSY_SECONDS
from examples.service.enrolments import Enrolments
from examples.service.jobs import Jobs
from examples.service.limits import MAX_CLIENTS, TokenBuckets, client_of
from examples.service.load_test import Load
from examples.service.logs import LOG_CONFIG
from examples.service.server import bind, prepare_folder
from examples.service.settings import Settings, read_settings

ROOT = Path(__file__).parents[2]
Post = Callable[..., Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return speakerlab.load(publish_tiny(tmp_path_factory.mktemp("exp")), device="cpu")


@pytest.fixture
def serve(model, tmp_path) -> Iterator[Callable[..., TestClient]]:
    """serve(burst=2) -> a client of the application with these settings."""
    clients: list[TestClient] = []

    def start(**changed: Any) -> TestClient:
        settings = Settings(
            **{
                "model": "unused",
                "folder": tmp_path / "data",
                "requests_per_second": 1e6,
                "burst": 10**6,
                **changed,
            }
        )
        client = TestClient(create_app(settings, model))
        clients.append(client)
        return client.__enter__()

    yield start
    for client in clients:
        client.__exit__(None, None, None)


def post(client: TestClient, path: str, content: bytes, **fields: Any):
    return client.post(path, files={"recording": ("a.wav", content)}, data=fields)


def enrol(client: TestClient, name: str, *contents: bytes):
    files = [("recordings", (f"{i}.wav", c)) for i, c in enumerate(contents)]
    return client.post(f"/speakers/{name}", files=files)


# Endpoints


def test_an_embedding_is_that_of_the_library(serve, model):
    answer = post(serve(), "/embed", voice(1))
    assert answer.status_code == 200
    body = answer.json()
    expected_D = model.embed(voice(1))
    np.testing.assert_array_equal(np.float32(body["embedding"]), expected_D)
    assert body["seconds"] == 1.5
    assert body["model_sha256"] == model.sha256
    assert body["warnings"] == []


def test_doubts_about_a_recording_are_in_the_answer(serve):
    stereo = np.stack([make_wave(1, 0, 1.0), make_wave(2, 0, 1.0)], axis=1)
    (line,) = post(serve(), "/embed", encode(stereo)).json()["warnings"]
    assert line.startswith("a.wav: has 2 channels that differ")


def test_two_recordings_are_compared_as_by_the_library(serve, model):
    files = {
        "recording_a": ("a.wav", voice(1)),
        "recording_b": ("b.wav", voice(1, take=1)),
    }
    client = serve()
    body = client.post("/verify", files=files).json()
    expected = model.verify(voice(1), voice(1, take=1))
    assert body["score"] == pytest.approx(expected.score, abs=1e-6)
    assert body["llr"] == pytest.approx(expected.llr, abs=1e-5)
    assert body["same"] is expected.is_same
    assert body["threshold"] == CALIBRATION.threshold
    assert body["speech_seconds"] == list(expected.speech_seconds)
    strict = client.post("/verify", files=files, data={"far": "0.01"}).json()
    assert strict["threshold"] == CALIBRATION.threshold_at_far["0.01"]
    refused = client.post("/verify", files=files, data={"far": "nan"})
    assert refused.status_code == 422


def test_equal_recordings_have_a_score_of_at_most_1(serve, model, monkeypatch):
    recording = voice(1)
    result = model.verify(recording, recording)
    # The float32 after 1, which rounding can give.
    above_one = replace(result, score=1.0000001192092896)
    monkeypatch.setattr(model, "verify", lambda *_, **__: above_one)
    files = {"recording_a": recording, "recording_b": recording}
    answer = serve().post("/verify", files=files)
    assert answer.json()["score"] == 1.0


@pytest.mark.parametrize(
    ("threshold", "is_doubted"), [(0.3, False), (0.4, True), (None, False)]
)
def test_recordings_of_an_enrolment_that_do_not_match_are_doubted(
    serve, model, monkeypatch, threshold, is_doubted
):
    # Of any length; the scores are 0.6, 0.96 and, of the last two, 0.352.
    emb_ND = np.zeros((3, model.embed_dim), dtype=np.float32)
    emb_ND[:, :2] = [[2.0, 0.0], [1.2, 1.6], [0.96, -0.28]]

    def embed_all(reads: Any) -> np.ndarray:
        for read in reads:
            read()
        return emb_ND

    monkeypatch.setattr(model, "_embed_all", embed_all)
    calibration = threshold and replace(CALIBRATION, threshold=threshold)
    monkeypatch.setattr(model, "calibration", calibration)
    body = enrol(serve(), "ann", *[voice(number) for number in range(3)]).json()
    doubts = [line for line in body["warnings"] if "different speakers" in line]
    expected = (
        "1.wav and 2.wav: may be of different speakers, their score is 0.352, the"
        " threshold 0.400; check that all recordings are of one speaker"
    )
    assert doubts == ([expected] if is_doubted else [])


def test_each_recording_of_an_enrolment_is_embedded_once(serve, model, monkeypatch):
    num_embedded = 0
    embed_window = model.runtime.embed_window

    def counting(wave_BS: np.ndarray) -> np.ndarray:
        nonlocal num_embedded
        num_embedded += len(wave_BS)
        return embed_window(wave_BS)

    monkeypatch.setattr(model.runtime, "embed_window", counting)
    # No score is as high, so the agreement is also computed.
    strict = replace(CALIBRATION, threshold=2.0)
    monkeypatch.setattr(model, "calibration", strict)
    body = enrol(serve(), "ann", voice(1), voice(2), voice(3)).json()
    assert "may be of different speakers" in body["warnings"][-1]
    assert num_embedded == 3


def test_a_copy_in_an_enrolment_is_doubted(serve):
    body = enrol(serve(), "ann", voice(1), voice(1)).json()
    assert body["warnings"] == ["enrol: ann has 1 copy of other recordings, used once"]


def wav_that_states(stated_bytes: int, sound_bytes: int = 112_000) -> bytes:
    header = struct.pack("<4sI8s", b"RIFF", stated_bytes + 36, b"WAVEfmt ")
    header += struct.pack("<IHHIIHH", 16, 1, 1, RATE, 2 * RATE, 2, 16)
    header += struct.pack("<4sI", b"data", stated_bytes)
    return header + make_wave(1, 0, 3.5).tobytes()[:sound_bytes]


def test_a_header_that_states_more_is_doubted(serve):
    client = serve()
    three_hours = 3 * 3600 * 2 * RATE
    expected = [
        "a.wav: has 3.5 s, but its header states 10800.0 s; the rest may be missing"
    ]
    answer = post(client, "/embed", wav_that_states(three_hours)).json()
    assert (answer["seconds"], answer["warnings"]) == (3.5, expected)
    job = post(client, "/diarizations", wav_that_states(three_hours)).json()
    assert wait_for(client, job["id"])["result"]["warnings"] == expected
    assert enrol(client, "ann", wav_that_states(three_hours)).json()["warnings"] == [
        expected[0].replace("a.wav", "0.wav")
    ]
    # As of a program that writes into a pipe, and of a right header.
    for stated in (0xFFFFFFFF - 36, 0x7FFFF000, 112_000):
        answer = post(client, "/embed", wav_that_states(stated)).json()
        assert (answer["seconds"], answer["warnings"]) == (3.5, [])


def test_a_warning_that_is_answered_is_not_in_the_log(serve):
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.setFormatter(logging.Formatter(LOG_CONFIG["formatters"]["line"]["format"]))
    handler.addFilter(LOG_CONFIG["filters"]["unanswered"]["()"]())
    logging.getLogger().addHandler(handler)
    try:
        client = serve()
        silence = encode(np.zeros(2 * RATE, dtype=np.int16))
        job = wait_for(client, post(client, "/diarizations", silence).json()["id"])
        logging.getLogger("speakerlab").warning("of no recording")
    finally:
        logging.getLogger().removeHandler(handler)
    assert job["result"]["warnings"] == ["a.wav: no speech was found"]
    text = lines.getvalue()
    assert "no speech was found" not in text
    line = r"^\d{4}-\d\d-\d\d [\d:,]+ WARNING speakerlab \[\d+\]: of no recording$"
    assert re.search(line, text, flags=re.MULTILINE)


def test_speakers_are_enrolled_listed_identified_and_deleted(serve, model):
    client = serve()
    nobody = post(client, "/identify", voice(1))
    assert nobody.status_code == 409
    assert enrol(client, "ann", voice(1), voice(1, take=1)).status_code == 201
    assert enrol(client, "bob", voice(5)).json()["replaced"] is False
    assert enrol(client, "bob", voice(6)).json()["replaced"] is True

    model.speakers = {}
    model.enroll("ann", [voice(1), voice(1, take=1)])
    model.enroll("bob", voice(6))
    expected = model.identify(voice(1, take=2))
    body = post(client, "/identify", voice(1, take=2), top="1").json()
    best, score = expected.ranking[0]
    assert [candidate["name"] for candidate in body["ranking"]] == [best]
    assert body["ranking"][0]["score"] == pytest.approx(score, abs=1e-5)
    assert (body["known"], body["name"]) == (expected.is_known, expected.name)

    page = client.get("/speakers", params={"limit": 1}).json()
    assert page["total"] == 2
    assert page["speakers"][0]["name"] == "ann"
    assert page["speakers"][0]["num_recordings"] == 2
    page = client.get("/speakers", params={"after": "ann"}).json()
    assert [speaker["name"] for speaker in page["speakers"]] == ["bob"]
    assert client.delete("/speakers/ann").status_code == 204
    assert client.delete("/speakers/ann").status_code == 404
    assert client.get("/speakers").json()["total"] == 1


def test_a_name_is_the_same_speaker_however_its_accents_are_spelled(serve):
    client = serve()
    for form in ("NFC", "NFD"):
        assert enrol(client, unicodedata.normalize(form, "Zoë"), voice(1)).is_success
    assert enrol(client, "王小明", voice(2)).is_success
    names = [row["name"] for row in client.get("/speakers").json()["speakers"]]
    assert names == [unicodedata.normalize("NFC", "Zoë"), "王小明"]


@pytest.mark.parametrize(
    ("enrolled", "name"),
    [
        ("ann", "Ann"),
        ("ANN", "ann"),
        ("ｂob", "bob"),
        ("bob", "ᵇob"),
        ("STRASSE", "straße"),
        ("ann", "a\u200dnn"),
    ],
)
def test_a_name_that_looks_like_an_enrolled_one_is_refused(serve, enrolled, name):
    client = serve()
    assert enrol(client, enrolled, voice(1)).is_success
    refused = enrol(client, name, voice(2))
    assert refused.status_code == 422
    assert f"looks like '{enrolled}'" in refused.json()["detail"]
    assert client.get("/speakers").json()["total"] == 1
    # The same name replaces, and others are allowed.
    assert enrol(client, enrolled, voice(1)).json()["replaced"] is True
    assert enrol(client, "anna", voice(2)).is_success


NAME_RULES = {
    "\u0430nn": "mixes Cyrillic and Latin letters",
    "\u03bfscar": "mixes Greek and Latin letters",
    "ann\u13aa": "mixes Cherokee and Latin letters",
    "a/b": "must not contain a slash",
    "a%2Fb": "must not contain a slash",
    "/": "must not contain a slash",
    "%F0%9F%98%80": "must have a letter or a digit",
    "": "must have a letter or a digit",
    "%FF": "must be text in UTF-8",
    "ann%20": "must not begin or end with a blank",
    "ann%E2%80%AE": "must not contain '\\u202e'",
    "ann%09": "must not begin or end with a blank",
    "a%09b": "must not contain '\\t'",
    "a" * 101: "at most 100 characters",
}


@pytest.mark.parametrize("name", NAME_RULES)
def test_a_name_is_refused_by_a_rule_that_the_answer_has(serve, name):
    answer = enrol(serve(), name, voice(1))
    assert answer.status_code == 422
    assert NAME_RULES[name] in answer.json()["detail"]


@pytest.mark.parametrize(
    "name", ["王小明", "Иван 2", "Ångström", "می‌خواهم", "李Bob", "7"]
)
def test_names_of_any_language_are_allowed_and_deleted(serve, name):
    client = serve()
    assert enrol(client, name, voice(1)).status_code == 201
    assert client.delete(f"/speakers/{name}").status_code == 204


def wait_for(client: TestClient, job_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        job = client.get(f"/diarizations/{job_id}").json()
        if job["state"] in ("done", "failed"):
            return job
        time.sleep(0.02)
    raise AssertionError(job)


def test_a_diarization_is_that_of_the_library(serve, model, tmp_path):
    conversation = encode(np.r_[make_wave(1, 0, 3.0), make_wave(9, 0, 3.0)])
    client = serve()
    answer = post(client, "/diarizations", conversation, num_speakers="2")
    assert answer.status_code == 202
    job = wait_for(client, answer.json()["id"])
    expected = model.diarize(conversation, num_speakers=2).to_dict()
    assert job["state"] == "done", job
    assert job["recording"] == "a.wav"
    assert job["result"]["segments"] == expected["segments"]
    assert set(job["result"]["speakers"]) == set(expected["speakers"])
    assert "embedding" not in json.dumps(job)
    # The recording is deleted with the end of the job.
    assert list((tmp_path / "data/recordings").iterdir()) == []
    assert client.delete(f"/diarizations/{job['id']}").status_code == 204
    assert client.get(f"/diarizations/{job['id']}").status_code == 404


def test_a_job_that_cannot_name_speakers_says_why(serve):
    client = serve()
    answer = post(client, "/diarizations", voice(1), known="true")
    job = wait_for(client, answer.json()["id"])
    assert job["state"] == "failed"
    assert "no speaker is enrolled" in job["error"]


def test_health_and_metrics(serve, model):
    client = serve()
    assert client.get("/health/live").json() == {"live": True}
    health = client.get("/health").json()
    assert health["ready"] is True
    # Which balancers use.
    for path in ("/health", "/health/live"):
        head = client.head(path)
        assert (head.status_code, head.content) == (200, b"")
    assert health["model_sha256"] == model.sha256
    before = client.get("/metrics").text
    post(client, "/embed", voice(1))
    post(client, "/embed", b"text")
    client.get("/speakers/../../etc/passwd")
    after = client.get("/metrics").text

    def added(line: str) -> float:
        values = []
        for text in (before, after):
            (value,) = [
                float(row.rpartition(" ")[2])
                for row in text.splitlines()
                if row.startswith(line + " ")
            ] or [0.0]
            values.append(value)
        return values[1] - values[0]

    labels = 'endpoint="/embed",method="POST"'
    assert added(f'speakerlab_requests_total{{code="200",{labels}}}') == 1
    assert added(f'speakerlab_requests_total{{code="422",{labels}}}') == 1
    seconds = added('speakerlab_audio_seconds_total{endpoint="/embed"}')
    assert seconds == pytest.approx(1.5)
    assert added('speakerlab_request_seconds_count{endpoint="/embed"}') == 2
    assert 'speakerlab_jobs{state="queued"} 0.0' in after
    # A path is no label, because there is no end of them.
    assert "passwd" not in after


def test_every_field_of_the_openapi_page_that_is_a_number_has_its_unit(serve):
    page = serve().get("/openapi.json").json()
    wanted = {"seconds": "second", "sample_rate": "Hz", "score": "-1 to 1"}
    seen = set()
    for name, schema in page["components"]["schemas"].items():
        for field, described in schema.get("properties", {}).items():
            if field in wanted:
                assert wanted[field] in described["description"], (name, field)
                seen.add(field)
    assert seen == set(wanted)
    for path, methods in page["paths"].items():
        for operation in methods.values():
            assert operation["description"], path


def test_the_openapi_page_has_the_refusals(serve):
    page = serve().get("/openapi.json").json()
    forms = {"400", "408", "413", "415", "422", "429", "503"}
    stored = {"429", "503"}
    wanted = {
        ("/embed", "post"): forms,
        ("/identify", "post"): forms | {"409"},
        ("/speakers/{name}", "post"): forms | {"409"},
        ("/speakers/{name}", "delete"): stored | {"404"},
        ("/diarizations/{job_id}", "get"): stored | {"404"},
        ("/diarizations/{job_id}", "delete"): stored | {"404"},
        ("/speakers", "get"): stored,
        ("/health", "get"): {"503"},
    }
    for (path, method), codes in wanted.items():
        responses = set(page["paths"][path][method]["responses"])
        assert codes <= responses, path
        assert ("404" in responses) == ("404" in codes), path
    (form,) = [
        schema
        for name, schema in page["components"]["schemas"].items()
        if "recordings" in schema.get("properties", {}) and name.startswith("Body")
    ]
    assert form["properties"]["recordings"]["maxItems"] == 20


# Uploads that mean harm


def float_wav(value: float) -> bytes:
    wave_S = make_wave(1, 0, 1.0) / 32768
    wave_S[5000] = value
    return encode(wave_S, subtype="FLOAT")


def wav_of_rate(rate: int) -> bytes:
    file = io.BytesIO()
    with wave_files.open(file, "wb") as wav:
        wav.setparams((1, 2, rate, 0, "NONE", ""))
        wav.writeframes(make_wave(1, 0, 1.0).tobytes())
    return file.getvalue()


HOSTILE: dict[str, tuple[bytes, int]] = {
    "empty": (b"", 422),
    "text": (b"this is no audio\n" * 20, 422),
    "web page": (b"<!doctype html><html></html>", 422),
    "zip": (b"PK\x03\x04" + bytes(1000), 422),
    "gzip": (b"\x1f\x8b\x08" + bytes(1000), 422),
    "playlist": (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", 422),
    "truncated": (voice(1)[:20_000], 422),
    "cut in the header": (voice(1)[:30], 422),
    "FLAC of 10 minutes of silence": (silent_flac(600), 413),
    "NaN": (float_wav(np.nan), 422),
    "infinity": (float_wav(np.inf), 422),
    "3e38": (float_wav(3e38), 422),
    "silence": (encode(np.zeros(16000, dtype=np.int16)), 422),
    "no samples": (encode(np.zeros(0, dtype=np.int16)), 422),
    "4 kHz": (wav_of_rate(4000), 422),
    "1 MHz": (wav_of_rate(1_000_000), 422),
    "a rate of 2^31": (wav_of_rate(2**31 - 1), 422),
    "16 channels": (encode(np.tile(make_wave(1, 0, 0.2)[:, None], 16)), 422),
    "3 MB": (bytes(3_000_000), 413),
}


def refuse_temporary_files(patch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Let all temporary files be made in a folder of this test."""
    folder.mkdir()
    patch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_upload_is_refused(serve, kind, tmp_path, monkeypatch):
    temporary = refuse_temporary_files(monkeypatch, tmp_path / "tmp")
    content, code = HOSTILE[kind]
    client = serve(max_upload_mb=2, max_job_upload_mb=2, max_job_seconds=60)
    assert len(content) < 10_000_000
    for path in ("/embed", "/diarizations"):
        answer = post(client, path, content)
        # A job may be of silence; it finds no speech.
        if (kind, path) == ("silence", "/diarizations"):
            assert answer.status_code == 202
            assert wait_for(client, answer.json()["id"])["result"]["segments"] == []
            continue
        # The samples of a job are looked at when it runs.
        is_late = path == "/diarizations" and answer.status_code == 202
        if is_late and kind in ("NaN", "infinity", "3e38", "no samples"):
            job = wait_for(client, answer.json()["id"])
            assert job["state"] == "failed"
            assert job["error"].startswith("a.wav: ")
            continue
        assert answer.status_code == code, answer.text
        (detail,) = answer.json().values()
        assert "\n" not in detail and str(tmp_path) not in detail
    assert enrol(client, "ann", content).status_code == code
    assert client.get("/speakers").json()["total"] == 0
    assert list(temporary.iterdir()) == []
    assert list((tmp_path / "data/recordings").iterdir()) == []


def test_decoding_stops_at_the_limit(serve, monkeypatch):
    """An hour of silence in kilobytes: only the first minute is decoded."""
    num_decoded = 0
    stream = uploads.stream

    class Counted:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.opened = stream(*args, **options)

        def __enter__(self):
            rate, blocks = self.opened.__enter__()
            return rate, self.count(blocks)

        def count(self, blocks):
            nonlocal num_decoded
            for block_SC in blocks:
                num_decoded += len(block_SC)
                yield block_SC

        def __exit__(self, *error):
            return self.opened.__exit__(*error)

    monkeypatch.setattr(uploads, "stream", Counted)
    bomb = silent_flac(3600)
    assert len(bomb) < 500_000
    assert post(serve(), "/embed", bomb).status_code == 413
    assert num_decoded < 90 * 16000


def test_a_header_that_claims_10_gb_is_not_believed(serve):
    """A program that pipes audio writes such lengths, so the sound that is there is read."""
    answer = post(serve(), "/embed", wav_of_10_gb())
    assert answer.status_code == 200
    assert answer.json()["seconds"] == 1.0


def boundary_body(*parts: str) -> dict[str, Any]:
    text = "".join(f"--x\r\n{part}\r\n" for part in parts) + "--x--\r\n"
    return {
        "content": text.encode(),
        "headers": {"Content-Type": "multipart/form-data; boundary=x"},
    }


NESTED = "multipart/mixed; boundary=y"
FORMS: dict[str, dict[str, Any]] = {
    "10,000 fields": {"data": {f"f{i}": "x" for i in range(10_000)}},
    "10,000 parts": boundary_body(
        *[
            f'Content-Disposition: form-data; name="f{i}"\r\n\r\nx'
            for i in range(10_000)
        ]
    ),
    "10,000 files": {
        "files": [("recording", (f"{i}.wav", b"x")) for i in range(10_000)]
    },
    "a field of 1 MB": boundary_body(
        'Content-Disposition: form-data; name="top"\r\n\r\n' + "1" * 1_000_000
    ),
    "a text as recording": {"data": {"recording": "a" * 5000}, "files": {"x": b""}},
    "a header of 1 MB": boundary_body(
        'Content-Disposition: form-data; name="recording"; filename="'
        + "a" * 1_000_000
        + '"\r\n\r\nx'
    ),
    "nested multipart": boundary_body(
        'Content-Disposition: form-data; name="recording"; filename="a"\r\n'
        f"Content-Type: {NESTED}\r\n\r\n" + f"--y\r\nContent-Type: {NESTED}\r\n" * 5000
    ),
    "no boundary": {
        "content": b"x",
        "headers": {"Content-Type": "multipart/form-data"},
    },
    "no end": {
        "content": b'--x\r\nContent-Disposition: form-data; name="recording"',
        "headers": {"Content-Type": "multipart/form-data; boundary=x"},
    },
    "JSON": {"json": {"recording": [float("1")] * 1000}},
    "no content type": {"content": voice(1)},
    "nothing": {},
    "fields that are no numbers": {
        "files": {"recording": voice(1)},
        "data": {"far": "inf", "top": "1e99"},
    },
}


@pytest.mark.parametrize("kind", FORMS)
def test_a_hostile_form_is_refused(serve, kind, tmp_path, monkeypatch):
    temporary = refuse_temporary_files(monkeypatch, tmp_path / "tmp")
    client = serve(max_upload_mb=2)
    answer = client.post("/identify", **FORMS[kind])
    assert 400 <= answer.status_code < 500, answer.text
    # What was sent is not sent back.
    assert len(answer.content) < 500
    assert list(temporary.iterdir()) == []


FORM_RULES: dict[str, tuple[dict[str, Any], int, str]] = {
    "unknown field": (
        {"files": {"recording": voice(1)}, "data": {"extra": "1"}},
        422,
        "unknown field; it may have: recording, far, top",
    ),
    "unknown file": (
        {"files": {"recording": voice(1), "extra": b"x"}},
        422,
        "unknown field",
    ),
    "two recordings": (
        {"files": [("recording", voice(1)), ("recording", voice(2))]},
        422,
        "recording: is there more than once",
    ),
    "two rates": (
        {"files": {"recording": voice(1)}, "data": {"far": ["0.01", "0.01"]}},
        422,
        "far: is there more than once",
    ),
    "text as a recording": (
        {"files": {"recording": (None, "abc")}},
        422,
        "recording: must be a file (curl: recording=@FILE)",
    ),
    "a file as a rate": (
        {"files": {"recording": voice(1), "far": ("a", b"0.01")}},
        422,
        "far: must be text (curl: far=TEXT)",
    ),
    "no recording": (
        {"files": {"top": (None, "1")}},
        422,
        "recording: Field required",
    ),
    "audio": (
        {"content": voice(1), "headers": {"Content-Type": "audio/wav"}},
        415,
        "the body must be multipart/form-data",
    ),
    "JSON": ({"json": {}}, 415, "the body must be multipart/form-data"),
    "no type": ({"content": voice(1)}, 415, "the body must be multipart/form-data"),
    "url-encoded": (
        {"data": {"recording": "abc"}},
        415,
        "the body must be multipart/form-data",
    ),
}


@pytest.mark.parametrize("kind", FORM_RULES)
def test_a_wrong_form_is_refused_with_the_reason(serve, kind):
    client = serve()
    assert enrol(client, "ann", voice(1)).is_success
    request, code, line = FORM_RULES[kind]
    answer = client.post("/identify", **request)
    assert (answer.status_code, line in answer.text) == (code, True), answer.text


def test_a_wrong_type_is_answered_with_the_fields_of_the_endpoint(serve):
    client = serve()
    for path, fields in {
        "/speakers/ann": "(curl: -F recordings=@FILE)",
        "/verify": "(curl: -F recording_a=@FILE -F recording_b=@FILE)",
    }.items():
        answer = client.post(path, content=voice(1))
        assert answer.status_code == 415
        assert answer.json()["detail"].endswith(fields)


@pytest.mark.parametrize("path", ["/identify?top=1", "/embed?a", "/diarizations?far=1"])
def test_a_query_of_a_form_is_refused(serve, path):
    client = serve()
    answer = post(client, path, voice(1))
    assert (answer.status_code, answer.json()) == (
        422,
        {"detail": "the query has an unknown parameter; send fields in the form"},
    )


def test_an_unknown_parameter_is_refused_with_the_known_ones(serve):
    client = serve()
    answer = client.get("/speakers?page=2")
    assert answer.status_code == 422
    assert answer.json()["detail"].endswith("; it may have: after, limit")
    assert client.get("/speakers?after=a&limit=2").is_success
    for answer in (client.delete("/speakers/ann?x=1"), client.get("/diarizations/a?x")):
        assert answer.status_code == 422
        assert answer.json()["detail"].endswith("; the endpoint has none")
    # A proxy may add one.
    assert client.get("/health?x=1").is_success


def test_a_rate_or_channels_beyond_the_limits_name_the_file(serve):
    client = serve(min_sample_rate=24000)
    answer = enrol(client, "ann", voice(1), voice(2))
    assert (answer.status_code, answer.json()["detail"]) == (
        422,
        "0.wav: must have a sample rate from 24000 to 96000 Hz, got 16000; convert it",
    )
    answer = post(client, "/diarizations", voice(1))
    assert answer.json()["detail"].count("must have a sample rate") == 1
    assert answer.json()["detail"].count(": ") == 1


def test_too_many_or_too_long_recordings_name_the_limit_and_the_file(serve):
    client = serve(max_seconds=1)
    answer = enrol(client, "ann", voice(1, seconds=0.5), voice(2))
    assert answer.status_code == 413
    assert answer.json()["detail"] == "1.wav: is longer than 1 s"
    answer = enrol(client, "ann", *[b"x"] * 21)
    assert answer.status_code == 400
    assert "20" in answer.json()["detail"]


def test_a_path_with_a_slash_at_its_end_is_no_other_path(serve):
    client = serve()
    answer = post(client, "/embed/", voice(1))
    assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"})


def test_an_endless_body_is_cut_while_it_is_read(serve):
    num_sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal num_sent
        yield b'--x\r\nContent-Disposition: form-data; name="recording"; filename="a"\r\n\r\n'
        while num_sent < 10_000_000:
            num_sent += 65536
            yield bytes(65536)

    answer = serve(max_upload_mb=1).post(
        "/embed",
        content=endless(),
        headers={"Content-Type": "multipart/form-data; boundary=x"},
    )
    assert answer.status_code == 413


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "%2e%2e",
        "..%2F..%2Fetc%2Fpasswd",
        "%00",
        "a%0Ab",
        "ann%0A",
        "%20ann",
        "%FF",
        "a" * 101,
        "%E2%80%8B",
        "%ED%A0%80",
        "ann%E2%80%AE",
    ],
)
def test_a_hostile_name_is_refused(serve, name, tmp_path):
    client = serve()
    answer = enrol(client, name, voice(1))
    assert 400 <= answer.status_code < 500, answer.text
    assert client.get("/speakers").json()["total"] == 0
    files = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert {name.partition("-")[0] for name in files} == {
        "speakers.sqlite",
        "jobs.sqlite",
    }


def test_the_name_of_a_file_is_only_a_name(serve, tmp_path):
    name = "../../\u202e\x00evil\n" + "a" * 1000
    files = {"recording": (name, b"no audio")}
    answer = serve().post("/embed", files=files)
    assert answer.status_code == 422
    detail = answer.json()["detail"]
    assert detail.isprintable()
    assert len(detail) < 300


# Limits


def test_a_client_gets_its_rate_and_no_more():
    buckets = TokenBuckets(rate=2.0, burst=3)
    waits = [buckets.take("a", 10.0) for _ in range(4)]
    assert waits == [0, 0, 0, 0.5]
    assert buckets.take("b", 10.0) == 0
    assert buckets.take("a", 10.5) == 0
    assert buckets.take("a", 10.5) > 0
    for number in range(2 * MAX_CLIENTS):
        buckets.take(str(number), 11.0)
    assert len(buckets._buckets) <= MAX_CLIENTS


def test_addresses_of_one_network_are_one_client():
    assert client_of({"client": ("10.0.0.1", 1)}) == "10.0.0.1"
    network = client_of({"client": ("2001:db8::1", 1)})
    assert network == client_of({"client": ("2001:db8::ffff:1", 1)})
    assert network != client_of({"client": ("2001:db8:0:1::1", 1)})


def test_too_many_requests_are_told_when_to_return(serve):
    client = serve(requests_per_second=0.1, burst=2)
    codes = [client.get("/speakers").status_code for _ in range(3)]
    assert codes == [200, 200, 429]
    answer = client.get("/speakers")
    assert 1 <= int(answer.headers["Retry-After"]) <= 10
    # Probes are not counted.
    assert client.get("/health").status_code == 200
    assert 'code="429",endpoint="/speakers",method="GET"' in client.get("/metrics").text


@pytest.fixture
def blocked(model, monkeypatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Make embedding wait: (set when one has begun, to be set so that all go on)."""
    is_inside = threading.Event()
    may_end = threading.Event()
    embed = model.embed

    def wait_and_embed(audio: Any) -> np.ndarray:
        is_inside.set()
        assert may_end.wait(20)
        return embed(audio)

    monkeypatch.setattr(model, "embed", wait_and_embed)
    yield is_inside, may_end
    may_end.set()


def test_a_full_service_refuses_at_once(serve, blocked):
    is_inside, may_end = blocked
    client = serve(concurrency=1, queue=1, queue_seconds=0.2)
    codes: list[int] = []

    def request() -> None:
        codes.append(post(client, "/embed", voice(1)).status_code)

    first = threading.Thread(target=request)
    first.start()
    assert is_inside.wait(20)
    # The second waits in the queue, for its time.
    second = threading.Thread(target=request)
    second.start()
    time.sleep(0.05)
    third = post(client, "/embed", voice(1))
    assert third.status_code == 503
    assert third.headers["Retry-After"] == "1"
    assert client.get("/health").status_code == 200
    # What needs no turn does not wait for one.
    assert client.get("/speakers").status_code == 200
    assert client.delete("/speakers/nobody").status_code == 404
    refused = 'requests_total{code="503",endpoint="/embed",method="POST"}'
    assert refused in client.get("/metrics").text
    second.join()
    assert codes == [503]
    may_end.set()
    first.join()
    assert codes == [503, 200]
    assert post(client, "/embed", voice(1)).status_code == 200


def test_the_bytes_of_uploads_that_wait_are_bounded(serve, blocked):
    is_inside, may_end = blocked
    recording = voice(1)
    size_mb = (len(recording) + 1000) / 1e6
    limits = {"max_upload_mb": size_mb, "max_job_upload_mb": size_mb}
    client = serve(**limits, max_waiting_mb=1.5 * size_mb)
    codes: list[int] = []
    first = threading.Thread(
        target=lambda: codes.append(post(client, "/embed", recording).status_code)
    )
    first.start()
    assert is_inside.wait(20)

    # The first upload waits for its answer, and a second one does not fit beside it.
    second = post(client, "/embed", recording)
    assert second.status_code == 503
    assert "too many uploads wait" in second.text
    assert int(second.headers["Retry-After"]) > 0

    # Neither does one that does not state its length.
    def in_pieces() -> Iterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="recording"; filename="a"\r\n\r\n'
        yield recording
        yield b"\r\n--x--\r\n"

    third = client.post(
        "/embed",
        content=in_pieces(),
        headers={"Content-Type": "multipart/form-data; boundary=x"},
    )
    assert third.status_code == 503
    assert "too many uploads wait" in third.text

    # All space is free again when the answers are out.
    may_end.set()
    first.join()
    assert codes == [200]
    assert post(client, "/embed", recording).status_code == 200


def test_jobs_and_speakers_are_bounded(serve, model, monkeypatch):
    may_end = threading.Event()
    monkeypatch.setattr(model, "diarize", lambda *_, **__: may_end.wait(20))
    client = serve(max_jobs=1, max_speakers=1)
    assert post(client, "/diarizations", voice(1)).status_code == 202
    second = post(client, "/diarizations", voice(1))
    assert second.status_code == 503
    assert int(second.headers["Retry-After"]) > 0
    may_end.set()
    assert enrol(client, "ann", voice(1)).status_code == 201
    assert enrol(client, "bob", voice(2)).status_code == 409
    assert enrol(client, "ann", voice(2)).status_code == 201


# Databases


def open_enrolments(folder: Path, sha256: str = "a" * 64) -> Enrolments:
    return Enrolments(
        folder / "speakers.sqlite",
        model_sha256=sha256,
        embed_dim=2,
        max_speakers=10,
    )


UNIT = np.array([0.6, 0.8], dtype=np.float32)


def add(enrolments: Enrolments, name: str, unit_D: np.ndarray = UNIT) -> None:
    enrolments.add(name, unit_D, num_recordings=1, seconds=1.0)


def test_a_worker_sees_the_enrolments_of_another_at_once(tmp_path):
    one, other = open_enrolments(tmp_path), open_enrolments(tmp_path)
    assert dict(other.embeddings()) == {}
    add(one, "ann")
    np.testing.assert_array_equal(other.embeddings()["ann"], UNIT)
    add(other, "ann", UNIT[::-1])
    np.testing.assert_array_equal(one.embeddings()["ann"], UNIT[::-1])
    assert one.embeddings() is one.embeddings()
    assert one.remove("ann")
    assert "ann" not in other.embeddings()


def test_embeddings_of_another_model_are_refused(serve, model, tmp_path):
    enrolments = open_enrolments(tmp_path / "data", "b" * 64)
    with enrolments.database.transaction() as connection:
        connection.execute(
            "INSERT INTO speakers VALUES (?, 'ann', x'00', 1, 1.0, 0)", ("b" * 64,)
        )
    with pytest.raises(ValueError, match="has 1 speakers of model bbbbbbbbbbbb"):
        serve()


def test_of_a_deleted_embedding_no_byte_is_left(tmp_path):
    enrolments = open_enrolments(tmp_path)
    secret_D = np.array([0.1234567, 0.9876543], dtype=np.float32)
    add(enrolments, "someone", secret_D)
    add(enrolments, "other")

    def contents() -> bytes:
        return b"".join(path.read_bytes() for path in sorted(tmp_path.iterdir()))

    assert secret_D.tobytes() in contents()
    enrolments.remove("someone")
    assert secret_D.tobytes() not in contents()
    assert b"someone" not in contents()


def test_a_locked_database_is_503(serve, monkeypatch, tmp_path):
    monkeypatch.setattr("examples.service.database.BUSY_SECONDS", 0.1)
    assert BUSY_SECONDS > 1
    client = serve()
    other = sqlite3.connect(tmp_path / "data/speakers.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    answer = enrol(client, "ann", voice(1))
    assert answer.status_code == 503
    assert "Retry-After" in answer.headers
    other.execute("ROLLBACK")
    assert enrol(client, "ann", voice(1)).status_code == 201


def test_files_are_readable_by_their_owner_alone(serve, tmp_path):
    # As of an earlier version.
    old = sqlite3.connect(tmp_path / "speakers.sqlite")
    old.execute("CREATE TABLE other (a)")
    old.close()
    (tmp_path / "speakers.sqlite").chmod(0o644)
    open_enrolments(tmp_path).database.close()
    client = serve()
    assert enrol(client, "ann", voice(1)).is_success
    paths = [tmp_path / "speakers.sqlite", *(tmp_path / "data").rglob("*")]
    for path in [tmp_path / "data", *paths]:
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path
    assert {"speakers.sqlite-wal", "jobs.sqlite"} <= {path.name for path in paths}


def remove_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def replace_by_a_copy(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    shutil.copytree(folder.with_name("moved"), folder)


def remove_recordings(folder: Path) -> None:
    (folder / "recordings").rmdir()


def remove_jobs(folder: Path) -> None:
    (folder / "jobs.sqlite").unlink()


@pytest.mark.parametrize(
    ("damage", "keeps_speakers"),
    [
        (remove_folder, False),
        (replace_by_a_copy, False),
        (remove_recordings, True),
        (remove_jobs, True),
    ],
)
def test_a_folder_that_is_gone_is_503_and_not_ready(
    serve, tmp_path, damage, keeps_speakers
):
    client = serve()
    assert enrol(client, "ann", voice(1)).is_success
    damage(tmp_path / "data")
    assert client.get("/health").status_code == 503
    assert client.head("/health").status_code == 503
    assert client.get("/health/live").status_code == 200
    assert post(client, "/diarizations", voice(1)).status_code == 503
    code = enrol(client, "bob", voice(2)).status_code
    assert code == (201 if keeps_speakers else 503)
    # What needs no file.
    assert post(client, "/embed", voice(1)).status_code == 200


def test_a_folder_that_is_put_back_is_ready_again(serve, tmp_path):
    client = serve()
    (tmp_path / "data").rename(tmp_path / "moved")
    assert client.get("/health").status_code == 503
    (tmp_path / "moved").rename(tmp_path / "data")
    assert client.get("/health").status_code == 200


def test_a_full_disk_is_not_ready(serve, monkeypatch):
    client = serve()

    def fail(**_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("examples.service.database.tempfile.TemporaryFile", fail)
    assert client.get("/health").status_code == 503


def store_job(folder: Path, **columns: Any) -> str:
    """Put a job into the database, as a worker that was killed leaves it."""
    job_id = "0123456789abcdef" * 2
    (folder / "recordings" / job_id).write_bytes(voice(1))
    values = {
        "id": job_id,
        "recording": "a.wav",
        "options": "{}",
        "created_at": time.time(),
        **columns,
    }
    names = ", ".join(values)
    marks = ", ".join("?" for _ in values)
    with sqlite3.connect(folder / "jobs.sqlite") as connection:
        connection.execute(
            f"INSERT INTO jobs ({names}) VALUES ({marks})", list(values.values())
        )
    return job_id


@pytest.mark.parametrize(("attempts", "state"), [(1, "done"), (3, "failed")])
def test_a_job_of_a_killed_worker_is_run_again(serve, tmp_path, attempts, state):
    client = serve()
    job_id = store_job(
        tmp_path / "data",
        state="running",
        owner="killed",
        leased_until=time.time() - 1,
        attempts=attempts,
    )
    job = wait_for(client, job_id)
    assert job["state"] == state
    assert list((tmp_path / "data/recordings").iterdir()) == []
    if state == "done":
        assert job["attempts"] == 2
    else:
        assert job["error"] == "was interrupted 3 times"


def test_a_job_that_does_not_end_is_handed_back_when_the_service_stops(tmp_path):
    def open_jobs() -> Jobs:
        return Jobs(
            tmp_path,
            max_jobs=1,
            max_attempts=1,
            lease_seconds=30,
            retention_seconds=3600,
        )

    def wait(*_: Any) -> dict[str, str]:
        is_running.set()
        assert may_end.wait(20)
        return {"by": "the first"}

    is_running = threading.Event()
    may_end = threading.Event()
    first = open_jobs()
    job_id = first.add(io.BytesIO(voice(1)), "a.wav", {}).id
    first.start(wait)
    assert is_running.wait(20)
    assert not first.stop(grace_seconds=0.05)
    second = open_jobs()
    handed_back = second.get(job_id)
    assert handed_back is not None
    assert (handed_back.state, handed_back.attempts) == ("queued", 0)
    second.start(lambda *_: {"by": "the second"})
    # Too late: the job is no longer its own.
    may_end.set()
    deadline = time.monotonic() + 20
    while (job := second.get(job_id)) is not None and job.state != "done":
        assert time.monotonic() < deadline, job
        time.sleep(0.02)
    assert job is not None and job.result == {"by": "the second"}
    assert second.stop()


def test_results_and_forgotten_recordings_are_deleted_after_their_time(serve, tmp_path):
    client = serve(job_retention_hours=1)
    old_job = store_job(
        tmp_path / "data", state="done", finished_at=time.time() - 3601, result="{}"
    )
    forgotten = tmp_path / "data/recordings" / old_job
    os.utime(forgotten, (0, 0))
    fresh = tmp_path / "data/recordings/being-stored"
    fresh.touch()
    client.app.state.service.jobs.clean()
    assert client.get(f"/diarizations/{old_job}").status_code == 404
    assert not forgotten.exists()
    assert fresh.exists()
    fresh.unlink()


# Settings and imports


def test_settings_come_from_a_file_and_from_variables(tmp_path):
    path = tmp_path / "service.yaml"
    path.write_text("model: exp/a\nport: 9000\nworkers: 2\n")
    settings = read_settings({"SERVE_CONFIG": str(path), "SERVE_PORT": "9001"})
    assert (settings.model, settings.port, settings.workers) == ("exp/a", 9001, 2)


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({}, "model (SERVE_MODEL): field required"),
        (
            {"SERVE_MODEL": "a", "SERVE_PROT": "1"},
            "SERVE_PROT: unknown setting; did you mean port?",
        ),
        ({"SERVE_MODEL": ""}, "model (SERVE_MODEL): field required"),
        ({"SERVE_MODEL": "a", "SERVE_PORT": "99999"}, "got '99999'"),
        ({"SERVE_MODEL": "a", "SERVE_TRUSTED_PROXIES": "foo"}, "got 'foo'"),
        ({"SERVE_MODEL": "a", "SERVE_TRUSTED_PROXIES": "10.0.0.1/8"}, "networks"),
        ({"SERVE_MODEL": "a", "SERVE_TRUSTED_PROXIES": "10.0.0.1,,"}, "networks"),
        ({"SERVE_MODEL": "a", "SERVE_MAX_SECONDS": "nan"}, "max_seconds"),
        (
            {"SERVE_MODEL": "a", "SERVE_MAX_JOB_UPLOAD_MB": "5000"},
            "max_waiting_mb (SERVE_MAX_WAITING_MB): must be at least max_job_upload_mb,"
            " 5000",
        ),
        ({"SERVE_MODEL": "a", "SERVE_MAX_WAITING_MB": "nan"}, "at least max_upload_mb"),
        ({"SERVE_CONFIG": "missing.yaml"}, "missing.yaml: cannot be read"),
    ],
)
def test_a_wrong_setting_is_one_line(variables, line):
    with pytest.raises(ValueError) as refusal:
        read_settings(variables)
    assert line in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_an_unknown_setting_does_not_show_its_value():
    with pytest.raises(ValueError, match="^SERVE_API_KEY: unknown setting") as refusal:
        read_settings({"SERVE_MODEL": "a", "SERVE_API_KEY": "secret"})
    assert "secret" not in str(refusal.value)


def test_a_misspelt_setting_of_a_file_names_the_file_and_the_right_one(tmp_path):
    path = tmp_path / "service.yaml"
    path.write_text("modle: exp/a\n")
    with pytest.raises(ValueError, match="service.yaml: modle: unknown .* mean model"):
        read_settings({"SERVE_CONFIG": str(path)})


def test_proxies_are_addresses_and_networks():
    for text in ("*", "127.0.0.1", "10.0.0.0/8, ::1", "2001:db8::/32"):
        settings = Settings(model="a", trusted_proxies=text)
        assert settings.trusted_proxies == text


def test_the_guide_has_every_setting_with_its_default():
    guide = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    _, _, section = guide.partition("| setting | default |")
    table, _, _ = section.partition("\n\n")
    defaults: dict[str, str] = {}
    for line in table.splitlines()[2:]:
        _, names, values, _, _ = line.split("|")
        values = values.replace("`", "").split(",")
        for name, value in zip(names.replace("`", "").split(","), values, strict=True):
            defaults[name.strip()] = value.strip()
    for name, field in Settings.model_fields.items():
        default = "" if field.is_required() else str(field.default)
        assert defaults.pop(name) == default.replace("False", "false"), name
    assert defaults == {}


def test_a_folder_that_cannot_be_used_names_its_setting(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "below", Path("/proc/x")):
        with pytest.raises(ValueError, match=r"^folder \(SERVE_FOLDER\): .*; choose"):
            prepare_folder(folder)


def test_a_folder_belongs_to_one_service_and_keeps_its_metrics(tmp_path, monkeypatch):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")  # is set below
    folder = tmp_path / "data"
    with prepare_folder(folder):
        assert stat.S_IMODE((folder / "lock").stat().st_mode) == 0o600
        counts = folder / "metrics/counter_1.db"
        counts.write_bytes(b"1")
        with pytest.raises(ValueError, match=r"^folder .*: another service uses .*; "):
            prepare_folder(folder)
        assert counts.exists()
    # Of an earlier start, whose counts would be added.
    with prepare_folder(folder):
        assert not counts.exists()


def test_a_recording_that_waits_is_readable_by_its_owner_alone(tmp_path):
    jobs = Jobs(
        tmp_path,
        max_jobs=1,
        max_attempts=1,
        lease_seconds=30,
        retention_seconds=3600,
    )
    jobs.add(io.BytesIO(voice(1)), "call.wav", {})
    (recording,) = jobs.recordings.iterdir()
    assert recording.read_bytes() == voice(1)
    assert stat.S_IMODE(recording.stat().st_mode) == 0o600
    jobs.stop()


def test_a_model_that_cannot_be_read_is_one_line(tmp_path, monkeypatch, caplog):
    # The tests may be run by root, who can read every file.
    def load(*arguments: object, **options: object) -> None:
        path = "/model/embedder.safetensors"
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(speakerlab, "load", load)
    monkeypatch.setenv("SERVE_MODEL", "/model")
    monkeypatch.setenv("SERVE_FOLDER", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        from_environment()
    assert ended.value.code == 3
    [record] = caplog.records
    assert record.getMessage() == (
        "/model/embedder.safetensors: cannot be used (permission denied); check the disk,"
        " and the permissions of the user who runs the service"
    )


def test_an_address_that_cannot_be_used_names_host_and_port(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        settings = Settings(model="a", port=port)
        with pytest.raises(ValueError, match=f"SERVE_PORT.*127.0.0.1:{port} cannot be"):
            bind(settings)
    settings = Settings(model="a", host="203.0.113.1")
    with pytest.raises(ValueError, match="SERVE_HOST.*203.0.113.1:8000 cannot be used"):
        bind(settings)


def test_help_has_the_usage(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: python -m examples.service")
    assert "SERVE_MODEL" in text


def test_a_load_test_counts_refusals_apart_and_deletes_its_speakers(serve, monkeypatch):
    # Of voice 0, all are too long.
    rng = np.random.default_rng(0)
    recordings: list[tuple[int, bytes]] = []
    for number in range(2 * load_test.NUM_VOICES):
        speaker = number // 2
        seconds = 0.6 if speaker else 1.2
        recordings.append((speaker, load_test.make_wav(speaker, seconds, rng)))
    monkeypatch.setattr(load_test, "make_recordings", lambda: recordings)
    client = serve(max_seconds=1)
    assert enrol(client, "voice0", voice(1, seconds=0.6)).is_success
    enrolled: set[str] = set()

    async def handle(request: httpx2.Request) -> httpx2.Response:
        answer = await asyncio.to_thread(
            client.request,
            request.method,
            request.url.path,
            content=await request.aread(),
            headers=dict(request.headers),
        )
        if answer.status_code == 201:
            enrolled.add(answer.json()["name"])
        return httpx2.Response(answer.status_code, content=answer.content)

    load = Load("http://127.0.0.1", num_clients=4, seconds=0.5)
    http = partial(httpx2.AsyncClient, transport=httpx2.MockTransport(handle))
    monkeypatch.setattr(load_test.httpx2, "AsyncClient", http)
    asyncio.run(load.run())
    assert enrolled == {f"{load.prefix}voice{number}" for number in range(1, 20)}
    left = [row["name"] for row in client.get("/speakers").json()["speakers"]]
    assert left == ["voice0"]
    *_, row = load.rows()
    assert row["answered"] > 0
    num_refused = sum(load.errors.values())
    # The first enrolment was before the time that is reported.
    assert row["requests"] - row["answered"] in (num_refused, num_refused - 1)
    assert num_refused > 0
    assert all("413 " in error for error in load.errors)


def test_a_load_test_without_a_service_says_so(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    with pytest.raises(SystemExit) as ended:
        load_test.main(["--url", f"http://127.0.0.1:{port}", "--minutes", "0.1"])
    assert ended.value.code == 2
    assert "no service is ready" in capsys.readouterr().err


def test_the_example_uses_only_documented_parts_of_the_library():
    used: set[str] = set()
    for path in sorted((ROOT / "examples").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                used |= {f"{node.module}.{alias.name}" for alias in node.names}
    ours = {name for name in used if name.split(".")[0] == "speakerlab"}
    assert ours == {"speakerlab", "speakerlab.data.audio.stream"}
    guide = (ROOT / "docs/use.md").read_text(encoding="utf-8")
    assert "speakerlab.data.audio.stream" in guide
