"""Who may use the gateway, who pays for a request, and where it goes.

``gateway/proxy`` asks for each request. Keys of providers pass through: only a digest of them is kept, as a name.
"""

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import httpx
from starlette.datastructures import Headers
from starlette.types import Scope

from runguard.core.decision import printable
from runguard.core.errors import PolicyError
from runguard.core.identity import digest
from runguard.gateway.conversations import Payer

# ---- Where a request goes: one fixed address for each provider.

PUBLIC: Final = {
    "openai": "https://api.openai.com/v1",
    "anthropic": "https://api.anthropic.com",
    "gemini": "https://generativelanguage.googleapis.com",
}
_CHATGPT: Final = "https://chatgpt.com/backend-api/codex"  # for Codex with a login instead of a key
_CHATGPT_ACCOUNT: Final = "chatgpt-account-id"


class Target(NamedTuple):
    """The provider that a request is for, and its path there."""

    provider: str
    path: str  # decoded and tidied, to see what is asked for
    url: httpx.URL


class Upstreams:
    """The address of each provider. Requests go nowhere else."""

    def __init__(self, given: Mapping[str, str] | None = None) -> None:
        self._bases = {name: _base(name, (given or {}).get(name) or PUBLIC[name]) for name in PUBLIC}
        is_public = self._bases["openai"] == _base("openai", PUBLIC["openai"])
        self._chatgpt = _base("openai", _CHATGPT) if is_public else self._bases["openai"]
        if unknown := set(given or {}) - set(PUBLIC):
            raise PolicyError(f"upstream {min(unknown)!r}: not a provider; use {', '.join(PUBLIC)}")

    def target(self, raw_path: str, query: str, headers: Mapping[str, str]) -> Target:
        """Return where a request goes. The first part of its path may name the provider.

        ``raw_path`` begins with a slash. It is only ever a path: no part of it can become the host.
        """
        provider = raw_path[1:].partition("/")[0]
        if provider in self._bases:
            raw_path = raw_path[len(provider) + 1 :]
        else:
            provider = _provider_of(unquote(raw_path), headers)
        if provider == "openai" and (raw_path == "/v1" or raw_path.startswith("/v1/")):  # the address has it already
            raw_path = raw_path[3:]
        base = self._bases[provider]
        if provider == "openai" and _CHATGPT_ACCOUNT in headers:
            base = self._chatgpt
        whole = f"{base.path.rstrip('/')}{raw_path}{'?' if query else ''}{query}" or "/"
        path = re.sub("/{2,}", "/", unquote(raw_path)).rstrip("/")
        return Target(provider, path, base.copy_with(raw_path=whole.encode()))


def _base(name: str, url: str) -> httpx.URL:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or "@" in url:
        raise PolicyError(f"upstream {name}: not an http(s) address without a query: {printable(url)!r}")
    return httpx.URL(url)


def _provider_of(path: str, headers: Mapping[str, str]) -> str:
    if path.startswith(("/v1/messages", "/v1/complete")) or "anthropic-version" in headers:
        return "anthropic"
    if path.startswith(("/v1beta", "/v1alpha", "/upload/")) or ("/models/" in path and ":" in path):
        return "gemini"
    return "openai"


# ---- Who may use the gateway.

TOKEN_HEADER: Final = "x-runguard-token"
TOKEN_PATH: Final = "/token/"
_DOTS: Final = frozenset({".", ".."})
_LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")
_HTTP_PORT: Final = 80  # which clients leave out


class Refused(NamedTuple):
    """Why a request goes nowhere."""

    status: int
    text: str


@dataclass(frozen=True, slots=True)
class Access:
    """Lets in who may use the gateway, and says who pays.

    ``token``: a secret in the header ``x-runguard-token``, or in the path: ``/token/SECRET/v1``. "" admits every
    program that reaches the port. ``hosts``: the names under which the gateway is asked for; a page in a browser cannot
    use another name that resolves to this machine. Empty: any. A request with two keys of providers is refused where
    the key says who pays: the provider may use the other one. ``max_body``: bytes of a request to a model.
    """

    app: str = "gateway"
    user: str = ""  # "": by the key of the provider
    session: str = ""
    user_header: str = ""  # a header that only trusted programs in front of the gateway can set
    token: str = ""
    hosts: frozenset[str] = frozenset()
    max_body: int = 64_000_000

    @staticmethod
    def loopback(port: int, host: str = "127.0.0.1") -> frozenset[str]:
        """Return the names of this machine on a port. ``host``: one more of them."""
        names = {*_LOOPBACK, f"[{host}]" if ":" in host else host}
        return frozenset(f"{name}:{port}" for name in names) | (names if port == _HTTP_PORT else set())

    def admit(self, scope: Scope, headers: Headers) -> str | Refused:
        """Return the path of an admitted request, as it was sent."""
        raw_path: str = scope["raw_path"].decode("latin-1")
        if self.hosts and headers.get("host", "").lower() not in self.hosts:
            return Refused(421, f"this gateway answers at {min(self.hosts)} only")
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return Refused(403, "a web page of another site cannot use this gateway")
        if headers.get("upgrade", "").lower() == "websocket":
            return Refused(426, "this gateway has no websockets; use the HTTP interface of the provider")
        given = headers.get(TOKEN_HEADER, "")
        if raw_path.startswith(TOKEN_PATH):
            secret, _, rest = raw_path[len(TOKEN_PATH) :].partition("/")
            given, raw_path = unquote(secret), f"/{rest}"
        if self.token and not hmac.compare_digest(given.encode(), self.token.encode()):
            return Refused(
                401, f"this gateway needs its token: header {TOKEN_HEADER}, or {TOKEN_PATH}TOKEN in the path"
            )
        is_plain = raw_path.startswith("/") and _DOTS.isdisjoint(unquote(raw_path).split("/"))
        if not is_plain or "#" in raw_path or b"#" in scope["query_string"]:
            return Refused(400, "this gateway is no proxy: ask for a plain path of a provider")
        query = scope["query_string"].decode("latin-1")
        if not self._named_user(headers) and len(_keys_of(headers, query)) > 1:
            return Refused(400, "this request has two keys of a provider, so that nobody can say who pays: send one")
        return raw_path

    def payer(self, headers: Headers, query: str) -> Payer:
        """Return who pays: a trusted header, the program that was started with this gateway, or the provider's key."""
        return Payer(self.app, self._named_user(headers) or _key_name(headers, query), self.session)

    def _named_user(self, headers: Headers) -> str:
        return (headers.get(self.user_header, "") if self.user_header else self.user)[:_LONGEST]


_LONGEST: Final = 200
PAYERS_KEY_CHARS: Final = 12  # of the digest of a key
_KEYS: Final = ("authorization", "x-api-key", "x-goog-api-key", "api-key", "x-litellm-api-key")


def _key_name(headers: Headers, query: str) -> str:
    """Return a name for the provider's key of a request, from which the key cannot be found out."""
    secret = min(_keys_of(headers, query), default="")
    return f"key-{digest(secret).hex()[:PAYERS_KEY_CHARS]}" if secret else "no-key"


def _keys_of(headers: Headers, query: str) -> set[str]:
    """Return the different keys of a request: the same key may be in several places, and its scheme in any spelling."""
    given = [value for name in _KEYS for value in headers.getlist(name)] + parse_qs(query).get("key", [])
    return {words[-1] for value in given if (words := value.split())}


# ---- What a client says about itself: names, which decide about nothing that is paid.

_SESSIONS: Final = ("session-id", "session_id")
_VENDORS: Final = ("-session-id", "-session_id", "-conversation-id")


def session_of(headers: Headers) -> str:
    """Return the session that the client names, as Claude Code, Codex and opencode do. "" for others."""
    for name, value in headers.items():
        if value and (name in _SESSIONS or name.endswith(_VENDORS)):
            return value[:_LONGEST]
    return ""


def agent_of(headers: Headers) -> str:
    """Return the name of the program, as it gives it: claude-cli, OpenAI, codex."""
    return agent_named(headers.get("user-agent", ""))


def agent_named(user_agent: str) -> str:
    """Return the name at the beginning of a user agent."""
    name = user_agent.partition("/")[0].strip()
    kept = "".join(char if char.isalnum() or char in "-_." else "-" for char in name)[:40]
    return kept or "agent"
