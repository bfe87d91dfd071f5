"""Draw a spec: boxes in boxes, with shapes, counts and wires, as HTML, SVG, Mermaid or DOT. No torch is needed."""

from seqblocks.picture.drawing import Drawing, draw, drawing_of

__all__ = ["Drawing", "draw", "drawing_of"]
