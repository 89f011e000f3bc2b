"""What the engine needs of a grammar that an answer must follow. The maker is ``grammar``; here is only the shape, for pure code."""

from typing import Protocol

import numpy as np
import numpy.typing as npt


class AnswerGrammar(Protocol):
    """One answer's way through its grammar. The tokens it has taken are those of the answer so far."""

    @property
    def is_finished(self) -> bool:
        """Whether nothing may follow any more: the answer is complete."""
        ...

    @property
    def error(self) -> str:
        """Why the grammar cannot go on, safe to show; empty while it can."""
        ...

    @property
    def mask_words(self) -> int:
        """32-bit words of a mask: a bit for each token id."""
        ...

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        """Set the bits (the lowest first) of the ids that may come next, ends of the model's turn among them where the answer
        may be complete. Look at ``error`` afterwards."""
        ...

    def accept(self, token_id: int) -> None:
        """Take the token that was chosen. Look at ``is_finished`` and ``error`` afterwards."""
        ...
