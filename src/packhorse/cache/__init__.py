"""Sequences <-> disk, without torch."""

from packhorse.cache.cache import Cache, CacheSummary, build_cache, open_cache, update_cache
from packhorse.cache.settings import CacheSettings, DataSettings

__all__ = ["Cache", "CacheSettings", "CacheSummary", "DataSettings", "build_cache", "open_cache", "update_cache"]
