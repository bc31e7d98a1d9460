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


def words(exp, data, out, *more: str) -> list[str]:
    """Return the command that keeps clusters of any size."""
    where = ["--model", str(exp), "--data", str(data), "--out", str(out)]
    return [*where, "--speakers", str(NUM_CLUSTERS), "--min-utterances", "1", *more]


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_clusters_become_speakers(make_exp, data, tmp_path, capsys):
    exp, train, out = make_exp("exp"), data / "train", tmp_path / "pseudo"
    before = contents(train)
    pseudo_label.main(words(exp, train, out))
    assert contents(train) == before
    table = EmbeddingTable.load(exp / "embeddings/train/trained")
    cluster_N = kmeans(unit_rows(table.emb_ND, table.ids), NUM_CLUSTERS, num_threads=1)
    speakers = tables.read_table(out / "utt2spk")
    assert [int(speakers[u][-5:]) for u in table.ids] == cluster_N.tolist()
    lists = tables.read_table(out / "spk2utt")
    assert {u: s for s, ids in lists.items() for u in ids.split()} == speakers
    for name in ("wav.scp", "utt2dur"):
        assert tables.read_table(out / name) == tables.read_table(train / name)
    made, given = (read_manifest([folder], sample_rate=16000) for folder in (out, train))
    assert list(made.ids) == list(given.ids)
    np.testing.assert_array_equal(made.num_samples_N, given.num_samples_N)
    check_data_dirs([out])
    purity, shared = agreement(cluster_N, given.speaker_N)
    shown = capsys.readouterr().out
    assert f"purity {purity:.4f}" in shown and f"information {shared:.4f}" in shown
    count = Counter(speakers.values())
    assert f"{len(count)} clusters, 24 utterances; dropped: {6 - len(count)} clusters" in shown
    assert f"sizes: {min(count.values())} to {max(count.values())}" in shown


def test_small_clusters_are_dropped_with_their_recordings(make_exp, data, tmp_path, capsys):
    """Utterances are segments here, and have no labels."""
    source, out = tmp_path / "source", tmp_path / "kept"
    wavs = tables.read_table(data / "train/wav.scp")
    segments = {f"{name}-{i}": (name, 0.7 * i, 0.7 * i + 0.7) for name in wavs for i in (0, 1)}
    tables.write_data_dir(source, wavs=wavs, segments=segments)
    check_data_dirs([source])
    pseudo_label.main(words(make_exp("exp"), source, tmp_path / "all"))
    count = Counter(tables.read_table(tmp_path / "all/utt2spk").values())
    least = min(count.values()) + 1
    capsys.readouterr()
    pseudo_label.main([*words(tmp_path / "exp", source, out), "--min-utterances", str(least)])
    kept = {int(name[-5:]) for name, size in count.items() if size >= least}
    speakers = tables.read_table(out / "utt2spk")
    assert {int(name[-5:]) for name in speakers.values()} == kept
    left = tables.read_segments(out / "segments")
    assert left.keys() == speakers.keys() and all(left[u] == segments[u] for u in left)
    assert set(tables.read_table(out / "wav.scp")) == {row[0] for row in left.values()}
    shown = capsys.readouterr().out
    assert f"{len(kept)} clusters, {len(left)} utterances; dropped: {6 - len(kept)} " in shown
    assert f"fewer than {least} utterances, {48 - len(left)} utterances" in shown
    assert "purity" not in shown


def test_names_of_other_clusters_differ(make_exp, data, tmp_path):
    """A head that was trained on clusters must not be kept for those of another seed or model."""
    exp, found = make_exp("exp"), list[set[str]]()
    for i, more in enumerate(([], ["--min-utterances", "2"], ["--seed", "1"])):
        out = tmp_path / f"pseudo{i}"
        pseudo_label.main(words(exp, data / "train", out, *more))
        found.append(set(tables.read_table(out / "utt2spk").values()))
    assert found[1] <= found[0] and not found[2] & found[0]


def test_training_runs_on_the_result(trained, data, train, tmp_path):
    exp, out, tuned = tmp_path / "exp", tmp_path / "pseudo", tmp_path / "tuned"
    shutil.copytree(trained, exp)
    pseudo_label.main(words(exp, data / "train", out))
    settings = [f"data.train=[{out}]", "data.valid_speakers=0", "augment.speed_classes=off"]
    train(tuned, *settings, "--init", exp)
    classes = (tuned / "model/speakers.txt").read_text().split()
    assert classes == sorted(set(tables.read_table(out / "utt2spk").values()))
    assert all(np.isfinite(row["loss"]) for row in rows(tuned, "train"))
    assert weights(tuned) != weights(exp)


def test_an_interrupted_write_leaves_nothing(make_exp, data, tmp_path, monkeypatch):
    exp, out = make_exp("exp"), tmp_path / "pseudo"

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tables, "write_rejected", full)  # the last file of a directory
        with pytest.raises(OSError, match="No space"):
            pseudo_label.main(words(exp, data / "train", out))
    assert not out.exists()
    pseudo_label.main(words(exp, data / "train", out))
    assert len(tables.read_table(out / "utt2spk")) == 24


def test_refusals_come_before_the_extraction(make_exp, data, tmp_path):
    exp, train = make_exp("exp"), data / "train"
    with refuses("--out", train, "already exists"):
        pseudo_label.main(words(exp, train, train))
    with refuses("--speakers", 6, 24, "enough for 2 of 10"):
        pseudo_label.main([*words(exp, train, tmp_path / "out"), "--min-utterances", "10"])
    with refuses("--speakers", 25, 24):
        pseudo_label.main([*words(exp, train, tmp_path / "out"), "--speakers", "25"])
    assert not (exp / "embeddings").exists() and not (tmp_path / "out").exists()


def test_one_large_cluster_is_refused(make_exp, data, tmp_path):
    """All recordings are the same, so that five clusters are empty."""
    wav = tables.read_table(data / "train/wav.scp")["spk0-0"]
    tables.write_data_dir(tmp_path / "same", wavs={f"u{i}": wav for i in range(12)})
    check_data_dirs([tmp_path / "same"])
    with refuses("--min-utterances", "1 of 6"):
        pseudo_label.main(words(make_exp("exp"), tmp_path / "same", tmp_path / "out"))
    assert not (tmp_path / "out").exists()
