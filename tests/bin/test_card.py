"""`speakerlab card` prints facts in lines of a page's width."""

import json

from speakerlab.bin import card


def test_long_facts_are_wrapped_and_tables_are_not(tmp_path, capsys):
    model = tmp_path / "model"
    model.mkdir()
    (model / "embedder.safetensors").touch()
    (model / "config.yaml").write_text(
        "model: {name: campplus}\nfrontend: {sample_rate: 16000, num_mel_bins: 80}\n"
        "data: {dir: data, train: [train]}\n"
    )
    corpora = " ".join(f"corpus-{number}" for number in range(40))
    page = f"https://host/{'x' * 120}"
    facts = {
        "sha256": "ab" * 32,
        "parameters": 1_800_000,
        "embed_dim": 192,
        "source": {"training_data": corpora, "page": page, "licence": "CC BY 4.0"},
    }
    (model / "card.json").write_text(json.dumps(facts))
    card.main([str(model)])
    lines = capsys.readouterr().out.splitlines()
    # An address can be copied as a whole.
    assert f"origin           {page}" in lines
    others = [line for line in lines if page not in line]
    assert max(map(len, others)) <= 100
    start = next(line for line in others if line.startswith("training data"))
    assert start.startswith("training data    corpus-0 corpus-1 ")
    assert " ".join(" ".join(others).split()).count(corpora) == 1
    assert "licence          CC BY 4.0" in lines

    table_line = "trials  system  " + "EER %  " * 20
    assert card.wrap(table_line) == [table_line]
