"""What a server answers when a caller names a model or an adapter that it does not have: the same words on every hop."""

from typing import Final

from prefixmesh.errors import InvalidRequestError

_SHOWN_CHARS: Final = 80
"""How much of a name that the caller made up is quoted back."""


def check_model(served: str, model: str, adapter: str = "") -> None:
    """Raise InvalidRequestError unless ``model`` is the one that is ``served`` (or empty, which means it) and no adapter is asked
    for: there are none yet."""
    if model and model != served:
        raise InvalidRequestError(
            "model", f"{model[:_SHOWN_CHARS]!r} is not served here; the model is {served!r}"
        )
    if adapter:
        raise InvalidRequestError("adapter", f"no adapter {adapter[:_SHOWN_CHARS]!r} is loaded here")
