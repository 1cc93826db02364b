"""Errors that the command line reports in one sentence, without a traceback."""


class ToldError(Exception):
    """There is no result. The message says why, and what to do."""
