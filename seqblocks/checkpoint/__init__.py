"""Saving and loading models, and reading official weights through a spec's own `checkpoint:` map."""

from seqblocks.analysis.translation import official_name
from seqblocks.checkpoint.folder import load, save
from seqblocks.checkpoint.official import load_official

__all__ = ["load", "load_official", "official_name", "save"]
