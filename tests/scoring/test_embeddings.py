"""Tables of embeddings: to disk and back, rows by id, and what is refused."""

import json

import numpy as np
import pytest
from refusals import refuses

from speakerlab.scoring.embeddings import EmbeddingTable

HASH = "ab" * 32


def table(ids, **facts):
    values = np.arange(1, 1 + len(ids) * 3, dtype=np.float32)
    emb_ND = values.reshape(-1, 3)
    return EmbeddingTable(list(ids), emb_ND, HASH, facts)


def test_a_table_comes_back_from_disk(tmp_path):
    # the dot is part of the name
    stem = tmp_path / "embeddings" / "test.v1"
    saved = table(["a", "b"], precision="fp32")
    saved.save(stem)
    back = EmbeddingTable.load(stem)
    assert back.ids == ["a", "b"]
    assert back.emb_ND.dtype == np.float32
    expected_ND = [[1, 2, 3], [4, 5, 6]]
    np.testing.assert_array_equal(back.emb_ND, expected_ND)
    assert back.model_sha256 == HASH
    assert back.facts == {"precision": "fp32"}
    files = sorted(path.name for path in stem.parent.iterdir())
    assert files == ["test.v1.ids", "test.v1.json", "test.v1.npy"]

    text = (stem.parent / "test.v1.json").read_text()
    assert json.loads(text) == {
        "precision": "fp32",
        "model_sha256": HASH,
        "num": 2,
        "dim": 3,
    }


def test_an_old_description_does_not_vouch_for_new_files(tmp_path):
    stem = tmp_path / "part"
    table(["a", "b"]).save(stem)
    ids = tmp_path / "part.ids"
    ids.unlink()
    # writing the ids fails
    ids.mkdir()
    with pytest.raises(OSError):
        table(["c", "d"]).save(stem)
    with refuses(f"{stem}.json", error=FileNotFoundError):
        EmbeddingTable.load(stem)


def test_files_that_disagree_are_refused(tmp_path):
    stem = tmp_path / "part"
    table(["a", "b"]).save(stem)
    (tmp_path / "part.ids").write_text("a\n")
    with refuses(f"{stem}.json", "1 ids"):
        EmbeddingTable.load(stem)

    (tmp_path / "part.json").write_text('{"num": 2}')
    with refuses(f"{stem}.json", "model_sha256"):
        EmbeddingTable.load(stem)


def test_rows_are_selected_in_the_wanted_order():
    whole = table(["a", "c", "b"], batch=4)
    selected = whole.select(["c", "b", "a"])
    assert selected.ids == ["c", "b", "a"]
    assert selected.facts == {"batch": 4}
    first_N = selected.emb_ND[:, 0]
    np.testing.assert_array_equal(first_N, [4, 7, 1])


def test_an_id_may_occur_once():
    with refuses("embeddings", "b occurs 2 times"):
        table(["a", "b", "b"])


def test_missing_embeddings_are_named_five_at_most():
    two = table(["a", "b"])
    with refuses("test", "7 of 9") as error:
        two.select(["a", "b", *"cdefghi"], where="test")
    lines = str(error.value).splitlines()
    # each line ends its problem, before the semicolon, with the id
    problems = [line.partition(";")[0] for line in lines[:5]]
    ids = [problem[-1] for problem in problems]
    assert ids == ["c", "d", "e", "f", "g"]
    assert lines[5] == "... and 2 more missing embeddings"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_embeddings_that_are_not_finite_are_refused_by_id(value):
    emb_ND = np.ones((3, 2), dtype=np.float32)
    emb_ND[1, 1] = value
    with refuses("embeddings", "b", value):
        EmbeddingTable(["a", "b", "c"], emb_ND, HASH)


@pytest.mark.parametrize("name", ["", "two words", "line\nbreak"])
def test_an_id_that_is_not_one_word_is_refused(tmp_path, name):
    stem = tmp_path / "part"
    with refuses("embeddings", repr(name)):
        table(["a", name]).save(stem)
    assert not list(tmp_path.iterdir())
