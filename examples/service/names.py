"""Names of speakers: which ones are allowed, and which look like each other."""

import unicodedata

JOINERS = "\u200c\u200d"  # invisible, but used to write Persian and Indian names
# Alphabets with letters that look the same, such as the first letter of each.
SIMILAR_ALPHABETS = ("LATIN", "CYRILLIC", "GREEK", "ARMENIAN", "CHEROKEE", "COPTIC")


def checked_name(name: str) -> str:
    """Return a name in the usual form of Unicode; raise ValueError if it is not allowed.

    An accent can be a character of its own; both spellings are the same speaker.
    """
    name = unicodedata.normalize("NFC", name)
    if name != name.strip():
        raise ValueError("name: must not begin or end with a blank")
    if "/" in name:
        raise ValueError("name: must not contain a slash")
    for character in name:
        _check_character(character)
    if not any(character.isalnum() for character in name):
        raise ValueError("name: must have a letter or a digit")
    alphabets = _alphabets_of(name)
    if len(alphabets) > 1:
        raise ValueError(
            f"name: mixes {' and '.join(alphabets)} letters, which look the same; use one"
            " alphabet"
        )
    return name


def look_of(name: str) -> str:
    """Return the text that names have in common which differ in capitals or forms of letters."""
    visible = name
    for joiner in JOINERS:
        visible = visible.replace(joiner, "")
    # Again after the change of case, which can make letters that have another usual form.
    folded = unicodedata.normalize("NFKC", visible).casefold()
    return unicodedata.normalize("NFKC", folded)


def _check_character(character: str) -> None:
    # It stands for bytes of the URL that are not UTF-8.
    if character == "\ufffd":
        raise ValueError("name: must be text in UTF-8")
    # Control characters, marks that reverse the text around them, ends of lines.
    is_special = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    if is_special and character not in JOINERS:
        raise ValueError(f"name: must not contain {ascii(character)}")


def _alphabets_of(name: str) -> list[str]:
    """Return the alphabets of a name among those with similar letters."""
    alphabets: set[str] = set()
    for character in unicodedata.normalize("NFKC", name):
        # Such as "CYRILLIC SMALL LETTER A".
        alphabet, _, _ = unicodedata.name(character, "").partition(" ")
        if alphabet in SIMILAR_ALPHABETS:
            alphabets.add(alphabet)
    return [alphabet.capitalize() for alphabet in sorted(alphabets)]
