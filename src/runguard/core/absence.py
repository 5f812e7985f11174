"""Whether words say that a thing which was looked up is missing or unavailable: an answer about that thing, and no
failure of the tool.

A sweep over a hundred customers meets many of them. What is needed to work at all (a file, a command, a key) is no such
thing: without it the next call fails as well.
"""

import re
from typing import Final

_SHORT: Final = 120  # characters: a longer message tells a story
_THINGS: Final = "results?|matches|match|data|records?|rows?|items?|entries|documents?|hits?|output|content"
_KNOWLEDGE: Final = "information|info|data|details|forecast|records?|results?"

_NOTHING: Final = re.compile(
    r"^\W*(?:none|null|empty(?:[\s_\-]result)?|not[\s_\-]?found|nothing(?:\s(?:found|here|to\s\w+))?"
    r"|0 (?:results?|matches|rows?|hits?)"
    rf"|no[\s_\-](?:[^\W_]{{1,30}}[\s_\-]){{0,3}}(?:{_THINGS})(?:\s(?:found|returned|available|matched?).{{0,80}})?"
    r"|(?:\w[\s\w'\"-]{0,80}\s)?(?:not found|does not exist)\b.{0,120})\W*$",
    re.IGNORECASE | re.DOTALL,
)
_NOT_THERE: Final = re.compile(
    r"(?<![a-z])not[\s_\-]?(?:be )?found(?![a-z])|(?<!file)(?<!module)(?<!command)notfound(?:error"
    r"|exception)?\b|\bNXDOMAIN\b|^\W*(?:http )?404\W*$"
    r"|\bno such\b|\bdo(?:es)?(?: not|n't) exist\b|\bcould not be located\b|\bnothing match(?:es|ed)\b|\bthere is no\b"
    r"|\b(?:could not|couldn't|cannot|can't|unable to|failed to) (?:find|locate)\b"
    r"|\bno (?:[\w'\"#.@\-]{1,60} ){1,4}?(?:found|available|with|for|matching|matched|named|called|listed"
    r"|exists?|on|at|under)\b"
    r"|\bno (?:matching |such )?(?:record|result|match|entry|data)(?:e?s)?\W*$"
    r"|\bnot in (?:the |our |this )?(?:catalog(?:ue)?|inventory|index|list|records|registry|collection|data ?set)\b"
    rf"|\b(?:{_KNOWLEDGE})\b[^.;]{{0,60}} (?:is|are)(?: not|n't) available\b"
    rf"|\b(?:do(?:es)?(?: not|n't) have|has no|have no) (?:[\w\-]{{1,40}} ){{0,4}}(?:{_KNOWLEDGE})\b"
    # German, French, Spanish, Portuguese, Italian, Russian, Chinese, Japanese, Korean
    r"|\bnicht (?:gefunden|vorhanden|verfügbar)|\bkeine?[nrs]? (?:\w+ ){0,3}(?:gefunden|vorhanden|verfügbar)"
    r"|\bexistiert nicht"
    r"|\bintrouvable|\bnon trouvée?s?\b|\bn['’]existe pas|\bn['’]a pas été trouvée?|\baucune? (?:\w+ ){0,3}trouvée?"
    r"|\bno (?:se (?:ha )?(?:encontr|hall)\w+|encontrad[oa]s?|existe)\b"
    r"|\bnão (?:foi |foram )?(?:encontrad[oa]s?|existe)|\bnon (?:è stat[oa] )?(?:trovat[oaie]|esiste)\b"
    r"|не найден|не существует|未找到|找不到|没有找到|沒有找到|不存在|見つかりません|存在しません|찾을 "
    r"수 없|존재하지 않",
    re.IGNORECASE,
)
_NOT_TO_BE_HAD: Final = re.compile(
    r"\b(?:already|currently|has been|is|are|was|were|fully) (?:already |currently |been |fully )?(?:taken"
    r"|booked|reserved|occupied|sold ?out|out of stock)\b"
    r"|\b(?:seat|slot|room|place|date|name|username) (?:taken|occupied|booked)\b|\b(?:not|n't"
    r"|no longer) available (?:on|at|for)\b|\balready exists\b",
    re.IGNORECASE,
)
_NEEDED: Final = re.compile(
    r"^\W*(?:bash|sh|zsh)\b|\b(?:command|tool|function|module|package|method|attribute|option|file|directory|folder|path|host|library|executable|key|token|credential"
    r"|session|database|table|column|schema|config(?:uration)?|variable|server|service|endpoint|model|driver|plugin|string|page|url|access|permission|connection|network"
    r"|quota|credit|memory|space|license|handler|distribution|version|argument|parameter|field|value|tag|quote|brace|bracket|delimiter"
    r"|broker|worker|node|master|primary|replica|upstream|backend|cluster|gpu|capacity|response|internet"
    r"|event loop|thread|port|authori[sz]ation|subscription"
    r"|interpreter|runtime|binary|constructor|relation|transaction|certificate|proxy)s?\b"
    r"|\b(?:Runtime|Type|Attribute|Index|Name|Assertion|OS)Error\b|\bnot in (?:list|index)\b|\bENOTFOUND\b",
    re.IGNORECASE,
)
# A page of the web and a table of a restaurant are looked up like any thing.
_LOOKED_UP: Final = re.compile(
    r"\b404\b|^\W*(?:error:\s)?(?:the )?page\b.{0,80}(?:not found|does not exist)|\bno tables? (?:is "
    r"|are )?(?:available|free)\b",
    re.IGNORECASE,
)


def is_nothing(text: str) -> bool:
    """A whole answer that says "nothing"."""
    return _NOTHING.match(text) is not None


def says_missing(message: str) -> bool:
    """A short message of an error about one of many things."""
    if len(message) > _SHORT:
        return False
    if _NEEDED.search(message) is not None:
        return _LOOKED_UP.search(message) is not None
    return _NOT_THERE.search(message) is not None or _NOT_TO_BE_HAD.search(message) is not None or is_nothing(message)
