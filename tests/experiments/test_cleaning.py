"""Cleaning of a data directory: copies by their samples, what is dropped, what is written."""

import numpy as np
import pytest
from refusals import refuses
from voices import RATE, make_wave

from speakerlab.core import done
from speakerlab.data import audio, tables
from speakerlab.data.check import check_data_dirs
from speakerlab.data.manifest import read_manifest
from speakerlab.experiments.cleaning import (
    COLUMNS,
    DUPLICATE,
    FINDINGS,
    NOT_JUDGED,
    OTHER_SPEAKER,
    RECORD,
    SAME_PERSON,
    find_copies,
    look_through,
    write_cleaned,
)

DIM = 24
NUM_SPEAKERS = 12
NUM_UTTERANCES = 6


def copies_of(folder) -> list[list[str]]:
    manifest = read_manifest([folder], sample_rate=RATE)
    copies = find_copies(manifest, num_threads=2)
    return sorted([manifest.ids[row] for row in rows] for rows in copies)


class Corpus:
    """Utterances of Gaussian speakers whose labels a test changes: `s02-3` is of speaker 2."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.ids: list[str] = []
        self.speakers: list[str] = []
        self.copies: list[list[int]] = []
        rows = []
        for speaker in range(NUM_SPEAKERS):
            centre_D = rng.normal(size=DIM)
            for number in range(NUM_UTTERANCES):
                self.ids.append(f"s{speaker:02d}-{number}")
                self.speakers.append(f"s{speaker:02d}")
                rows.append(centre_D + 0.4 * rng.normal(size=DIM))
        self.emb_ND = np.array(rows, dtype=np.float32)

    def label(self, utterance: str, speaker: str) -> None:
        self.speakers[self.ids.index(utterance)] = speaker

    def copy(self, utterance: str, new: str, speaker: str) -> None:
        row = self.ids.index(utterance)
        self.ids.append(new)
        self.speakers.append(speaker)
        self.emb_ND = np.concatenate([self.emb_ND, self.emb_ND[[row]]])
        rows = sorted([row, len(self.ids) - 1], key=lambda row: self.ids[row])
        self.copies.append(rows)

    def look_through(self, **options):
        return look_through(
            self.ids,
            self.speakers,
            self.emb_ND,
            self.copies,
            far=0.01,
            **options,
        )


def found(cleaning, kind: str) -> list[tuple[str, str, str]]:
    rows = []
    for finding in cleaning.findings:
        if finding.kind == kind:
            rows.append((finding.id, finding.suggested, finding.action))
    return rows


def test_copies_have_the_same_samples(tmp_path):
    """In another format, under another speaker, or as a segment; one other sample is enough."""
    wave_S = make_wave(0, 0, 1.0)
    other_S = wave_S.copy()
    other_S[-1] += 1
    audio.write(tmp_path / "a.wav", wave_S, RATE)
    audio.write(tmp_path / "b.flac", wave_S, RATE)
    audio.write(tmp_path / "c.wav", other_S, RATE)
    audio.write(tmp_path / "d.wav", np.concatenate([other_S, wave_S]), RATE)
    wavs = {path.stem: path for path in tmp_path.iterdir()}
    segments = {
        "first": ("a", 0.0, 1.0),
        "flac": ("b", 0.0, 1.0),
        "other": ("c", 0.0, 1.0),
        "within": ("d", 1.0, 2.0),
        "whole": ("d", 0.0, 2.0),
    }
    speakers = dict.fromkeys(segments, "x") | {"flac": "y"}
    tables.write_data_dir(
        tmp_path / "data",
        wavs=wavs,
        speakers=speakers,
        segments=segments,
    )
    check_data_dirs([tmp_path / "data"])
    assert copies_of(tmp_path / "data") == [["first", "flac", "within"]]


def test_good_labels_give_no_findings():
    corpus = Corpus()
    cleaning = corpus.look_through()
    assert cleaning.findings == []
    assert cleaning.speakers == dict(zip(corpus.ids, corpus.speakers))


def test_an_utterance_of_another_speaker_is_dropped():
    corpus = Corpus()
    corpus.label("s02-3", "s07")
    cleaning = corpus.look_through()
    assert found(cleaning, OTHER_SPEAKER) == [("s02-3", "s02", "drop")]
    assert cleaning.speakers.keys() == set(corpus.ids) - {"s02-3"}
    (finding,) = cleaning.findings
    assert finding.speaker == "s07"
    assert finding.score < finding.threshold


def test_no_speaker_is_suggested_for_a_stranger():
    corpus = Corpus()
    corpus.emb_ND[8] = np.random.default_rng(5).normal(size=DIM)
    cleaning = corpus.look_through()
    assert found(cleaning, OTHER_SPEAKER) == [(corpus.ids[8], "", "drop")]


def test_of_copies_of_one_speaker_the_first_is_kept():
    corpus = Corpus()
    corpus.copy("s01-0", "a-copy", "s01")
    corpus.copy("s05-2", "z-copy", "s05")
    cleaning = corpus.look_through()
    expected = [("s01-0", "s01", "drop"), ("z-copy", "s05", "drop")]
    assert found(cleaning, DUPLICATE) == expected
    assert len(cleaning.findings) == 2
    assert cleaning.findings[0].match == "a-copy"


@pytest.mark.parametrize("new", ["a-copy", "z-copy"])
def test_of_copies_of_two_speakers_the_right_label_is_kept(new):
    corpus = Corpus()
    corpus.copy("s04-1", new, "s09")
    cleaning = corpus.look_through()
    assert found(cleaning, DUPLICATE) == [(new, "s04", "drop")]
    assert len(cleaning.findings) == 1
    assert cleaning.speakers["s04-1"] == "s04"


def test_copies_are_not_proof_of_each_other():
    """Nine utterances of another person would outvote six good ones."""
    corpus = Corpus()
    corpus.label("s02-3", "s07")
    for number in range(8):
        corpus.copy("s02-3", f"z-{number}", "s07")
    same = [row for rows in corpus.copies for row in rows]
    corpus.copies = [sorted(set(same), key=lambda row: corpus.ids[row])]
    cleaning = corpus.look_through()
    assert found(cleaning, OTHER_SPEAKER) == [("s02-3", "s02", "drop")]
    assert len(found(cleaning, DUPLICATE)) == 8


def test_split_speakers_are_listed_or_joined():
    corpus = Corpus()
    for number in range(3):
        corpus.label(f"s06-{number}", "a06")
    listed = corpus.look_through()
    assert found(listed, SAME_PERSON) == [("s06", "a06", "list")]
    assert listed.speakers == dict(zip(corpus.ids, corpus.speakers))

    joined = corpus.look_through(joins_speakers=True)
    assert found(joined, SAME_PERSON) == [("s06", "a06", "join")]
    for number in range(NUM_UTTERANCES):
        assert joined.speakers[f"s06-{number}"] == "a06"


def test_a_single_utterance_is_not_judged():
    corpus = Corpus()
    corpus.label("s02-3", "alone")
    cleaning = corpus.look_through()
    assert found(cleaning, NOT_JUDGED) == [("s02-3", "", "keep")]
    assert cleaning.speakers["s02-3"] == "alone"


def test_too_few_speakers_of_several_utterances_are_refused():
    corpus = Corpus()
    corpus.speakers = [f"alone{row}" for row in range(len(corpus.ids))]
    corpus.speakers[:2] = ["x", "x"]
    with refuses("utt2spk", 1, 71):
        corpus.look_through()


def test_the_written_directory_has_the_remaining_utterances(tmp_path, make_data_dir):
    """Utterances are segments here. One is dropped, and two speakers are joined."""
    recordings = make_data_dir("recordings", speakers=range(NUM_SPEAKERS))
    wavs = tables.read_table(recordings / "wav.scp")
    corpus = Corpus()
    for number in range(3):
        corpus.label(f"s06-{number}", "a06")
    corpus.label("s02-3", "s07")
    speakers = dict(zip(corpus.ids, corpus.speakers))
    segments = {}
    for utterance in corpus.ids:
        # Only the dropped utterance is of recording spk11-2.
        recording = f"spk{int(utterance[1:3]) % 11}-0"
        if utterance == "s02-3":
            recording = "spk11-2"
        start = 0.1 * int(utterance[-1])
        segments[utterance] = (recording, start, start + 0.3)
    used = {recording for recording, _, _ in segments.values()}
    source = tmp_path / "source"
    tables.write_data_dir(
        source,
        wavs={name: wavs[name] for name in used},
        speakers=speakers,
        segments=segments,
        columns={
            "utt2device": dict.fromkeys(corpus.ids, "phone"),
            "spk2sex": {"a06": "f", "s06": "m", "s07": "m"},
        },
        about={"corpus": "voices"},
    )
    check_data_dirs([source])
    before = {path.name: path.read_bytes() for path in source.iterdir()}

    out = tmp_path / "out"
    cleaning = corpus.look_through(joins_speakers=True)
    write_cleaned(source, out, cleaning, {"far": 0.01})
    assert before == {path.name: path.read_bytes() for path in source.iterdir()}
    assert done.is_done(out / RECORD, {"far": 0.01})

    remaining = set(corpus.ids) - {"s02-3"}
    expected = {utterance: speakers[utterance] for utterance in remaining}
    for number in range(NUM_UTTERANCES):
        expected[f"s06-{number}"] = "a06"
    assert tables.read_table(out / "utt2spk") == expected
    assert tables.read_segments(out / "segments").keys() == remaining
    assert tables.read_durations(out).keys() == remaining
    assert tables.read_table(out / "utt2device").keys() == remaining
    assert tables.read_table(out / "spk2sex") == {"a06": "f", "s07": "m"}
    assert tables.read_about(out) == {"corpus": "voices"}
    assert tables.read_table(out / "wav.scp").keys() == used - {"spk11-2"}

    header, *rows = (out / FINDINGS).read_text().splitlines()
    assert header.split("\t") == COLUMNS.split()
    fields = [row.split("\t") for row in rows]
    assert [row[:5] for row in fields] == [
        ["s02-3", OTHER_SPEAKER, "s07", "s02", "-"],
        ["s06", SAME_PERSON, "s06", "a06", "a06"],
    ]
    for row in fields:
        assert float(row[5]) != float(row[6])
    check_data_dirs([out])
    assert len(read_manifest([out], sample_rate=RATE)) == len(remaining)
