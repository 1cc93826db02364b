"""Errors that the command line tells of in a sentence, without a traceback."""


class ToldError(Exception):
    """There is no result. The message says why, and what to do."""
