"""Tables of embeddings: to disk and back, merged from parts, and what is refused."""

import json

import numpy as np
import pytest

from speakerlab.core.atomic import replacing
from speakerlab.scoring.embeddings import EmbeddingTable

HASH = "ab" * 32


def table(ids, *, offset=0.0, model=HASH, dim=3, **facts):
    emb_ND = np.arange(len(ids) * dim, dtype=np.float32).reshape(-1, dim) + np.float32(offset + 1)
    return EmbeddingTable(list(ids), emb_ND, model, facts)


def test_a_table_comes_back_from_disk(tmp_path):
    stem = tmp_path / "embeddings" / "test.v1"  # the dot is part of the name
    table(["a", "b"], precision="fp32").save(stem)
    back = EmbeddingTable.load(stem)
    assert back.ids == ["a", "b"]
    assert back.emb_ND.dtype == np.float32
    np.testing.assert_array_equal(back.emb_ND, [[1, 2, 3], [4, 5, 6]])
    assert (back.model_sha256, back.facts) == (HASH, {"precision": "fp32"})
    assert sorted(path.name for path in stem.parent.iterdir()) == [
        "test.v1.ids",
        "test.v1.json",
        "test.v1.npy",
    ]
    assert json.loads((stem.parent / "test.v1.json").read_text()) == {
        "precision": "fp32",
        "model_sha256": HASH,
        "num": 2,
        "dim": 3,
    }


def test_an_unfinished_table_is_refused(tmp_path):
    table(["a", "b"]).save(tmp_path / "part")
    (tmp_path / "part.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"part\.json: missing, so .* not finished; run"):
        EmbeddingTable.load(tmp_path / "part")


def test_an_old_description_does_not_vouch_for_new_files(tmp_path):
    table(["a", "b"]).save(tmp_path / "part")
    (tmp_path / "part.ids").unlink()
    (tmp_path / "part.ids").mkdir()  # writing the ids fails
    with pytest.raises(OSError):
        table(["c", "d"]).save(tmp_path / "part")
    with pytest.raises(FileNotFoundError, match="not finished"):
        EmbeddingTable.load(tmp_path / "part")


def test_files_that_disagree_are_refused(tmp_path):
    table(["a", "b"]).save(tmp_path / "part")
    (tmp_path / "part.ids").write_text("a\n")
    with pytest.raises(ValueError, match="2 embeddings of 3 dimensions .* and 1 ids; run"):
        EmbeddingTable.load(tmp_path / "part")
    (tmp_path / "part.json").write_text('{"num": 2}')
    with pytest.raises(ValueError, match=r"part\.json: does not describe embeddings"):
        EmbeddingTable.load(tmp_path / "part")


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError), replacing(path) as partial:
        partial.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_parts_are_merged_in_the_wanted_order():
    parts = [
        table(["a", "c"], batch=4, rank=0),
        table([]),
        table(["b"], offset=10, batch=4, rank=1),
    ]
    assert EmbeddingTable.merge(parts).ids == ["a", "c", "b"]
    merged = EmbeddingTable.merge(parts, ["c", "b", "a"])
    assert merged.ids == ["c", "b", "a"]
    np.testing.assert_array_equal(merged.emb_ND[:, 0], [4, 11, 1])
    assert merged.facts == {"batch": 4}  # what the parts do not share is left out


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ([], "nothing to merge"),
        ([table(["a"]), table(["b"], model="cd" * 32)], "made by 2 different models, got sha256"),
        ([table(["a"]), table(["b"], dim=4)], r"differ in dimension, got \[3, 4\]"),
        ([table(["a", "b"]), table(["b"])], "b occurs more than once"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(parts, line):
    with pytest.raises(ValueError, match=line):
        EmbeddingTable.merge(parts)


def test_missing_embeddings_are_named_five_at_most():
    with pytest.raises(ValueError) as error:
        table(["a", "b"]).check_coverage(["a", "b", *"cdefghi"], where="test")
    assert str(error.value).splitlines() == [
        *(f"test: no embedding of {u}; see rejected.tsv, or run stage 5 again" for u in "cdefg"),
        "... and 2 more missing embeddings",
        "test: 7 of 9 utterances are missing",
    ]


def test_extra_embeddings_are_counted():
    assert table(["a", "b", "c"]).check_coverage(["c", "a", "a"]) == 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_embeddings_that_are_not_finite_are_refused_by_id(value):
    emb_ND = np.ones((3, 2), dtype=np.float32)
    emb_ND[1, 1] = value
    with pytest.raises(
        ValueError, match=f"embeddings: b is not finite, got {value} in dimension 1"
    ):
        EmbeddingTable(["a", "b", "c"], emb_ND, HASH)


@pytest.mark.parametrize("name", ["", "two words", "line\nbreak"])
def test_an_id_that_is_not_one_word_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="an id must be one word"):
        table(["a", name]).save(tmp_path / "part")
    assert not list(tmp_path.iterdir())
