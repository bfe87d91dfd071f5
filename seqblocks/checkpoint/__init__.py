"""Save and load models, and read official weights through the `checkpoint:` map of a spec."""

from seqblocks.analysis.checkpoint_maps.translation import official_name
from seqblocks.checkpoint.convert import convert, to_gguf
from seqblocks.checkpoint.folder import load, load_extra, save
from seqblocks.checkpoint.official import load_official
from seqblocks.checkpoint.pretrained import from_pretrained

__all__ = ["convert", "from_pretrained", "load", "load_extra", "load_official", "official_name", "save", "to_gguf"]
