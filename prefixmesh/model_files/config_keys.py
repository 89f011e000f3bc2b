"""Typed access to the keys of a model file, with errors that name the file, the architecture and the key."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from prefixmesh.errors import ModelFileError

SHOWN_CHARACTERS: Final = 80
"""How much of a value an error repeats: a file may hold a whole vocabulary where a number belongs."""


class Keys:
    """A mapping of a model file. A key that is null counts as absent. Keys are asked for without ``prefix``."""

    def __init__(
        self, path: Path, values: Mapping[str, Any], *, architecture: str = "", prefix: str = ""
    ) -> None:
        self._path = path
        self._values = values
        self._architecture = architecture
        self._prefix = prefix

    def within(self, key: str, values: Mapping[str, Any]) -> "Keys":
        """Access to the object ``values`` that lies under ``key``."""
        prefix = f"{self._prefix}{key}."
        named = {f"{prefix}{name}": value for name, value in values.items()}
        return Keys(self._path, named, architecture=self._architecture, prefix=prefix)

    def get(self, key: str) -> Any:
        """The value as it is; None when absent."""
        return self._values.get(self._prefix + key)

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number. Raises ModelFileError when it is none, or absent without a default."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.unsupported(key, "a whole number is needed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number. Raises ModelFileError when it is none, or absent without a default."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.unsupported(key, "a number is needed")
        return float(value)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """True or false. Raises ModelFileError when it is neither."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.unsupported(key, "true or false is needed")
        return value

    def refuse_unless(self, harmless: Mapping[str, Sequence[Any]]) -> None:
        """Refuse each of the keys whose value is not among its harmless ones; an absent or null key is harmless too."""
        for key, values in harmless.items():
            value = self.get(key)
            if value is not None and value not in values:
                raise self.unsupported(key, "not supported")

    def unsupported(self, key: str, problem: str) -> ModelFileError:
        """The error for a key whose value cannot be served."""
        value = repr(self.get(key))[:SHOWN_CHARACTERS]
        return ModelFileError(f"{self._where()}: {self._prefix}{key} is {value}: {problem}")

    def _get(self, key: str, default: float | None) -> Any:
        value = self.get(key)
        if value is not None:
            return value
        if default is None:
            raise ModelFileError(f"{self._where()} lacks the key {self._prefix}{key}")
        return default

    def _where(self) -> str:
        return f"{self._path} ({self._architecture})" if self._architecture else str(self._path)
