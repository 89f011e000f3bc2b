"""The one door to adapters' files: only regular files, only below the adapter root, wherever links may point.

Whoever may load an adapter names a path; nothing outside the root may be read on the strength of that, and nothing that is
no plain file may be waited for.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

from prefixmesh.errors import ModelFileError

MAX_PATH_CHARS: Final = 1024
"""Names are looked up piece by piece; a longer one is no name."""

PICKLED_SUFFIXES: Final = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


class AdapterRoot:
    """The folder below which adapters lie; without one (None) there are none."""

    def __init__(self, root: str | None) -> None:
        self._root = None if root is None else Path(root)

    def open(self, folder: str, name: str) -> BinaryIO:
        """Open the file ``name`` in ``folder``, which is relative to the root. Raises ModelFileError.

        Every link is followed first, and the place where it ends must be below the root. The caller closes the file.
        """
        path = self._resolve(folder, name)
        try:
            # Without waiting: opening a named pipe would last until somebody writes.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise ModelFileError(f"{folder}/{name} cannot be opened: {error.strerror}") from error
        try:
            # The path was looked at before it was opened; what counts is where it led then.
            if not Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(self._resolved_root()):
                raise ModelFileError(_outside(folder))
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ModelFileError(f"{folder}/{name} is not a regular file")
            return os.fdopen(descriptor, "rb")
        except BaseException:
            os.close(descriptor)
            raise

    def _resolve(self, folder: str, name: str) -> Path:
        if self._root is None:
            raise ModelFileError(
                "no adapter can be loaded: the worker was started without an adapter_root (--adapter-root)"
            )
        if not folder or len(folder) > MAX_PATH_CHARS:
            raise ModelFileError(f"1 to {MAX_PATH_CHARS} characters are needed, got {len(folder)}")
        try:
            root = self._resolved_root()
            try:
                place = (root / folder).resolve(strict=True)
                if not place.is_relative_to(root):
                    raise ModelFileError(_outside(folder))
                path = (place / name).resolve(strict=True)
            except FileNotFoundError as error:
                raise ModelFileError(self._missing(folder, name)) from error
        except (OSError, ValueError, RuntimeError) as error:  # too long, a null character, links in a circle
            raise ModelFileError(f"{folder!r} cannot be opened: {type(error).__name__}") from error
        if not path.is_relative_to(root):
            raise ModelFileError(f"{folder}/{name} is a link to outside the adapter root")
        return path

    def _resolved_root(self) -> Path:
        assert self._root is not None
        return self._root.resolve(strict=True)

    def _missing(self, folder: str, name: str) -> str:
        """Why there is no such file. Only names are looked at, and only inside the root."""
        root = self._resolved_root()
        place = (root / folder).resolve()
        if not (place.is_relative_to(root) and place.is_dir()):
            return _outside(folder)
        pickled = next((x for x in PICKLED_SUFFIXES if (place / Path(name).with_suffix(x)).exists()), None)
        if pickled is not None:
            return f"{folder} has its weights in a {pickled} file, which could run code and is never opened: save as safetensors"
        return f"{folder} has no {name}"


def _outside(folder: str) -> str:
    """The same words for what lies elsewhere and for what does not exist: nobody learns what there is outside the root."""
    return f"there is no folder {folder!r} below the adapter root"
