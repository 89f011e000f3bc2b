"""What a server answers when a caller names a model or an adapter that it does not have: the same words on every hop."""

from typing import Final

from prefixmesh.errors import InvalidRequestError

_SHOWN_CHARS: Final = 80
"""How much of a name that the caller made up is quoted back."""


def check_model(served: str, model: str) -> None:
    """Raise InvalidRequestError unless ``model`` is the one that is ``served``, or empty, which means it."""
    if model and model != served:
        raise InvalidRequestError("model", f"{shown_name(model)} is not served here; the model is {served!r}")


def unknown_adapter(name: str) -> InvalidRequestError:
    """The error of a request for an adapter that is not there. It names no other: a list is what ``ListModels`` is for."""
    return InvalidRequestError("adapter", f"no adapter {shown_name(name)} is loaded here")


def shown_name(name: str) -> str:
    """A name as errors quote it; a caller may have made up a long one."""
    return repr(name[:_SHOWN_CHARS])
