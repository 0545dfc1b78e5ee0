"""Sequences <-> disk, without torch."""

from packhorse.cache.cache import Cache, CacheSummary
from packhorse.cache.data_settings import DataSettings
from packhorse.cache.settings import CacheSettings
from packhorse.cache.update import build_cache, open_cache, update_cache

__all__ = ["Cache", "CacheSettings", "CacheSummary", "DataSettings", "build_cache", "open_cache", "update_cache"]
