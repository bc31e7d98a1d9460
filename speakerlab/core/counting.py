"""Numbers with their nouns, for messages."""

VOWELS = "aeiou"


def count_of(number: int, noun: str) -> str:
    """Return a number with a noun, which is given in the singular: "1 class", "2 classes"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {_plural(noun)}"


def _plural(noun: str) -> str:
    """Return the plural of a regular noun, or of words that end with one."""
    # The end of "epoch" sounds like a k.
    is_hissed = noun.endswith(("s", "x", "ch", "sh")) and not noun.endswith("epoch")
    if is_hissed:
        return f"{noun}es"
    if noun.endswith("y") and noun[-2] not in VOWELS:
        return f"{noun[:-1]}ies"
    return f"{noun}s"
