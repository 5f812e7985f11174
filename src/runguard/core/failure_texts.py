"""Texts that report a failure, as one table with examples.

``core/outcomes`` asks ``reports_failure`` about texts, and ``bare`` for what a text holds beside reminders. To make
RunGuard know one more wording, add a row to ``SAYINGS`` with an example; ``tests/core/test_failure_texts.py`` checks
each row. A wording of one tool alone belongs into its ``ToolRule(failed=...)``.
"""

import json
import re
from typing import Any, Final, NamedTuple

HEAD: Final = 400  # characters: what a text says about its own success, it says at the start
TAIL: Final = 120  # characters: what a traceback says happened, it says at its end
LAST: Final = 400  # characters in which the last line is looked for
_LISTED: Final = 12  # lines that may show that a text is a list of errors


class Saying(NamedTuple):
    """One way to report a failure.

    ``begins``: every text that the pattern of a beginning matches starts with one of these, in small letters and
    without leading marks. Looking for them first spares most answers the search.
    """

    pattern: str
    examples: tuple[str, ...]
    begins: tuple[str, ...] = ()


# ---- How a text begins that reports a failure.

SAYINGS: Final = (
    Saying(
        r"(?:error|exception|traceback|fatal|failed|failure|invalid|unknown tool|unauthori[sz]ed|forbidden"
        r"|permission denied|access denied|no such file|command not found|syntax ?error|timed? ?out|could not|cannot"
        r"|unable to|[a-z]{1,60}(?:error|exception))(?![a-z]|-[a-z])",
        ("Error: disk full", "ValueError: invalid literal", "Permission denied", "Unable to reach the server"),
        (
            *("traceback", "fatal", "fail", "invalid", "unknown tool", "unauthori", "forbidden", "permission denied"),
            *("access denied", "no such file", "command not found", "syntax", "time", "could not", "cannot"),
            "unable to",
        ),
    ),
    Saying(
        r"(?:the )?(?:tool|function|api|code) (?:execution|call|parsing) failed(?![a-z])"
        r"|(?:the |your )?(?:edit|patch|upload|download|authentication|authori[sz]ation|navigation|search|fetch|parsing"
        r"|extraction|conversion) (?:has |was )?(?:failed|rejected|refused)"
        r"(?=\W*$|[.:;!]|\s(?:after|with|due|because)\b)"
        r"|(?:tool|parsing|format|runtime|server|api|database|network|connection|internal|request|unexpected) error:"
        r"|(?:the )?(?:tool|function|server|api|service) (?:has )?(?:returned|reported|responded with) an "
        r"(?:error|exception)(?=\W*$|[.:])",
        (
            "Tool execution failed: x",
            "The tool execution failed with the following error:",
            "Code parsing failed",
            "Upload failed: disk full",
            "Your edit was rejected.",
            "Parsing error: no action",
            "The server returned an error: 500",
        ),
        (
            *("the ", "your ", "tool ", "function ", "api ", "code ", "service ", "server ", "edit", "patch", "upload"),
            *("download", "auth", "navigation", "search", "fetch", "parsing", "extraction", "conversion"),
        ),
    ),
    Saying(  # what frameworks make of an exception of a tool, or of arguments that they cannot read
        r"an (?:error|exception) occurr?ed (?:\(\w{1,80}\) )?(?:while|during|when|in) (?:the )?(?:tool|function|code"
        r"|running|executing|execution|calling|invoking|parsing|processing your)\b"
        r"|(?:there was )?an (?:error|exception): |encountered (?:an )?error: "
        r"|i encountered an error while trying to use the tool"
        r"|(?:execution|runtime) error in |\d{1,3} validation errors?(?: for [\w.]{1,80})?\s{0,4}(?::|\n)"
        r"|(?:tool|function) \S{1,80} (?:raised|returned|failed with) an (?:error|exception)"
        r"|action '[^'\n]{1,80}' (?:don't|doesn't|does not) exist|[^\n:]{1,80} is not a valid (?:tool|function),"
        r"|tool_use_error>|mcp error -?\d"
        r"|exit ?code: \d{1,3} \(execution failed\)",
        (
            "An error occurred while running the tool. Please try again. Error: division by zero",
            "An error occurred (AccessDenied) when calling the ListBuckets operation: Access Denied",
            "I encountered an error while trying to use the tool. This was the error: x",
            "There was an error: x",
            "Encountered error: x",
            "exitcode: 1 (execution failed)\nCode output: x",
            "Execution error in tool: x",
            "2 validation errors for Order\nid\n  Field required",
            "Tool 'search' raised an exception: x",
            "Action 'find' don't exist, these are the only available Actions: search",
            "find is not a valid tool, try one of [search].",
            "<tool_use_error>String to replace not found in file.</tool_use_error>",
            "MCP error -32602: Invalid arguments for tool search",
        ),
        ("action '", "exitcode", "exit code"),
    ),
    Saying(
        r"(?:the |your )?(?:request|operation|query|connection|command|call|execution) (?:has )?"
        r"(?:timed out|(?:was )?refused|was reset|was aborted|failed)(?=\W*$|[.:;!]|\s(?:after|with|due|because)\b)",
        ("Your request has timed out.", "Connection refused: port 80"),
        ("the ", "your ", "request", "operation", "query", "connection", "command", "call ", "execution"),
    ),
    Saying(
        r"(?:connection refused|rate limit(?:ed| exceeded| reached)|too many requests|internal server error"
        r"|bad gateway|service unavailable|gateway time-?out|something went wrong)(?=\W*$|[.:;!(])"
        r"|rate limit reached for |(?:4(?!04)|5)\d\d (?:client|server) error: |https?connectionpool\("
        r"|(?:[\w.]{1,40}: )?net::err_[a-z_]{1,60}|(?:connect |getaddrinfo |read |write )?"
        r"e(?:timedout|connrefused|connreset|notfound|ai_again|pipe|hostunreach|acces|perm)\b",
        (
            "Rate limit exceeded.",
            "Bad gateway",
            "500 Server Error: Internal Server Error for url: https://a.example",
            "HTTPSConnectionPool(host='a.example', port=443): Max retries exceeded with url: /b",
            "page.goto: net::ERR_CONNECTION_REFUSED at https://a.example",
            "connect ECONNREFUSED 127.0.0.1:5432",
        ),
        (
            "connection",
            "rate limit",
            "too many",
            "internal s",
            "bad gateway",
            "service un",
            "gateway",
            "something went",
            *("httpsc", "httpc", "net::", "page.", "connect ", "getaddrinfo ", "read e", "write e"),
            *("etimedout", "econn", "enotfound", "eai_", "epipe", "ehostunreach", "eacces", "eperm"),
        ),
    ),
    Saying(  # runtimes, databases and command-line tools
        r"uncaught (?:\w{0,40}error|exception)|thread '[^'\n]{1,80}' panicked at "
        r"|(?:[a-z_]\w{0,40}\.){1,8}\w{0,60}(?:error|exception)(?=\W*$|[:)\n])"
        r"|errno -?\d{1,5}\]|ora-\d{5}:|sql error:|e: unable to "
        r"|(?:curl: \(\d|wget: unable to|ssh: (?:connect to host|could not resolve)|psql: error|docker: error)"
        r"|[^\n]{1,80} is not recognized as (?:an internal|the name of)"
        r"|(?:locator|page|frame|browser\w{0,20})\.\w{1,40}: (?:timeout \d|target )"
        r"|message: (?:no such element|stale element|element )",
        (
            "Uncaught ReferenceError: x is not defined",
            "thread 'main' panicked at src/main.rs:2:5:",
            "java.lang.NullPointerException: x\n\tat Main.main(Main.java:5)",
            '(psycopg2.errors.UndefinedTableError) relation "x" does not exist',
            "[Errno 13] Permission denied: 'x'",
            "ORA-00942: table or view does not exist",
            "E: Unable to locate package x",
            "curl: (6) Could not resolve host: a.example",
            "'x' is not recognized as an internal or external command,\noperable program or batch file.",
            "locator.click: Timeout 30000ms exceeded.",
            "Message: stale element reference: the page has changed",
        ),
        (
            *("uncaught", "thread '", "errno", "ora-", "sql error", "e: unable", "curl: (", "wget: unable", "ssh: co"),
            *("psql: err", "docker: err", "locator.", "page.", "frame.", "browser", "message: "),
        ),
    ),
    Saying(  # the tools of coding agents
        r"apply_patch verification failed|(?:\d{1,3} |the )?search(?:/replace)? blocks? failed to match"
        r"|file has (?:not been read yet|been (?:modified|changed|unexpectedly modified) since)"
        r"|(?:unrecogni[sz]ed|unsupported|unknown) (?:command|option|operation|argument|parameter|action|method)"
        r"|(?:argument|parameter) \S{1,60} is (?:required|missing)"
        r"|missing (?:\d{1,3} )?required (?:\w{1,20} )?(?:argument|parameter|field|propert|option|input)"
        r"|you do(?: not|n't) have (?:the )?permission to (?:perform|access|use|view|do|execute|call)\b",
        (
            "apply_patch verification failed: Failed to find expected lines in a.py",
            "❌ 1 SEARCH/REPLACE block failed to match!",
            "File has not been read yet. Read it first before writing to it.",
            "Unrecognized command 'x'",
            "Unknown parameter: x",
            "Argument 'x' is required",
            "Missing required argument: x",
        ),
        (
            *(
                "apply_patch",
                "search",
                "the ",
                *(f"{n} search" for n in range(1, 10)),
                "file has",
                "unrecogni",
                "unsupported",
            ),
            *("missing ", "you do", "unknown ", "argument", "parameter"),
        ),
    ),
    Saying(
        r"http(?:/[\d.]+)? (?:error )?(?:4(?!04)|5)\d\d(?=\W+\w)",
        ("HTTP 503 Service Unavailable",),
        ("http",),
    ),
    Saying(
        r"(?:fehler|erreur|errore|erro|ошибка)(?![a-z])|错误|錯誤|エラー|오류",
        ("Fehler: keine Verbindung", "エラー: 接続できません"),
        ("fehler", "erreur", "erro", "ошибка", "错误", "錯誤", "エラー", "오류"),
    ),
    Saying(
        r"usage:(?!\s?[~<>]?\d)(?:[^\n]{0,200}[-\[<]|\s?\S{1,40} (?-i:[A-Z]{2}))"
        r"|(?:/[\w./-]{1,60}/)?(?:bash|sh|zsh|dash)(?:: -c)?(?:: line \d+)?: ",
        ("usage: grep [-abc]", "/bin/bash: line 1: x: command not found"),
        ("usage:", "bash", "sh:", "zsh", "dash:", "/"),
    ),
    Saying(
        r"file \"[^\"\n]{1,200}\", line \d{1,7}\b[\s\S]{0,300}?\b[A-Z]\w{0,40}(?:Error|Exception)\b",
        ('  File "main.py", line 326\n    x = 1\nIndentationError: unexpected indent',),
        ('file "',),
    ),
    Saying(
        r"(?:the |your )?(?:proposed |last )?(?:edit|change|patch|replacement)s?(?: (?:that )?you (?:proposed|made))? "
        r"(?:(?:has |have |would |will )?introduc(?:ed?|es) (?:an? |the )?(?:new )?(?:syntax|lint|indent|errors?\b)"
        r"|(?:(?:was|were|could) not (?:be )?(?:applied|performed|made|saved)|did not apply|failed to apply)\b)",
        (
            "Your proposed edit has introduced new syntax error(s).",
            "The edit you proposed would introduce a syntax error",
            "The patch could not be applied to a.py",
        ),
        ("the ", "your ", "proposed", "last ", "edit", "change", "patch", "replacement"),
    ),
    Saying(
        r"no (?:replacement|edit)s? (?:was|were) (?:performed|made|applied)\b"
        r"|no match(?:es)? (?:found )?for (?:the )?(?:search block|old_?str)"
        r"|(?:the )?(?:string to replace|(?:search|replacement) text|old_?str(?:ing)?)\b.{0,300}?\b"
        r"(?:not found|is not unique|did not (?:appear|match))",
        (
            "No replacement was performed, old_str `x` did not appear verbatim in a.py.",
            "String to replace not found in file.",
            "No match found for old_string in a.py",
        ),
        (
            "no replacement",
            "no edit",
            "no match",
            "replacement",
            "the ",
            "string to",
            "search text",
            "old_str",
            "oldstr",
        ),
    ),
    Saying(
        r"(?:your|thoughts?|action|response|output|message|tool call|function call|arguments?|input)\b[^.\n]{0,80}?\b"
        r"(?:not (?:provided |given |written )?in (?:the |an? )?(?:correct|valid|right|expected|required) format"
        r"|(?:could not|cannot|can't) be parsed|(?:is|was) not (?:a )?valid (?:json|action|command|tool call))",
        ("Thought or action not provided in the correct format.", "Your response could not be parsed as JSON."),
        ("your ", "thought", "action", "response", "output", "message", "tool ", "function ", "argument", "input"),
    ),
    Saying(
        r"(?:please )?(?:always )?provide exactly one (?:\w{1,20} )?(?:action|tool call|code block|command)"
        r"|exactly one (?:\w{1,20} )?(?:action|tool call) must"
        r"|no (?:valid )?(?:action|tool call|function call|code block)s? (?:was |were )?(?:found|provided|detected)"
        r"|your (?:response|reply|output|message) (?:did|does) not (?:contain|include) (?:an? |any |the )?(?:valid )?"
        r"(?:action|tool call|function call|json|code block)",
        (
            "Please always provide EXACTLY ONE action in triple backticks, found 0 actions.",
            "Exactly one action must be given.",
            "No tool call found in your response.",
            "Your response did not contain a valid action.",
        ),
        ("please ", "provide exactly", "exactly one", "no action", "no valid", "no tool", "no function", "no code"),
    ),
    Saying(
        r"(?:you are )?not (?:authenticated|authori[sz]ed)(?=\W*$|[.:;!]| to )|authentication (?:is )?required"
        r"|your (?:session|token) (?:has |is )?expired|access to (?:this|the) \w{1,20} (?:is|was) denied",
        (
            "Not authenticated",
            "You are not authorized to perform this action.",
            "Authentication required",
            "Your session has expired. Please log in again.",
            "Access to this resource is denied.",
        ),
        ("you are not", "not auth", "auth", "your ", "access to"),
    ),
    Saying(
        r"npm err!|panic: |segmentation fault|killed(?=\W*$)|out of memory"
        r"|(?:compilation|build|execution|installation) (?:failed|timed out)"
        r"(?=\W*$|[.:;!]|\s(?:after|with|due|because)\b)",
        ("npm ERR! code ERESOLVE", "Segmentation fault (core dumped)", "Build failed: 3 errors"),
        (
            "npm err",
            "panic",
            "segmentation",
            "killed",
            "out of memory",
            "compilation",
            "build",
            "execution",
            "installation",
        ),
    ),
)
# ---- How the last line reads of a text that reports a failure: a log, or what a script has printed.

LAST_LINES: Final = (
    Saying(
        r"(?:[\w.]{1,80}\.)?[A-Z]\w{0,60}(?:Error|Exception|Interrupt)(?::\s.{0,400})?",
        ("UnboundLocalError: local variable 'x' referenced before assignment", "requests.exceptions.HTTPError: 500"),
    ),
    Saying(
        r"(?i:(?:fatal(?: error)?|error|panic|npm err!)(?::\s|\s(?=[^:]{1,80}:\s)).{1,400}|npm err! .{1,400})",
        ("Error: 'name' is a required property", "fatal: no upstream branch", "error TS2304: Cannot find name 'x'."),
    ),
    Saying(
        r"g?make(?:\[\d+\])?: \*\*\* .{1,300}",
        ("make: *** [Makefile:12: all] Error 2",),
    ),
    Saying(
        r"(?i:\W?(?:the )?(?:command|process|script|execution|program|job) (?:has )?(?:timed out|was killed|crashed"
        r"|(?:exited|failed|finished|terminated) with (?:non-zero )?(?:exit )?(?:code|status)\W{1,3}(?!0\b|1\b)-?\d+)\b"
        r".{0,120})",
        ("Command timed out after 30 s", "Process exited with code 139"),
    ),
    Saying(
        r"Node\.js v\d[\d.]{1,20}|exit status (?![01]\b)\d{1,3}",
        ("Node.js v20.1.0", "exit status 2"),
    ),
    Saying(
        r"(?:Segmentation fault|Killed|Aborted|Bus error)(?: \(core dumped\))?",
        ("Segmentation fault (core dumped)", "Killed"),
    ),
)


# ---- Answers that only begin like an error: figures, names of files and settings, the head of a table, a verdict.

_NUMBER: Final = r"[-+~<>]?\s?\d[\d,]{0,20}"
_END: Final = r"\s?(?=$|[\n;|()]|,(?!\s?\d)|(?:after|of|per|on|at|in|since) )"
LOOK_ALIKES: Final = (
    Saying(
        r"(?!invalid)(?:[a-z]{1,20}[ _-]){1,3}(?:rate|count|budget|ratio|share|percentage|total)s?"
        rf"(?: (?:remaining|left|used|is|was))?\s?[:=]?\s?{_NUMBER}",
        ("Error rate: 2 %", "error_count=0", "Error budget remaining: 93 %", "Failure rate < 1 %"),
    ),
    Saying(
        r"(?:(?:failed|failing|fatal|forbidden) (?:[a-z]{1,20} )?(?!arguments|parameters|inputs|options|flags)"
        r"[a-z]{1,20}(?<![su])s|invalid (?:records|rows|entries|lines|items|votes|files|documents|messages|events))"
        rf"\s?[:=]\s?{_NUMBER}\s?%?{_END}",
        ("Invalid records: 3", "Invalid votes: 3 %", "Failed logins: 12 since Monday", "Fatal accidents: 3,400"),
    ),
    Saying(
        r"(?!invalid)[a-z]{1,20}(?: [a-z]{1,20})?(?:\s?[:=]\s?|\s)"
        rf"(?:[-+~<>]{{0,2}}\d{{0,20}}\.\d{{1,20}}(?:e[-+]?\d{{1,3}})?\s?%?|{_NUMBER}\s?%|0)(?![\w.:]){_END}",
        ("error: 0.0231", "Error = 1.5e-3 after 30 epochs", "Failed: 0", "Failure: 12 % of all", "error 0.2 (best)"),
    ),
    Saying(
        rf"(?:failed|errors?|invalid)\s?[:=]?\s?{_NUMBER}\s?[,;|/]\s?(?:passed|ok|valid|succeeded|successful|skipped|total)",
        ("Failed: 2, passed: 10", "Invalid: 3; valid: 90"),
    ),
    Saying(
        r"time-?_?out(?:_\w{1,20})?\s?(?:=\s?\d|:\s?\d{1,9}\s?m?s?\n[\w-]{1,40}\s?:\s)|error_(?:log|page)\s",
        ("timeout = 30", "timeout: 30\nretries: 3", "timeout_ms = 30", "error_log /var/log/a.log;"),
    ),
    Saying(
        r"(?:error|exception|fatal|failed|failure|timeout)s?[\w-]{0,60}\.[a-z]{1,5}(?=\s|$)"
        r"|[a-z_]{1,30}(?:\s?[,;|\t]\s?[a-z_]{1,30}){1,20}\s{0,4}\n|invalid\W*$",
        ("error.tsx\nlayout.tsx", "failed_jobs.csv", "error,count\n404,3", "Invalid"),
    ),
)


_LOOK_ALIKE: Final = re.compile(rf"^\W{{0,4}}(?:{'|'.join(saying.pattern for saying in LOOK_ALIKES)})", re.IGNORECASE)
_BAD_TEXT: Final = re.compile(rf"^\W{{0,4}}(?:{'|'.join(saying.pattern for saying in SAYINGS)})", re.IGNORECASE)
_BAD_STARTS: Final = tuple(dict.fromkeys(word for saying in SAYINGS for word in saying.begins))
_LAST_LINE: Final = re.compile("|".join(f"(?:{saying.pattern})" for saying in LAST_LINES))
MAY_END_BADLY: Final = re.compile(rf"\s{{0,40}}(?:{_LAST_LINE.pattern}|</|```)")
_SAYS_ERROR: Final = re.compile(
    r"\W{0,4}(?:[a-z]{0,60}(?:error|exception)\s?:|error (?:executing|calling|running|in tool))", re.IGNORECASE
)
_ERROR_PAGE: Final = re.compile(r"<(?:title|h1)>\s*(?:http )?(?:error )?(?:4(?!04)\d\d|5\d\d)\b", re.IGNORECASE)
_LEADING: Final = " \t\r\n\"'`*#[({<-:>|!~.❌✗✘✖⚠️🚫"
_TRACE: Final = ("Traceback (most recent call last)", '  File "')
_ENDS: Final = ("Node.js v", "exit status ")  # written after all errors
_CLOSING: Final = re.compile(r"</?[\w-]{1,30}>|`{3,}|\W*")  # a line that says nothing


def reports_failure(text: str) -> bool:
    """Return whether a text starts like an error. A word inside a page of search results is not a failure."""
    head = text[:HEAD]
    if _TRACE[0] in head or (_may_be_bad(head) and _BAD_TEXT.match(head) and not _LOOK_ALIKE.match(head)):
        return True
    if "<" in head[:80] and _ERROR_PAGE.search(head):
        return True
    return (len(text) <= HEAD and _SERVER_ERROR.match(head) is not None) or _is_complaint(text)


def says_error(text: str) -> bool:
    """Return whether a text begins with "ValueError:" or the like."""
    return _SAYS_ERROR.match(text) is not None


def _may_be_bad(head: str) -> bool:
    """Return False for most texts that are fine, judged by their first words.

    The regular expression decides about the others.
    """
    start = head[:80].lower().lstrip(_LEADING)
    return start.startswith(_BAD_STARTS) or "error" in start or "exception" in start or " is not " in start


def ends_in_failure(text: str) -> bool:
    """Return whether the last line of a text is an error, and the text is no list of errors that was asked for.

    ``MAY_END_BADLY`` matches the last line of all such texts. Asking it first spares most answers a call.
    """
    last = last_line(text)
    if _LAST_LINE.fullmatch(last) is None or _LOOK_ALIKE.match(last) is not None:
        return False
    lines = text[-8 * LAST :].splitlines()[-_LISTED:]
    is_listed = sum(_LAST_LINE.fullmatch(line.strip()) is not None for line in lines) > 1
    return not is_listed or any(mark in text for mark in _TRACE) or last.startswith(_ENDS) or "***" in last


def last_line(text: str) -> str:
    """Return the last line that says something; an empty text when there is none."""
    for line in reversed(text[-LAST:].splitlines()):
        if line and _CLOSING.fullmatch(line) is None:
            return line.strip()
    return ""


def is_list_of_errors(text: str) -> bool:
    """Return whether a text that starts like an error consists of several such lines."""
    lines = [line for line in text[: 8 * HEAD].splitlines()[:_LISTED] if line.strip()]
    return len(lines) > _FEW and all(says_error(line) for line in lines)


_FEW: Final = 2
# A status line as the whole answer or its first line; inside a log it is a line of the log.
_SERVER_ERROR: Final = re.compile(
    r"\W{0,4}(?:4(?!04)\d\d|5\d\d)\W{1,3}(?:internal server error|bad gateway|service unavailable|gateway time-?out"
    r"|too many requests|unauthori[sz]ed|forbidden|bad request|request time-?out)\b",
    re.IGNORECASE,
)
# "cat: f: No such file or directory", "ls: cannot access 'x'", "/bin/bash: line 7: x: command not found"
_COMPLAINT: Final = re.compile(
    r"(?:[\w./+$~-]{1,60}: [^\n]{0,300}?\b(?:no such file or directory|permission denied|command not found"
    r"|not a directory|is a directory|operation not permitted|missing (?:operand|argument)|syntax error|failed to"
    r"|cannot (?:access|stat|open|execute|create|remove|find|read|write|overwrite)"
    r"|(?:invalid|unrecogni[sz]ed|illegal|unknown) (?:option|argument|operand)|not recognized)[^\n]*"
    r"|[^\n]{0,80}: -c: line \d+: [^\n]*|try '[^\n]{1,80}' (?:or '[^\n]{1,80}' )?for more information\.?)\s*$",
    re.IGNORECASE,
)


# one of these is in each complaint: asking for them first spares most long answers the expression
_COMPLAINING: Final = (
    *("directory", "denied", "not found", "not permitted", "missing", "error", "failed to", "cannot", "option"),
    *("argument", "operand", "recogni", "for more information", " line "),
)


def _is_complaint(text: str) -> bool:
    """Return whether every line is a command's complaint: a line of output beside it would be a result.

    A text that is longer than ``_MOST_CHARS`` must consist of one complaint, again and again.
    """
    if ": " not in text[:80]:
        return False
    if len(text) > HEAD:
        first = text[:HEAD].lstrip().partition("\n")[0]
        said = first.lower()
        if not any(word in said for word in _COMPLAINING) or _COMPLAINT.match(first) is None:
            return False
        text = text.strip()
    if len(text) > _MOST_CHARS:
        return text.endswith(first) and text.count(f"{first}\n") == text.count("\n")
    return all(_COMPLAINT.match(line) is not None for line in text.splitlines() if line.strip())


# what a search of a whole tree says of each place that it may not read; what it has found stands beside it
_UNREADABLE: Final = re.compile(r"(?:find|[efz]?grep|rg|ag|fd|du|tree|ls): [^\n]{0,300}: Permission denied\s*$")


def unreadable_places(text: str) -> int:
    """Return how many places a search may not read; 0 where it says anything else."""
    if "Permission denied" not in text or len(text) > _MOST_CHARS:
        return 0
    lines = [line for line in text.splitlines() if line.strip()]
    return len(lines) if all(_UNREADABLE.match(line) is not None for line in lines) else 0


# ---- Texts that contain JSON, as some servers send it, with or without a note, a code fence or a reminder around it.

_MOST_CHARS: Final = 4_096  # a longer text is data, unless it starts like a report of a failure
_MOST_OF_A_FAILURE: Final = 16_384
_NOTE_BEFORE, _NOTE_AFTER = 240, 400  # characters around JSON that are looked through
_TELLING_JSON: Final = re.compile(
    r'"(?=[cdefhimors])'  # how each name begins: most others are left at once
    r"(?:is_?error|errors?|error_?(?:message|code)|exception|ok|success|succeeded|successful|state|outcome|result_status"
    r"|(?:http_)?status(?:_?code)?|response_type|exit_?code|return_?code|result|results|output|response|data|items|content"
    r'|matches|documents|rows|hits|records|entries|files|organic_results|search_results)"\s{0,4}:',
    re.IGNORECASE,
)
_FAILING: Final = re.compile(
    r'"(?:is_?error"\s{0,4}:\s{0,4}true|error(?:_?message|_?code)?"\s{0,4}:\s{0,4}(?!null|false|""|\[\]|\{\}|0)'
    r'|(?:ok|success|succeeded|successful)"\s{0,4}:\s{0,4}false|status"\s{0,4}:\s{0,4}"(?:error|fail))',
    re.IGNORECASE,
)
_REMINDER: Final = re.compile(
    r"\s{0,40}<((?:system[_-])?(?:reminder|note|warning))>[\s\S]{0,4000}?</\1>\s{0,40}", re.IGNORECASE
)
_decoder: Final = json.JSONDecoder()


def bare(text: str) -> str:
    """Return a text without a reminder that a harness has put before or after it."""
    if text[:44].lstrip()[:1] == "<" and (found := _REMINDER.match(text)) is not None:
        text = text[found.end() :]
    if text[-44:].rstrip()[-1:] == ">":
        at = max(text.rfind(f"<{name}", -_MOST_OF_A_REMINDER) for name in _REMINDERS)
        if at >= 0 and (found := _REMINDER.match(text, at)) is not None and found.end() == len(text):
            text = text[:at].rstrip()
    return text


_MOST_OF_A_REMINDER: Final = 4_200  # characters, with its tags
_REMINDERS: Final = (
    "system-reminder",
    "system_reminder",
    "reminder",
    "system-note",
    "note",
    "system-warning",
    "warning",
)


def embedded_json(text: str) -> Any:
    """Return the dict or list that a text consists of, or None. Only what may tell an outcome is parsed."""
    if len(text) > _MOST_OF_A_FAILURE:
        return None
    start, end = text[:40].lstrip()[:1], text[-40:].rstrip()[-1:]
    if (start, end) not in (("{", "}"), ("[", "]")):
        return None
    if len(text) > _MOST_CHARS:
        if _FAILING.search(text, 0, HEAD) is None:
            return None
    elif len(text) > 8 and _TELLING_JSON.search(text) is None:  # "[]" and "{}" tell an outcome, too
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def failing_json(text: str) -> Any:
    """Return the dict inside a text with a note or a code fence around it; None unless it may be a failure."""
    at = text.find("{", 0, _NOTE_BEFORE)
    if at < 0 or len(text) > _MOST_OF_A_FAILURE or _FAILING.search(text, at, at + HEAD) is None:
        return None
    try:
        value, end = _decoder.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None
    return value if len(text) - end <= _NOTE_AFTER else None
