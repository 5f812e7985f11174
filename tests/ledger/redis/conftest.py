"""Fixtures of this directory."""

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from runguard.ledger.redis import RedisSession, RedisStore
from tests.kit.valkey_server import valkey


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with valkey() as address:
        yield address


@pytest.fixture
def space(url: str) -> str:
    return f"{url}?namespace=t{uuid.uuid4().hex}"


@pytest.fixture
def session(space: str) -> Iterator[RedisSession]:
    made = RedisStore(space).connect(5)
    yield made
    made.close()


@pytest.fixture
def raw(url: str) -> Iterator[Any]:
    with redis.Redis.from_url(url, decode_responses=True) as client:
        yield client
