"""LibriSpeech: subsets, drawn trials, resumable downloads, and errors of broken corpora."""

import hashlib
import io
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product

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


def lines_of(path):
    return path.read_text().splitlines()


def test_lists_and_trials_of_a_small_corpus(prepare, tmp_path):
    corpus = make_corpus(tmp_path / "my corpus/LibriSpeech", SMALL)
    train = corpus / "train-clean-100"
    (train / "19/198/19-198.trans.txt").write_text("19-198-0000 HELLO\n")
    noise = make_corpus(tmp_path / "noise", ["free sound/1-2-3"])
    data = tmp_path / "data"
    output = prepare("librispeech", corpus.parent, data, "--noise", noise)

    assert lines_of(data / "train/wav.scp") == [
        f"19-198-0000 {train}/19/198/19-198-0000.flac",
        f"19-198-0001 {train}/19/198/19-198-0001.flac",
        f"26-495-0000 {train}/26/495/26-495-0000.flac",
    ]
    assert lines_of(data / "train/utt2spk") == [
        "19-198-0000 19",
        "19-198-0001 19",
        "26-495-0000 26",
    ]
    assert read_about(data / "train")["licence"] == "CC BY 4.0"

    trials = lines_of(data / "test/trials")
    # Speaker 61 has two chapters: only pairs across them are target trials.
    assert [line for line in trials if line.endswith(" target")] == [
        "61-1-0000 61-2-0000 target",
        "61-1-0001 61-2-0000 target",
        "84-7-0000 84-7-0001 target",
    ]
    nontargets = [line for line in trials if line.endswith(" nontarget")]
    assert len(nontargets) == 3 * 2

    assert lines_of(data / "noise/wav.scp") == [
        f"free_sound/1/2/1-2-3.flac {noise}/free sound/1/2/1-2-3.flac"
    ]
    assert not (data / "rirs").exists()

    train_summary, test_summary, *_ = output.splitlines()
    counts = "2 speakers, 5 utterances, trials 3 target + 6 nontarget"
    assert train_summary == f"{data}/train: 2 speakers, 3 utterances"
    assert test_summary == f"{data}/test: {counts}"


def test_subsets_by_presence_and_by_name(recipe, tmp_path):
    libri = recipe("librispeech")
    data = tmp_path / "data"
    names = ["train-a/1-1-1", "dev-clean/2-1-1", "dev-clean/3-1-1"]
    corpus = make_corpus(tmp_path / "corpus", names)
    train, test = libri.choose_subsets(corpus, train=None, test=None)
    assert train == ["train-a"]
    assert test == ["dev-clean"]

    # With test subsets, the development subset is not a test set.
    make_corpus(corpus, ["test-clean/4-1-1", "test-other/5-1-1", "test-other/6-1-1"])
    train, test = libri.choose_subsets(corpus, train=None, test=None)
    assert train == ["train-a"]
    assert test == ["test-clean", "test-other"]

    libri.prepare(corpus, data, test_subsets=["dev-clean", "test-other"])
    paths = (data / "test").glob("trials*")
    trials = {path.name: path.read_text() for path in paths}
    assert trials == {
        "trials_dev-clean": "2-1-1 3-1-1 nontarget\n",
        "trials_test-other": "5-1-1 6-1-1 nontarget\n",
    }
    # Nothing is stated about train-a: it may be another corpus.
    assert read_about(data / "train") == {}


@pytest.mark.parametrize(
    ("extra", "value"),
    [("test-clean/19-9-0000", "speaker 19 "), ("test-other/84-7-0000", "84-7-0000")],
)
def test_a_duplicate_speaker_or_utterance_is_refused(prepare, tmp_path, extra, value):
    corpus = make_corpus(tmp_path / "corpus", [*SMALL, extra])
    data = tmp_path / "data"
    error = prepare("librispeech", corpus, data, code=1)
    assert refused(error, corpus, value)
    assert not list(data.glob("*/wav.scp"))


def test_a_misplaced_file_and_a_missing_corpus(prepare, tmp_path):
    corpus = make_corpus(tmp_path / "corpus", SMALL)
    stray = corpus / "test-clean/84/7/85-7-0000.flac"
    stray.write_bytes(flac_bytes())
    error = prepare("librispeech", corpus, tmp_path / "data", code=1)
    assert refused(error, stray, "84-7-UTT.flac")
    gone = tmp_path / "gone"
    error = prepare("librispeech", gone, tmp_path / "data", code=1)
    assert refused(error, gone, "no such folder", "--corpus", "--download")
    gone.mkdir()
    error = prepare("librispeech", gone, tmp_path / "data", code=1)
    assert refused(error, gone, "no train subset", "--train-subsets")


def test_the_corpus_itself_is_never_taken_for_a_data_directory(prepare, tmp_path):
    corpus = make_corpus(tmp_path / "corpus", SMALL)
    recording = corpus / "train/audio.wav"
    recording.parent.mkdir()
    recording.write_bytes(b"precious")
    options = ("--train-subsets", "train-clean-100")
    prepare("librispeech", corpus, corpus, *options, code=1)
    assert recording.read_bytes() == b"precious"


def test_many_trials_are_sampled_evenly_and_reproducibly(recipe):
    libri = recipe("librispeech")
    speakers = {}
    for speaker, chapter, number in product(range(12), (1, 2), range(20)):
        speakers[f"{speaker}-{chapter}-{number:04d}"] = str(speaker)
    trials = libri.make_trials(speakers, seed=3)
    assert trials == libri.make_trials(speakers, seed=3)
    assert trials == sorted(set(trials))
    assert trials != libri.make_trials(speakers, seed=4)

    num_targets = Counter()
    num_nontargets = Counter()
    for enrol, test, is_target in trials:
        pair = (speakers[enrol], speakers[test])
        if not is_target:
            num_nontargets[pair] += 1
            continue
        num_targets[speakers[enrol]] += 1
        # Both sides of a target trial are of different chapters.
        _, enrol_chapter, _ = enrol.split("-")
        _, test_chapter, _ = test.split("-")
        assert enrol_chapter != test_chapter
    assert num_targets == {str(speaker): 200 for speaker in range(12)}
    assert len(num_nontargets) == 66
    assert sum(num_nontargets.values()) == 40_000
    # 40,000 / 66 = 606.06
    assert set(num_nontargets.values()) == {606, 607}


@contextmanager
def served(files, *, cut=None, ranges=True):
    """Serve `files` over HTTP; the first reply ends after `cut` bytes."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):  # noqa: N802
            name = self.path.rsplit("/", 1)[1]
            body = files[name]
            header = self.headers.get("Range")
            is_partial = ranges and header is not None
            start = 0
            if is_partial:
                start = int(header.removeprefix("bytes=").rstrip("-"))
            requests.append((self.path, start))
            if is_partial and start >= len(body):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(body)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206 if is_partial else 200)
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            is_first = len(requests) == 1
            end = cut if cut is not None and is_first else len(body)
            self.wfile.write(body[start:end])

        def log_message(self, format, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    # The server looks for a shutdown every 10 ms instead of 500 ms.
    options = {"poll_interval": 0.01}
    thread = threading.Thread(target=server.serve_forever, kwargs=options)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("ranges", [True, False])
def test_an_interrupted_download_continues(recipe, tmp_path, monkeypatch, ranges):
    libri = recipe("librispeech")
    name = "LibriSpeech/test-clean/61/1/61-1-0000.flac"
    audio = np.random.default_rng(0).bytes(20_000)
    body = tar_bytes({name: audio})
    digest = hashlib.sha256(body).hexdigest()
    monkeypatch.setitem(libri.CHECKSUMS, "test-clean", digest)
    corpus = tmp_path / "corpus"
    archive = "test-clean.tar.gz"
    with served({archive: body}, cut=7_000, ranges=ranges) as (url, requests):
        with refuses(f"{url}/{archive}", f"7000 of {len(body)}"):
            libri.download_corpus(corpus, subsets=["test-clean"], url=url)
        assert (corpus / f"{archive}.part").stat().st_size == 7_000

        # A server without ranges sends the whole archive again.
        libri.download_corpus(corpus, subsets=["test-clean"], url=url)
        starts = [start for _, start in requests]
        assert starts == [0, 7_000 if ranges else 0]

        # A complete archive is not downloaded again.
        libri.download_corpus(corpus, subsets=["test-clean"], url=url)
        assert len(requests) == 2
    assert (corpus / name).read_bytes() == audio
    left = sorted(path.name for path in corpus.iterdir())
    assert left == ["LibriSpeech", archive]


def test_a_complete_download_is_renamed(tmp_path):
    (tmp_path / "a.tar.part").write_bytes(b"12345")
    with served({"a.tar": b"12345"}) as (url, _):
        fetch.download(f"{url}/a.tar", tmp_path / "a.tar")
    assert (tmp_path / "a.tar").read_bytes() == b"12345"


def test_a_wrong_checksum_is_refused_and_removed(recipe, tmp_path):
    libri = recipe("librispeech")
    archive = "test-clean.tar.gz"
    body = b"not the archive"
    digest = hashlib.sha256(body).hexdigest()
    with (
        served({archive: body}) as (url, _),
        refuses(f"{url}/{archive}", "wrong sha256", digest),
    ):
        libri.download_corpus(tmp_path, subsets=["test-clean"], url=url)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_subset_name(recipe, tmp_path, capsys):
    args = ["--download", "--corpus", str(tmp_path), "--subsets", "train-clean-10"]
    assert recipe("librispeech").main(args) == 1
    assert refused(capsys.readouterr().err, "--subsets", "train-clean-10;")
