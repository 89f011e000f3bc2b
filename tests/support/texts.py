"""Texts of every script, for tests of tokenising and detokenising."""

import random

MIXED_TEXTS = (
    "",
    " ",
    "   \n\n\t ",
    "The quick brown fox, don't you know? I'LL go.",
    "今天天气很好，我们去公园吧。",
    "日本語のテキストとカタカナ",
    "안녕하세요 세계",
    "مرحبا بالعالم، كيف حالك؟",
    "नमस्ते दुनिया",
    "👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 ❤️‍🔥",
    "e\u0301 \u200d \ufeff \u2028",
    "def f(x):\n\treturn {'a': x ** 2}  # ok\r\n",
    "In 2024 there were 1234567 of 89, not 0x1F.",
    "\ufffd is a character too",
)
"""One of each kind."""

_RANGES = (
    (0x20, 0x7E),
    (0xA0, 0x24F),
    (0x300, 0x36F),
    (0x600, 0x6FF),
    (0x900, 0x97F),
    (0x3040, 0x30FF),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0x1F300, 0x1FAFF),
)
_PARTS = (" ", "\n", "\u200d", "👩‍💻", "é", " 12", "don't", "...", "  ", "\r\n")


def random_texts(count: int, seed: int = 0) -> list[str]:
    """Seeded strings of mixed scripts (CJK, Hangul, Arabic, emoji with joiners, combining marks, code, digits)."""
    rng = random.Random(seed)

    def part() -> str:
        if rng.random() < 0.3:
            return rng.choice(_PARTS)
        low, high = rng.choice(_RANGES)
        return "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 12)))

    texts = ["".join(part() for _ in range(rng.randint(1, 8))) for _ in range(count - len(MIXED_TEXTS))]
    return [*MIXED_TEXTS, *texts][:count]
