"""Options of all commands: what the parser refuses, and with which line."""

import pytest
from refusals import refused

from speakerlab.bin import extract, plan, train


@pytest.mark.parametrize(
    ("parse", "arguments", "subject", "values"),
    [
        (
            train.parse,
            ["--exp", "a", "--confg", "b"],
            "speakerlab train",
            ["--confg", "--config?"],
        ),
        (train.parse, ["--otp=1"], "speakerlab train", ["--otp"]),
        (
            plan.parse,
            ["--hardware", "cpu"],
            "speakerlab plan",
            ["--hardware; see --help"],
        ),
        (train.parse, ["--set", "a=--b"], "speakerlab train", ["--exp, --config"]),
        (
            extract.parse,
            ["--job", "3/2"],
            "speakerlab extract: --job",
            ["3/2", "I from 1 to N"],
        ),
        (
            extract.parse,
            ["--per-speaker", "0"],
            "speakerlab extract: --per-speaker",
            [0, 1],
        ),
    ],
)
def test_a_misspelt_option_is_named_before_a_missing_one(
    parse, arguments, subject, values, capsys
):
    with pytest.raises(SystemExit):
        parse(arguments)
    text = capsys.readouterr().err
    assert refused(text, subject, *values), text
    assert text.count("\n") == 1, text
