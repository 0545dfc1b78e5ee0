"""Raw text to a trained long-context language model in one command.

The public names are loaded when they are used, so that `import packhorse` costs nothing and `packhorse.cache` never
imports torch.
"""

import importlib

__version__ = "0.1.0"

_PUBLIC = {
    "build_cache": "packhorse.cache",
    "open_cache": "packhorse.cache",
    "Cache": "packhorse.cache",
    "CacheSettings": "packhorse.cache",
    "InfiniAttentionConfig": "packhorse.models",
    "InfiniLlamaConfig": "packhorse.models",
    "InfiniLlamaForCausalLM": "packhorse.models",
    "InfiniQwen2ForCausalLM": "packhorse.models",
    "InfiniQwen3ForCausalLM": "packhorse.models",
    "LanguageModule": "packhorse.training",
    "TokenDataModule": "packhorse.training",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'packhorse' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
