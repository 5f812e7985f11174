"""A string that only ``reveal()`` shows."""

import os
from typing import Any, Final, Self

from runguard.core.exceptions import PolicyError

_FROM_ENVIRONMENT: Final = "env:"


class Secret:
    """Only ``reveal()`` returns the text. A secret from the environment is pickled as the name of its variable.

    Other secrets cannot be pickled, unless they are ``public``.
    """

    __slots__ = ("_public", "_text", "_variable")

    def __init__(self, text: str, variable: str = "", public: bool = False) -> None:
        self._text = text
        self._variable = variable
        self._public = public

    @classmethod
    def of(cls, value: object, where: str) -> Self:
        """Create a secret from a setting: the text itself, or ``env:NAME``.

        PolicyError names the setting and the variable, never the text.
        """
        if not isinstance(value, str):
            raise PolicyError(f"{where}: must be a text, not a {type(value).__name__}")
        if not value.startswith(_FROM_ENVIRONMENT):
            if not value:
                raise PolicyError(f"{where}: is empty; remove it, or write env:NAME to read a variable")
            return cls(value)
        variable = value.removeprefix(_FROM_ENVIRONMENT).strip()
        if not variable.replace("_", "").isalnum() or not variable.isascii():
            raise PolicyError(f"{where}: env: must be followed by the name of an environment variable")
        text = os.environ.get(variable, "").strip()  # secrets mounted from files end in a line break
        if not text:
            raise PolicyError(
                f"{where}: the environment variable {variable} is {'empty' if variable in os.environ else 'not set'}"
            )
        return cls(text, variable)

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"Secret({_FROM_ENVIRONMENT + self._variable if self._variable else '***'})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self._public:
            return type(self), (self._text, "", True)
        if not self._variable:
            raise TypeError("a literal secret cannot be pickled; write env:NAME, and set the variable where it is read")
        return type(self).of, (_FROM_ENVIRONMENT + self._variable, "alerts")
