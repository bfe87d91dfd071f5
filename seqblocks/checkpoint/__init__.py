"""Saving and restoring models, and reading official weights through a spec's own `checkpoint:` map."""

from seqblocks.analysis.translation import official_name
from seqblocks.checkpoint.file import restore, save
from seqblocks.checkpoint.official import load_official

__all__ = ["load_official", "official_name", "restore", "save"]
