"""What the command lines of all benchmarks share. Needs no torch: ``compare``, ``registry`` and ``plot`` run without it.

A wrong argument ends in argparse's line and exit code 2, before anything is built or measured.
"""

import argparse


def parser(name, text, **options):
    """The parser of ``run.py bench NAME``. No abbreviations: a result keeps its command, and ``--repeat`` must not pass as ``--rep``."""
    return argparse.ArgumentParser(prog=f"run.py bench {name}", description=text, allow_abbrev=False, **options)


def saying(check):
    """``check`` as an argparse type. argparse shows the words of an ArgumentTypeError, but not those of a ValueError."""

    def convert(text):
        try:
            return check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def listed(check):
    """An argparse type: comma-separated words, each through ``check``, each result once."""

    def convert(text):
        found = list(dict.fromkeys(check(word) for word in text.split(",") if word))
        if not found:
            raise ValueError(f"{text!r} names nothing: give one, or several with commas between them")
        return found

    return saying(convert)


def one_of(what, names):
    """A check for :func:`listed`: the word is one of ``names``."""

    def check(word):
        if word not in names:
            raise ValueError(f"unknown {what} {word!r}: use {', '.join(names)}")
        return word

    return check


def positive(text):
    """A check: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a whole number of 1 or more")
    return int(text)
