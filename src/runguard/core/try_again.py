"""Short answers that say "this did not work, try again" although they look like success.

``{"status": "retry later"}`` and "Service is busy, please try again" are no results: the next call will probably be
answered alike. An answer that is accepted or pending, a thing that was not found and a verdict on what was asked
("wrong code, try again") are results.
"""

import re
from typing import Final

from runguard.core.absence import says_missing

_SHORT: Final = 200  # characters: a longer text has more to say

_STATUS: Final = re.compile(
    r"\W*(?:please[\s_\-]?)?(?:(?:needs?|must|should)[\s_\-])?(?:re-?try|try[\s_\-]?again)"
    r"(?:[\s_\-]?(?:later|again|soon|required|needed)){0,3}(?:[\s_\-](?:in|after)[\s_\-].{1,20})?\W*"
    r"|\W*(?:(?:server|service|system|too|currently|temporarily)[\s_\-])+(?:is[\s_\-])?(?:busy|overloaded)\W*"
    r"|\W*overloaded\W*",
    re.IGNORECASE,
)
_ASKS: Final = re.compile(
    r"(?<!\bwill )(?<!\bI )(?<!'ll )\b(?:re-?try|try)(?: (?:it|this|that|(?:your|the|this) \w{1,20}))?,? "
    r"(?:again|later|after|once more|in (?:\d|a (?:few|moment|minute|while)))"
    r"|\b(?:server|service|system|api|backend|site|upstream|provider|gateway|endpoint)s?"
    r"(?: (?:is|are|was))?(?: (?:currently|temporarily|too|very))* (?:busy|overloaded)\b"
    r"|\btemporarily (?:unavailable|overloaded|busy|out of service|not available)\b"
    r"|\bsomething went wrong\b|\b(?:an|unexpected|internal|unknown) error (?:has )?occurred\b",
    re.IGNORECASE,
)
# One of these is in every text that _ASKS or _STATUS matches. Looking for them first spares most answers the search.
_IN_ASKS: Final = ("try", "busy", "overloaded", "temporarily", "went wrong", "occurred")
# It was accepted, or it is being worked on.
_PENDING: Final = re.compile(
    r"\b(?:pending|queued?|running|processing|in[\s_]progress|still|being|preparing|generating|waiting|yet|started"
    r"|not (?:ready|finished|complete|done))\b|(?<!not )(?<!not be )\b(?:accepted|submitted|scheduled|received)\b",
    re.IGNORECASE,
)
# It says something about what was asked: a guess, a seat, a search that needs other words.
_VERDICT: Final = re.compile(
    r"(?<!went )\bwrong\b|\b(?:incorrect|guess|higher|lower|too (?:low|high|short|long|far|close|small|large|few)"
    r"|not (?:the )?(?:right|correct|quite)|held|locked|reserved|taken|booked|already|another|different)\b",
    re.IGNORECASE,
)


def may_ask(text: str) -> bool:
    """A quick look, for the many answers that ask for nothing. Every text that asks for another attempt passes it."""
    if len(text) > _SHORT:
        return False
    lower = text.lower()
    for words in _IN_ASKS:  # noqa: SIM110  a generator costs as much as the whole loop
        if words in lower:
            return True
    return False


def is_try_again(status: str) -> bool:
    """A status that asks for another attempt: "retry_later"."""
    return len(status) <= _SHORT and _STATUS.fullmatch(status) is not None


def says_try_again(text: str) -> bool:
    """A short text that asks for another attempt and reports neither a result nor a verdict."""
    return (
        may_ask(text)
        and _ASKS.search(text) is not None
        and _PENDING.search(text) is None
        and _VERDICT.search(text) is None
        and not says_missing(text)
    )
