"""The text of events that are alike in all but their text, read without reading each.

An answer's chunks say the same id, model and index again and again. Once one of them has been
read, those that begin and end as it does are as well known, and only what stands between is
read: JSON knows no state in which a string's end would mean something else.
"""

from dataclasses import dataclass

from pd_router import jsonbytes

_TEXT_MARKS = (b'"content":"', b'"text":"')
_END = b"\n\n"


@dataclass(frozen=True, slots=True)
class Alike:
    """``head`` and ``tail`` of an event, quotes of its text included."""

    head: bytes
    tail: bytes

    def start_in(self, events: bytes) -> int:
        """Where the first of them begins; -1: there is none."""
        if events.startswith(self.head):
            return 0
        at = events.find(_END + self.head)
        return at if at < 0 else at + len(_END)

    def text_of(self, events: bytes) -> str | None:
        """The text of whole events; None if it is not certain that all are alike."""
        if not events.startswith(self.head) or not events.endswith(self.tail):
            return None
        whole = events[len(self.head) : len(events) - len(self.tail)]
        texts = whole.split(self.tail + self.head)
        raw = b"".join(texts)
        # What would be whole only because it was joined: a backslash before a text's end, half a
        # pair of surrogates.
        if b"\\" in raw and (b"\\u" in raw or any(text.endswith(b"\\") for text in texts)):
            return None
        try:
            # An event that is not alike has left its line ends, which no string may have.
            text = jsonbytes.load(b'"' + raw + b'"')
        except ValueError:
            return None
        return text if isinstance(text, str) else None

    def json_with(self, text: bytes) -> bytes:
        """What such an event says."""
        return (self.head + text + self.tail)[len(b"data: ") : -len(_END)]


def like_the_last(events: bytes) -> Alike | None:
    """What the last of whole events may have in common with others; whether its text is where
    it seems to be, :meth:`Alike.json_with` has to tell."""
    event = (
        events[events.rfind(_END, 0, -len(_END)) + len(_END) :] if _END in events[:-2] else events
    )
    if not event.startswith(b"data: "):
        return None
    for mark in _TEXT_MARKS:
        at = event.find(mark)
        if at < 0:
            continue
        begin = at + len(mark)
        end = event.find(b'"', begin)
        if end < 0 or b"\\" in event[begin:end]:
            return None
        return Alike(event[:begin], event[end:])
    return None
