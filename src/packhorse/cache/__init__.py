"""Sequences <-> disk, without torch.

The public names are loaded when they are used: a builder is pinned to its core before anything is loaded that counts
cores.
"""

import importlib

_PUBLIC = {
    "Cache": "packhorse.cache.cache",
    "CacheSettings": "packhorse.cache.settings",
    "CacheSummary": "packhorse.cache.cache",
    "DataSettings": "packhorse.cache.data_settings",
    "build_cache": "packhorse.cache.update",
    "open_cache": "packhorse.cache.update",
    "update_cache": "packhorse.cache.update",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'packhorse.cache' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
