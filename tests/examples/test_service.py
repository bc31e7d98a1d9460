"""examples/service in this process: every endpoint, limits, and uploads that mean harm."""

import ast
import io
import json
import os
import sqlite3
import tempfile
import threading
import time
import unicodedata
import wave as wave_files
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models_on_disk import CALIBRATION
from voices import make_wave

pytest.importorskip("fastapi", reason="needs the extra `serve`")

from fastapi.testclient import TestClient
from service_clients import (
    encode,
    publish_tiny,
    silent_flac,
    voice,
    wav_of_10_gb,
)

import speakerlab
from examples.service import recordings as uploads
from examples.service.app import create_app
from examples.service.database import BUSY_SECONDS
from examples.service.enrolments import Enrolments
from examples.service.jobs import Jobs
from examples.service.limits import MAX_CLIENTS, TokenBuckets, client_of
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
    # A wide letter looks like another one.
    assert enrol(client, "ｂob", voice(3)).is_success
    assert enrol(client, "bob", voice(3)).status_code == 422


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


def test_a_full_service_refuses_at_once(serve, model, monkeypatch):
    is_inside = threading.Event()
    may_end = threading.Event()
    embed = model.embed

    def blocked(audio: Any) -> np.ndarray:
        is_inside.set()
        assert may_end.wait(20)
        return embed(audio)

    monkeypatch.setattr(model, "embed", blocked)
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
    second.join()
    assert codes == [503]
    may_end.set()
    first.join()
    assert codes == [503, 200]
    assert post(client, "/embed", voice(1)).status_code == 200


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
    with open_enrolments(tmp_path / "data", "b" * 64)._connection as connection:
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
        ({"SERVE_MODEL": "a", "SERVE_PROT": "1"}, "prot (SERVE_PROT): extra inputs"),
        ({"SERVE_MODEL": "a", "SERVE_PORT": "99999"}, "got '99999'"),
        ({"SERVE_MODEL": "a", "SERVE_MAX_SECONDS": "nan"}, "max_seconds"),
        ({"SERVE_CONFIG": "missing.yaml"}, "missing.yaml: cannot be read"),
    ],
)
def test_a_wrong_setting_is_one_line(variables, line):
    with pytest.raises(ValueError) as refusal:
        read_settings(variables)
    assert line in str(refusal.value)
    assert "\n" not in str(refusal.value)


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
