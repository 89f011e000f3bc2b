"""What adapters are called: the rule for their names, for the settings that load some at start, and for every call."""

import re
from typing import Final

MAX_NAME_CHARS: Final = 128

NAME_RULE: Final = (
    f"1 to {MAX_NAME_CHARS} characters: letters, digits, '.', '_', '-'; the first a letter or digit"
)

_NAME: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_CHARS - 1}}}")


def is_adapter_name(text: str) -> bool:
    """Whether ``text`` follows ``NAME_RULE``. O(1): no more than the longest name is looked at."""
    return _NAME.fullmatch(text) is not None


def split_adapter_setting(setting: str) -> tuple[str, str]:
    """``NAME=PATH`` as the two; the name is empty where there is none or it breaks the rule."""
    name, _, path = setting.partition("=")
    return (name if is_adapter_name(name) else "", path)
