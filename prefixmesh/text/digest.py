"""One name for everything that turns a caller's text into tokens, by which two processes make sure that they do it alike."""

import hashlib
from typing import Final

from prefixmesh.text.chat_template import ChatTemplate
from prefixmesh.text.tokenizer import Tokenizer

DIGEST_BYTES: Final = 16


def text_digest(tokenizer: Tokenizer, template: ChatTemplate | None) -> str:
    """BLAKE2b of tokenizer and chat template, in hexadecimal. Equal ones give equal tokens for every prompt."""
    parts = (tokenizer.digest, "" if template is None else template.digest)
    return hashlib.blake2b("/".join(parts).encode(), digest_size=DIGEST_BYTES).hexdigest()
