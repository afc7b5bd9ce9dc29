"""Text from strangers: nothing in it reaches a terminal that the terminal would act on."""

import codecs
import re

_COLOURS = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]")

_NUMBER = re.compile(r"\d{300,}")


UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def decoded(data: bytes) -> str:
    """UTF-8, or UTF-16 when a mark says so; what is neither is replaced."""
    return data.decode("utf-16" if data.startswith(UTF16_MARKS) else "utf-8-sig", "replace")


def tame(text: str) -> str:
    """Printable, and without numbers so long that reading them as such would fail."""
    return _NUMBER.sub(lambda match: match[0][:300], printable(text))


def printable(text: str) -> str:
    """Without colours, cursor movements and other control characters; tabs and newlines stay."""
    if text.isascii() and text.isprintable():
        return text
    return _CONTROL.sub("", _COLOURS.sub("", text))
