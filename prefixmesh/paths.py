"""Where prefixmesh keeps files of its own: the only place that reads ``PREFIXMESH_HOME``."""

import os
from pathlib import Path


def home() -> Path:
    """The folder for state and downloaded models: ``$PREFIXMESH_HOME``, else ``~/.prefixmesh``."""
    return Path(os.environ.get("PREFIXMESH_HOME") or Path.home() / ".prefixmesh")


def models_folder() -> Path:
    """Where ``prefixmesh models pull`` puts models."""
    return home() / "models"


def fleet_secret_file() -> Path:
    """The fleet secret, mode 600."""
    return home() / "fleet_secret"


def router_state_file() -> Path:
    """What the router of ``prefixmesh up`` remembers from one life to the next."""
    return home() / "router_state.json"


def fleet_state_file() -> Path:
    """The endpoints of the fleet that ``prefixmesh up`` started last."""
    return home() / "fleet.json"
