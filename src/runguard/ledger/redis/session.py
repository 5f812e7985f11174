"""The operations of a Redis store beside reservations: marks, documents, records, claims and the purge."""

import json
from collections.abc import Sequence

from runguard.core.money import Amount
from runguard.ledger.identity import IDENTITY
from runguard.ledger.redis.encoding import moment_text, seconds_text
from runguard.ledger.redis.holds import AT_ONCE, MOST_BATCHES, RECORDS_KEPT, RedisHolds
from runguard.ledger.store import StoreError


class RedisSession(RedisHolds):
    """One connection with all operations of ``Session``."""

    # ---- marks and documents ----------------------------------------------------------------------------------------

    def first(self, key: str, mark: str, percent: float, limit: Amount) -> bool:
        return bool(self._run("mark", key, mark, json.dumps([percent, *limit])))

    def marks(self, key: str) -> dict[str, tuple[float, Amount]]:
        found: dict[str, tuple[float, Amount]] = {}
        names_and_texts = self._do("HGETALL", f"{self._prefix}m:{key}")
        for mark, text in zip(names_and_texts[::2], names_and_texts[1::2], strict=True):
            percent, usd, tokens, calls = json.loads(text)
            found[mark] = percent, (usd, tokens, calls)
        return found

    def unmark(self, key: str, marks: Sequence[str]) -> None:
        if marks:
            self._do("HDEL", f"{self._prefix}m:{key}", *marks)

    def get(self, name: str) -> tuple[int, str]:
        expected = self._seen.text
        identity, version, text = self._values(f"t:{IDENTITY}", f"v:{name}", f"t:{name}")
        self._seen.meet(expected, identity or "")
        if (version is None) != (text is None):
            raise StoreError(
                f"{self._name}: the document '{name}' is damaged: its version or its text is missing. Restore "
                "the store from a backup, "
                "or remove the document: runguard store repair"
            )
        return (int(version), text) if version is not None and text is not None else (0, "")

    def put(self, name: str, version: int, text: str) -> bool:
        return bool(self._run("put", name, str(version), text))

    def drop(self, name: str) -> None:
        self._do("DEL", f"{self._prefix}v:{name}", f"{self._prefix}t:{name}")

    def now(self) -> float:
        seconds, micros = self._do("TIME")
        return float(f"{seconds}.{int(micros):06d}")

    # ---- records ----------------------------------------------------------------------------------------------------

    def append(self, kind: str, ref: str, text: str) -> None:
        self._run("append", kind, ref, text, str(RECORDS_KEPT))

    def tail(self, kind: str, count: int) -> list[tuple[float, str, str]]:
        if count <= 0:
            return []
        found = self._do("XREVRANGE", f"{self._prefix}r:{kind}", "+", "-", "COUNT", str(count))
        records = [dict(zip(fields[::2], fields[1::2], strict=True)) for _, fields in reversed(found)]
        return [(float(record["at"]), record["ref"], record["text"]) for record in records]

    def page(self, kind: str, after: str, count: int) -> list[tuple[str, float, str, str]]:
        if count <= 0:
            return []
        millis, _, number = after.partition("-")
        first = f"{millis}-{int(number) + 1}" if after else "-"  # "(" for "after" needs Redis 6.2
        found = self._do("XRANGE", f"{self._prefix}r:{kind}", first, "+", "COUNT", str(count))
        records = [(name, dict(zip(fields[::2], fields[1::2], strict=True))) for name, fields in found]
        return [(name, float(record["at"]), record["ref"], record["text"]) for name, record in records]

    def about(self, kind: str, ref: str, *, last: int | None = None) -> list[tuple[float, str]]:
        since = "0" if last is None else str(-last)
        ids = self._do("LRANGE", f"{self._prefix}i:{len(kind.encode())}:{kind}:{ref}", since, "-1")
        found: list[str] = []
        for start in range(0, len(ids), AT_ONCE):
            found += self._run("about", kind, *ids[start : start + AT_ONCE])
        return [(float(at), text) for at, text in zip(found[::2], found[1::2], strict=True)]

    def beat(self, run: str, worker: str, text: str, *, ended: bool = False) -> int:
        return int(self._run("beat", run, json.dumps([worker, text]), "1" if ended else "0"))

    def running(self, within: float) -> list[tuple[str, str, float, str]]:
        found = self._run("running", seconds_text(within))
        runs = []
        for run, beat, facts in zip(found[::3], found[1::3], found[2::3], strict=True):
            worker, text = json.loads(facts)
            runs.append((run, worker, float(beat), text))
        return runs

    def claim(self, key: str, ttl: float) -> str:
        return str(self._run("claim", key, seconds_text(ttl)))

    def finish(self, key: str, done: bool) -> None:
        self._run("finish", key, "1" if done else "0")

    def purge(self, older_than: float) -> None:
        old = moment_text(self.now() - float(seconds_text(older_than)))
        for what in ("expire", "holds", "claims", "runs", "accounts", "passing"):
            self._batches(what, old)
        for kind in self._do("SMEMBERS", f"{self._prefix}kinds"):
            self._batches("records", old, kind)

    def _batches(self, what: str, old: str, kind: str = "") -> None:
        skip = 0
        for _ in range(MOST_BATCHES):
            seen, kept = self._run("purge", what, old, str(AT_ONCE), str(skip), kind)
            if seen < AT_ONCE:
                return
            skip += kept
