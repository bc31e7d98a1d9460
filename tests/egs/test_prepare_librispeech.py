"""LibriSpeech: subsets, drawn trials, resumable downloads, and errors of broken corpora."""

import hashlib
import io
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import soundfile
from archive_bytes import tar_bytes
from refusals import refused, refuses

from egs.common.corpus import fetch
from speakerlab.data.tables import read_about


def flac_bytes():
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros(1600), 16000, format="FLAC")
    return buffer.getvalue()


def make_corpus(folder, utterances):
    for name in utterances:
        subset, stem = name.split("/")
        speaker, chapter, _ = stem.split("-")
        path = folder / subset / speaker / chapter / f"{stem}.flac"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(flac_bytes())
    return folder


SMALL = [
    "train-clean-100/19-198-0000",
    "train-clean-100/19-198-0001",
    "train-clean-100/26-495-0000",
    "test-clean/61-1-0000",
    "test-clean/61-1-0001",
    "test-clean/61-2-0000",
    "test-clean/84-7-0000",
    "test-clean/84-7-0001",
]


def test_lists_and_trials_of_a_small_corpus(prepare, tmp_path):
    corpus = make_corpus(tmp_path / "my corpus/LibriSpeech", SMALL)
    (corpus / "train-clean-100/19/198/19-198.trans.txt").write_text("19-198-0000 HELLO\n")
    noise = make_corpus(tmp_path / "noise", ["free sound/1-2-3"])
    data = tmp_path / "data"
    out = prepare("librispeech", corpus.parent, data, "--noise", noise).splitlines()
    assert (data / "train/wav.scp").read_text().splitlines() == [
        f"19-198-0000 {corpus}/train-clean-100/19/198/19-198-0000.flac",
        f"19-198-0001 {corpus}/train-clean-100/19/198/19-198-0001.flac",
        f"26-495-0000 {corpus}/train-clean-100/26/495/26-495-0000.flac",
    ]
    assert (data / "train/utt2spk").read_text().splitlines() == [
        "19-198-0000 19",
        "19-198-0001 19",
        "26-495-0000 26",
    ]
    trials = (data / "test/trials").read_text().splitlines()
    assert [line for line in trials if line.endswith(" target")] == [
        "61-1-0000 61-2-0000 target",  # 61 has two chapters: pairs across them only
        "61-1-0001 61-2-0000 target",
        "84-7-0000 84-7-0001 target",
    ]
    assert len([line for line in trials if line.endswith(" nontarget")]) == 3 * 2
    assert (data / "noise/wav.scp").read_text() == (
        f"free_sound/1/2/1-2-3.flac {noise}/free sound/1/2/1-2-3.flac\n"
    )
    assert not (data / "rirs").exists()
    assert read_about(data / "train")["licence"] == "CC BY 4.0"
    assert out[0] == f"{data}/train: 2 speakers, 3 utterances"
    assert out[1] == f"{data}/test: 2 speakers, 5 utterances, trials 3 target + 6 nontarget"


def test_subsets_by_presence_and_by_name(recipe, tmp_path):
    libri = recipe("librispeech")
    names = ["train-a/1-1-1", "dev-clean/2-1-1", "dev-clean/3-1-1"]
    corpus = make_corpus(tmp_path / "corpus", names)
    assert libri.choose_subsets(corpus, train=None, test=None) == (["train-a"], ["dev-clean"])
    make_corpus(corpus, ["test-clean/4-1-1", "test-other/5-1-1", "test-other/6-1-1"])
    assert libri.choose_subsets(corpus, train=None, test=None) == (
        ["train-a"],
        ["test-clean", "test-other"],
    )
    libri.prepare(corpus, tmp_path / "data", test_subsets=["dev-clean", "test-other"])
    trials = {path.name: path.read_text() for path in (tmp_path / "data/test").glob("trials*")}
    assert trials == {
        "trials_dev-clean": "2-1-1 3-1-1 nontarget\n",
        "trials_test-other": "5-1-1 6-1-1 nontarget\n",
    }
    assert read_about(tmp_path / "data/train") == {}  # it may be another corpus


@pytest.mark.parametrize(
    ("extra", "value"),
    [("test-clean/19-9-0000", "speaker 19 "), ("test-other/84-7-0000", "84-7-0000")],
)
def test_a_duplicate_speaker_or_utterance_is_refused(prepare, tmp_path, extra, value):
    corpus = make_corpus(tmp_path / "corpus", [*SMALL, extra])
    assert refused(prepare("librispeech", corpus, tmp_path / "data", code=1), corpus, value)
    assert not (tmp_path / "data").exists()


def test_a_misplaced_file_and_a_missing_corpus(prepare, tmp_path):
    corpus = make_corpus(tmp_path / "corpus", SMALL)
    stray = corpus / "test-clean/84/7/85-7-0000.flac"
    stray.write_bytes(flac_bytes())
    error = prepare("librispeech", corpus, tmp_path / "data", code=1)
    assert refused(error, stray, "84-7-UTT.flac")
    gone = tmp_path / "gone"
    error = prepare("librispeech", gone, tmp_path / "data", code=1)
    assert refused(error, gone, "no train subset", "--train-subsets")


def test_the_corpus_itself_is_never_taken_for_a_data_directory(prepare, tmp_path):
    corpus = make_corpus(tmp_path / "corpus", SMALL)
    (corpus / "train").mkdir()
    (corpus / "train/audio.wav").write_bytes(b"precious")
    prepare("librispeech", corpus, corpus, "--train-subsets", "train-clean-100", code=1)
    assert (corpus / "train/audio.wav").read_bytes() == b"precious"


def test_many_trials_are_sampled_evenly_and_reproducibly(recipe):
    libri = recipe("librispeech")
    speakers = {f"{s}-{c}-{u:04d}": str(s) for s in range(12) for c in (1, 2) for u in range(20)}
    trials = libri.make_trials(speakers, seed=3)
    assert trials == libri.make_trials(speakers, seed=3) == sorted(set(trials))
    assert trials != libri.make_trials(speakers, seed=4)
    targets = [(a, b) for a, b, same in trials if same]
    assert Counter(speakers[a] for a, _ in targets) == {str(s): 200 for s in range(12)}
    assert all(a.split("-")[1] != b.split("-")[1] for a, b in targets)
    nontargets = Counter((speakers[a], speakers[b]) for a, b, same in trials if not same)
    assert len(nontargets) == 66 and sum(nontargets.values()) == 40_000
    assert set(nontargets.values()) == {606, 607}  # 40,000 / 66


@contextmanager
def served(files, *, cut=None, ranges=True):
    """Serve `files` over HTTP; the first reply ends after `cut` bytes."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):  # noqa: N802
            body = files[self.path.rsplit("/", 1)[1]]
            wanted = self.headers.get("Range") if ranges else None
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
            seen.append((self.path, start))
            if wanted and start >= len(body):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(body)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206 if wanted else 200)
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            end = cut if cut is not None and len(seen) == 1 else len(body)
            self.wfile.write(body[start:end])

        def log_message(self, format, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("ranges", [True, False])
def test_an_interrupted_download_continues(recipe, tmp_path, monkeypatch, ranges):
    libri = recipe("librispeech")
    audio = np.random.default_rng(0).bytes(20_000)
    body = tar_bytes({"LibriSpeech/test-clean/61/1/61-1-0000.flac": audio})
    monkeypatch.setitem(libri.CHECKSUMS, "test-clean", hashlib.sha256(body).hexdigest())
    corpus = tmp_path / "corpus"
    with served({"test-clean.tar.gz": body}, cut=7_000, ranges=ranges) as (url, seen):
        with refuses(f"{url}/test-clean.tar.gz", f"7000 of {len(body)}"):
            libri.download_corpus(corpus, subsets=["test-clean"], url=url)
        assert (corpus / "test-clean.tar.gz.part").stat().st_size == 7_000
        libri.download_corpus(corpus, subsets=["test-clean"], url=url)
        assert [start for _, start in seen] == [0, 7_000 if ranges else 0]
        libri.download_corpus(corpus, subsets=["test-clean"], url=url)
        assert len(seen) == 2  # not downloaded again
    assert (corpus / "LibriSpeech/test-clean/61/1/61-1-0000.flac").read_bytes() == audio
    left = sorted(path.name for path in corpus.iterdir())
    assert left == ["LibriSpeech", "test-clean.tar.gz"]


def test_a_complete_download_is_renamed(tmp_path):
    (tmp_path / "a.tar.part").write_bytes(b"12345")
    with served({"a.tar": b"12345"}) as (url, _):
        fetch.download(f"{url}/a.tar", tmp_path / "a.tar")
    assert (tmp_path / "a.tar").read_bytes() == b"12345"


def test_a_wrong_checksum_is_refused_and_removed(recipe, tmp_path):
    libri = recipe("librispeech")
    files = {"test-clean.tar.gz": b"not the archive"}
    got = hashlib.sha256(b"not the archive").hexdigest()
    with served(files) as (url, _), refuses(f"{url}/test-clean.tar.gz", "wrong sha256", got):
        libri.download_corpus(tmp_path, subsets=["test-clean"], url=url)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_subset_name(recipe, tmp_path, capsys):
    args = ["--download", "--corpus", str(tmp_path), "--subsets", "train-clean-10"]
    assert recipe("librispeech").main(args) == 1
    assert refused(capsys.readouterr().err, "--subsets", "train-clean-10;")
