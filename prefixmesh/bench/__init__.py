"""How fast the parts are, measured on this machine and beside its own yardstick."""
