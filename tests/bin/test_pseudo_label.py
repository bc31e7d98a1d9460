"""Pseudo-labels: a new data directory that training accepts, the input unchanged, and refusals."""

import shutil
from collections import Counter

import numpy as np
import pytest
from refusals import refuses
from tiny import rows, weights

from speakerlab.bin import pseudo_label
from speakerlab.data import tables
from speakerlab.data.check import check_data_dirs
from speakerlab.data.manifest import read_manifest
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.kmeans import agreement, kmeans
from speakerlab.scoring.pair_scores import unit_rows

NUM_CLUSTERS = 6


def arguments_for(exp, data, out, *options: str) -> list[str]:
    """Return the command that keeps clusters of any size."""
    places = ["--model", str(exp), "--data", str(data), "--out", str(out)]
    sizes = ["--speakers", str(NUM_CLUSTERS), "--min-utterances", "1"]
    return [*places, *sizes, *options]


def contents(folder) -> dict[str, bytes]:
    files = [path for path in folder.iterdir() if path.is_file()]
    return {path.name: path.read_bytes() for path in files}


def cluster_of(speaker: str) -> int:
    """Return the number of a cluster, the last five digits of its name."""
    return int(speaker[-5:])


def test_clusters_become_speakers(make_exp, data, tmp_path, capsys):
    exp = make_exp("exp")
    train = data / "train"
    out = tmp_path / "pseudo"
    before = contents(train)
    pseudo_label.main(arguments_for(exp, train, out))
    assert contents(train) == before

    # Each cluster is a speaker.
    table = EmbeddingTable.load(exp / "embeddings/train/trained")
    emb_ND = unit_rows(table.emb_ND, table.ids)
    cluster_N = kmeans(emb_ND, NUM_CLUSTERS, num_threads=1)
    speakers = tables.read_table(out / "utt2spk")
    clusters = [cluster_of(speakers[utterance]) for utterance in table.ids]
    assert clusters == cluster_N.tolist()
    speaker_of = {}
    for speaker, utterances in tables.read_table(out / "spk2utt").items():
        speaker_of |= dict.fromkeys(utterances.split(), speaker)
    assert speaker_of == speakers

    # All other tables are kept.
    for name in ("wav.scp", "utt2dur"):
        expected = tables.read_table(train / name)
        assert tables.read_table(out / name) == expected
    labelled = read_manifest([out], sample_rate=16000)
    given = read_manifest([train], sample_rate=16000)
    expected = list(given.ids)
    assert list(labelled.ids) == expected
    np.testing.assert_array_equal(labelled.num_samples_N, given.num_samples_N)
    check_data_dirs([out])

    purity, shared = agreement(cluster_N, given.speaker_N)
    shown = capsys.readouterr().out
    assert f"purity {purity:.4f}" in shown
    assert f"information {shared:.4f}" in shown
    sizes = Counter(speakers.values())
    num_dropped = NUM_CLUSTERS - len(sizes)
    summary = f"{len(sizes)} clusters, 24 utterances; dropped: {num_dropped} clusters"
    assert summary in shown
    assert f"sizes: {min(sizes.values())} to {max(sizes.values())}" in shown


def test_small_clusters_are_dropped_with_their_recordings(
    make_exp, data, tmp_path, capsys
):
    """Utterances are segments here, and have no labels."""
    source = tmp_path / "source"
    out = tmp_path / "kept"
    wavs = tables.read_table(data / "train/wav.scp")
    segments = {}
    for name in wavs:
        segments[f"{name}-0"] = (name, 0.0, 0.7)
        segments[f"{name}-1"] = (name, 0.7, 0.7 + 0.7)
    tables.write_data_dir(source, wavs=wavs, segments=segments)
    check_data_dirs([source])
    exp = make_exp("exp")
    pseudo_label.main(arguments_for(exp, source, tmp_path / "all"))
    count = Counter(tables.read_table(tmp_path / "all/utt2spk").values())

    # The smallest cluster is too small.
    least = min(count.values()) + 1
    capsys.readouterr()
    arguments = arguments_for(exp, source, out)
    pseudo_label.main([*arguments, "--min-utterances", str(least)])

    large_clusters = set()
    for name, size in count.items():
        if size >= least:
            large_clusters.add(cluster_of(name))
    speakers = tables.read_table(out / "utt2spk")
    assert {cluster_of(name) for name in speakers.values()} == large_clusters
    left = tables.read_segments(out / "segments")
    assert left.keys() == speakers.keys()
    for utterance, segment in left.items():
        assert segment == segments[utterance]
    recordings = {recording for recording, *_ in left.values()}
    assert set(tables.read_table(out / "wav.scp")) == recordings

    shown = capsys.readouterr().out
    num_clusters = len(large_clusters)
    num_dropped = len(segments) - len(left)
    assert f"{num_clusters} clusters, {len(left)} utterances; " in shown
    assert f"dropped: {NUM_CLUSTERS - num_clusters} " in shown
    assert f"fewer than {least} utterances, {num_dropped} utterances" in shown
    assert "purity" not in shown


def test_names_of_other_clusters_differ(make_exp, data, tmp_path):
    """A head that was trained on clusters must not be kept for those of another seed or model."""
    exp = make_exp("exp")
    names = list[set[str]]()
    for number, options in enumerate(([], ["--min-utterances", "2"], ["--seed", "1"])):
        out = tmp_path / f"pseudo{number}"
        pseudo_label.main(arguments_for(exp, data / "train", out, *options))
        speakers = tables.read_table(out / "utt2spk")
        names.append(set(speakers.values()))
    of_any_size, of_two_or_more, of_another_seed = names
    assert of_two_or_more <= of_any_size
    assert not of_another_seed & of_any_size


def test_training_runs_on_the_result(trained, data, train, tmp_path):
    exp = tmp_path / "exp"
    out = tmp_path / "pseudo"
    tuned = tmp_path / "tuned"
    shutil.copytree(trained, exp)
    pseudo_label.main(arguments_for(exp, data / "train", out))
    settings = [
        f"data.train=[{out}]",
        "data.valid_speakers=0",
        "augment.speed_classes=off",
    ]
    train(tuned, *settings, "--init", exp)
    classes = (tuned / "model/speakers.txt").read_text().split()
    speakers = tables.read_table(out / "utt2spk")
    expected = sorted(set(speakers.values()))
    assert classes == expected
    for row in rows(tuned, "train"):
        assert np.isfinite(row["loss"])
    assert weights(tuned) != weights(exp)


def test_an_interrupted_write_leaves_nothing(make_exp, data, tmp_path, monkeypatch):
    exp = make_exp("exp")
    out = tmp_path / "pseudo"

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    arguments = arguments_for(exp, data / "train", out)
    with monkeypatch.context() as patch:
        # The last file of a directory.
        patch.setattr(tables, "write_rejected", full)
        with pytest.raises(OSError, match="No space"):
            pseudo_label.main(arguments)
    assert not out.exists()
    pseudo_label.main(arguments)
    assert len(tables.read_table(out / "utt2spk")) == 24


def test_refusals_come_before_the_extraction(make_exp, data, tmp_path):
    exp = make_exp("exp")
    train = data / "train"
    out = tmp_path / "out"
    with refuses("--out", train, "already exists"):
        pseudo_label.main(arguments_for(exp, train, train))
    arguments = arguments_for(exp, train, out)
    with refuses("--speakers", 6, 24, "enough for 2 of 10"):
        pseudo_label.main([*arguments, "--min-utterances", "10"])
    with refuses("--speakers", 25, 24):
        pseudo_label.main([*arguments, "--speakers", "25"])
    assert not (exp / "embeddings").exists()
    assert not out.exists()


def test_one_large_cluster_is_refused(make_exp, data, tmp_path):
    """All recordings are the same, so that five clusters are empty."""
    wav = tables.read_table(data / "train/wav.scp")["spk0-0"]
    same = tmp_path / "same"
    out = tmp_path / "out"
    tables.write_data_dir(same, wavs={f"u{number}": wav for number in range(12)})
    check_data_dirs([same])
    with refuses("--min-utterances", "1 of 6"):
        pseudo_label.main(arguments_for(make_exp("exp"), same, out))
    assert not out.exists()
