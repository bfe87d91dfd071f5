"""A page on this machine to edit a spec, with its picture, counts and problems as one types. No torch is needed."""

from seqblocks.serve.server import Served, serve

__all__ = ["Served", "serve"]
