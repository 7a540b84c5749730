"""Errors of a launch that the user can do something about."""


class LaunchError(Exception):
    """Shown without a traceback: the message says what is wrong and what to type next."""
