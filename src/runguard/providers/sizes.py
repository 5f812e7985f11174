"""How large a prompt or an answer is, in bytes of text: media count as the text that would have as many tokens.

No code of the values runs, and the work is bounded: linear in the text, and in the number of values up to ``_NODES``.
"""

from types import FunctionType, MethodType
from typing import Any, Final

from runguard.core.identity import CHARS_PER_TOKEN
from runguard.providers.fields import attributes, fields, items

UPPER: Final = 3  # bytes of text per token, estimated high: for what is reserved
LIKELY: Final = CHARS_PER_TOKEN  # and as it mostly is: for what came back
_NODES: Final = 250_000
_ENOUGH: Final = 64_000_000  # bytes; assumed for anything that holds more values than that
_ENTRY: Final = 6  # quotes, colon and comma around a name and its value
_ITEM: Final = 2
_NUMBER: Final = 4
_FRACTION: Final = 12
_DECLARED: Final = 64  # of a function or a schema given as a class, for each argument or field beside its description
IMAGE_TOKENS: Final = 1_600  # the most expensive of the usual tariffs for an image of common size
_AUDIO_BYTES: Final = 500  # per token: 32 tokens a second at a common rate of 16 kB a second
_VIDEO_BYTES: Final = 400
_DOCUMENT_BYTES: Final = 100
_DATA_URL: Final = 64  # a shorter text is not worth a look

_MARKS: Final = frozenset({"data", "file_uri", "fileUri", "size_bytes", "sizeBytes"})
_IMAGES: Final = frozenset({"image_url", "input_image", "image"})
_FILES: Final = frozenset({"file", "input_file", "document"})
_MEDIA: Final = _IMAGES | _FILES
_SOUNDS: Final = frozenset({"wav", "mp3", "flac", "opus", "pcm16", "aac", "ogg", "m4a"})
_MIMES: Final = ("mime_type", "mimeType", "media_type", "mediaType", "format")
_PLAIN: Final = frozenset({int, float})


def text_size(text: str) -> int:
    """Bytes: other scripts take more bytes and more tokens per character alike."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def size_of(value: Any) -> int:
    return measure(value)[0]


def tokens_in(size: int) -> int:
    """The tokens of so many bytes that a model wrote."""
    return -(-size // LIKELY)


def answer_size(content: Any) -> int:
    """Bytes of a content of Gemini or ADK, as an object or as JSON: thinking and function calls included."""
    if type(content) is str:
        return text_size(content)
    size = 0
    for part in items(fields(content).get("parts")):
        get = fields(part).get
        if type(text := get("text")) is str:
            size += text_size(text)
        elif (call := get("function_call") or get("functionCall")) is not None:
            get = fields(call).get
            size += size_of(get("name")) + size_of(get("args"))
        elif (answer := get("function_response") or get("functionResponse")) is not None:
            get = fields(answer).get
            size += size_of(get("name")) + size_of(get("response"))
        else:
            size += size_of(part)
    return size


def measure(value: Any) -> tuple[int, int]:
    """Bytes, and the tokens of it that are audio.

    A text takes the same short time however long it is, and numbers and texts are counted where they are held. So a
    prompt is measured whole for every call: a check that notices each change in an old message would take as long.
    """
    size = audio = nodes = 0
    pending: list[Any] = [value]
    while pending:
        item = pending.pop()
        kind = type(item)
        if kind is dict:
            nodes += len(item)
            may_be_media = not _MARKS.isdisjoint(item) or (type(named := item.get("type")) is str and named in _MEDIA)
            if may_be_media and (media := _media_in(item)) is not None:
                tokens, audio_tokens, deeper = media
                size, audio = size + tokens * UPPER, audio + audio_tokens
                if not deeper:
                    continue
            for name, entry in item.items():
                if entry is not None:
                    size += len(name) + _ENTRY if type(name) is str else _ENTRY
                    kind = type(entry)
                    if kind is str and entry.isascii() and (len(entry) <= _DATA_URL or entry[:5] != "data:"):
                        size += len(entry)
                    elif kind is int or kind is bool:
                        size += _NUMBER
                    else:
                        pending.append(entry)
        elif kind is list or kind is tuple:
            nodes += len(item)
            if len(item) > 16 and type(item[0]) in _PLAIN and (kinds := set(map(type, item))) <= _PLAIN:
                size += len(item) * (_FRACTION if float in kinds else _NUMBER)
                nodes -= len(item)
            else:
                size += len(item) * _ITEM
                for entry in item:
                    if type(entry) is str and entry.isascii() and (len(entry) <= _DATA_URL or entry[:5] != "data:"):
                        size += len(entry)
                    elif entry is not None:
                        pending.append(entry)
        elif kind is str:
            if len(item) > _DATA_URL and item.startswith("data:"):
                tokens, audio_tokens = _data_url(item)
                size, audio = size + tokens * UPPER, audio + audio_tokens
            else:
                size += len(item) if item.isascii() else len(item.encode("utf-8", "replace"))
        elif item is not None:
            size += _other(item, kind, pending)
            nodes += 1
        if nodes > _NODES:
            return max(size, _ENOUGH), audio
    return size, audio


def _other(item: Any, kind: type, pending: list[Any]) -> int:
    """What is neither text nor a plain list or dict; what it holds is looked at next."""
    if kind is bool or kind is int:
        return _NUMBER
    if kind is float:
        return _FRACTION
    if issubclass(kind, str):
        return text_size(str.__getitem__(item, slice(None)))
    if issubclass(kind, (bytes, bytearray)):
        return len(item) * UPPER // _DOCUMENT_BYTES
    if issubclass(kind, (list, tuple, set, frozenset)):
        base: Any = next(base for base in (list, tuple, set, frozenset) if issubclass(kind, base))
        pending.append(list(base.__iter__(item)))
        return 0
    if issubclass(kind, (type, FunctionType, MethodType)):
        return _declaration(item)
    if kind.__module__.startswith("PIL."):
        return IMAGE_TOKENS * UPPER
    if kind.__module__ != "unittest.mock" and (held := attributes(item)):
        pending.append(held)
    return 0


def _declaration(item: Any) -> int:
    """A function given as a tool, a class given as a schema: the library writes the declaration from what is said
    there.
    """
    held: Any = getattr(item, "__annotations__", None)
    given: Any = getattr(item, "__doc__", None)
    return (len(given) if type(given) is str else 0) + _DECLARED * (1 + (len(held) if type(held) is dict else 0))


def _media_in(item: dict[Any, Any]) -> tuple[int, int, bool] | None:
    """Tokens, audio tokens, and whether the rest of the part is to be measured as well. None: no media."""
    kind = item.get("type")
    if type(kind) is str:
        if kind in _IMAGES:
            return IMAGE_TOKENS, 0, False
        if kind in _FILES:
            return IMAGE_TOKENS, 0, True  # its length may be unknown
    if "file_uri" in item or "fileUri" in item:
        return IMAGE_TOKENS, 0, True
    mime = next((given for name in _MIMES if type(given := item.get(name)) is str), None)
    if mime is None:
        return None
    data = item.get("data")
    if type(data) is bytes:
        return (*media_tokens(mime, len(data)), False)
    if type(data) is str:
        return (
            (text_size(data) // UPPER + 1, 0, False)
            if mime.startswith("text/")
            else (*media_tokens(mime, len(data) * 3 // 4), False)
        )
    length = item.get("size_bytes", item.get("sizeBytes"))
    return (*media_tokens(mime, length), False) if type(length) is int and length >= 0 else None


def _data_url(text: str) -> tuple[int, int]:
    return media_tokens(text[5:69].partition(",")[0].partition(";")[0], len(text) * 3 // 4)


def media_tokens(mime: str, length: int) -> tuple[int, int]:
    """Tokens of so many bytes of a kind of media, and the audio tokens among them."""
    if mime.startswith("audio/") or mime in _SOUNDS:
        return length // _AUDIO_BYTES + 1, length // _AUDIO_BYTES + 1
    if mime.startswith("image/"):
        return IMAGE_TOKENS, 0
    if mime.startswith("video/"):
        return length // _VIDEO_BYTES, 0
    if mime.startswith("text/"):
        return length // UPPER, 0
    return length // _DOCUMENT_BYTES, 0
