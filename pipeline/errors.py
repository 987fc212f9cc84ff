"""The two kinds of failure that a user meets; everything else is a bug and propagates."""


class ConfigError(ValueError):
    """Wrong usage or configuration: names the key, the value and what is allowed (exit code 2)."""


class WorkError(RuntimeError):
    """The work failed: says where it stopped; the same command continues (exit code 1)."""
