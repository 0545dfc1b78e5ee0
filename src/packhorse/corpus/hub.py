"""A name on the Hugging Face hub, or anything that `datasets` loads -> a data set.

`datasets` is imported only here, and only when it is needed: that takes a second.
"""

import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from packhorse.corpus.documents import Reading
from packhorse.corpus.filters import parse_filters
from packhorse.errors import SourceError


@dataclass(frozen=True, kw_only=True)
class Downloads:
    """How data sets of the hub are fetched."""

    streaming: bool = False
    """Read as they come; a source may say otherwise for itself."""
    folder: str | None = None
    """Where they are kept; by default where `datasets` keeps them."""
    retries: int = 5
    timeout_seconds: float = 30.0


RETRIES_OF_A_PATH = 2
"""Without a network, for a name that is probably a mistyped path."""

AS_USUAL = Downloads()
"""What holds when nothing is said."""


def load_data_set(arguments: dict[str, Any], downloads: Downloads, streaming: bool) -> Any:
    """What `datasets.load_dataset` gives for these arguments.

    Raises:
        SourceError: there is no such data set, or it cannot be fetched.
    """
    import datasets
    from huggingface_hub import constants

    # Both libraries look at these whenever they fetch something.
    constants.HF_HUB_DOWNLOAD_TIMEOUT = constants.HF_HUB_ETAG_TIMEOUT = downloads.timeout_seconds
    attempts = downloads.retries + 1
    datasets.config.STREAMING_READ_MAX_RETRIES = datasets.config.STREAMING_OPEN_MAX_RETRIES = attempts
    if downloads.folder is not None:
        arguments = {"cache_dir": downloads.folder, **arguments}
    known = set(inspect.signature(datasets.load_dataset).parameters)
    # What reads files (`data_files`) has arguments of its own.
    if "data_files" not in arguments and (unknown := set(arguments) - known):
        raise SourceError(f"`datasets.load_dataset` has no argument {', '.join(sorted(unknown))}.")
    retries = downloads.retries
    if _is_like_a_path(arguments) and not constants.HF_HUB_OFFLINE:
        tell_once(f"{arguments['path']} is no local path: trying the Hugging Face hub.")
        retries = retries if _is_known(constants.ENDPOINT) else min(retries, RETRIES_OF_A_PATH)
    try:
        return _again(lambda: datasets.load_dataset(**arguments, streaming=streaming), retries)
    except Exception as error:  # network, name, configuration and format errors of several libraries
        said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if "data_files" in arguments:
            files = arguments["data_files"]
            raise SourceError(f"`datasets` cannot read {files} as {arguments['path']}:\n  {said}") from None
        raise SourceError(
            f"The data set {arguments['path']} is neither a local file or folder, nor can it be loaded from the "
            f"Hugging Face hub:\n  {said}\n"
            "Check the name, `name` (the configuration), `split` and `revision`, and the network."
        ) from None


def _is_like_a_path(arguments: dict[str, Any]) -> bool:
    """A name with an owner may be a path with a typing error, unless it comes with files of its own."""
    return "/" in arguments["path"] and "data_files" not in arguments and not os.path.exists(arguments["path"])


@cache
def tell_once(text: str) -> None:
    """Tell the user something that is found out again whenever the source is opened."""
    logging.getLogger(__name__).warning(text)


def _again(load: Callable[[], Any], retries: int) -> Any:
    """What `load` gives, tried again when the network fails; what was downloaded before stays."""
    from huggingface_hub import constants

    for attempt in range(retries + 1):
        try:
            with _our_retries_only(), offline_without_network():
                return load()
        except Exception as error:
            # By name: the hub's client changes the library that it speaks HTTP with.
            names = {kind.__name__ for kind in type(error).__mro__}
            is_network = bool(names & {"ConnectionError", "TimeoutError", "TransportError"})
            if attempt == retries or constants.HF_HUB_OFFLINE or not is_network:
                raise
            seconds = min(2**attempt, 60)
            logging.getLogger(__name__).warning(
                "The Hugging Face hub cannot be reached (%s): trying again in %d s.", type(error).__name__, seconds
            )
            time.sleep(seconds)
    raise AssertionError("the last attempt returns or raises")


def _is_known(address: str) -> bool:
    """Whether the host of a web address can be found; what stands behind a proxy counts as found."""
    # Not at every start: they take as long as a third of numpy.
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    try:
        return bool(getproxies()) or bool(socket.getaddrinfo(urlsplit(address).hostname, None))
    except OSError:
        return False


@contextmanager
def offline_without_network(name: str = "") -> Iterator[None]:
    """What was downloaded before is taken at once, without the half minute that the hub's client tries in vain.

    Args:
        name: What is wanted; a local path asks nobody.
    """
    from huggingface_hub import constants

    libraries = [constants, *filter(None, [sys.modules.get("datasets.config")])]
    before = [library.HF_HUB_OFFLINE for library in libraries]
    is_offline = not (name and os.path.exists(name)) and not all(before) and not _is_known(constants.ENDPOINT)
    for library, was in zip(libraries, before, strict=True):
        library.HF_HUB_OFFLINE = was or is_offline
    try:
        yield
    finally:
        for library, was in zip(libraries, before, strict=True):
            library.HF_HUB_OFFLINE = was


@contextmanager
def _our_retries_only() -> Iterator[None]:
    """Keep the hub's client from telling of each of its own tries, six in each of ours."""

    def is_news(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return " thrown while requesting " not in message and not message.startswith("Retrying in ")

    logger = logging.getLogger("huggingface_hub.utils._http")
    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)


def columns_read(reading: Reading) -> list[str]:
    """The columns that are read."""
    return list(dict.fromkeys([reading.column, *(c.column for c in parse_filters(reading.filters))]))


def check_features(data: Any, reading: Reading, name: str) -> None:
    """Refuse a data set without the columns that are asked for.

    Raises:
        SourceError: with the columns that it has.
    """
    columns = data.column_names
    for column in columns_read(reading) if columns is not None else ():
        if column not in columns:
            raise SourceError(
                f"The data set {name} has no column {column!r}. It has: {', '.join(columns)}.\n"
                "Set `text_column` to the one that holds the text, and `filters` to those that it has."
            )
