"""Families with full attention: the whole output stands on a canvas of masks that every position sees.

A token that is committed changes the keys and values of all positions, so nothing is final and nothing can be
kept exactly. Each block of the canvas begins with a *full forward* over prompt and canvas (`full_forward`):
layer by layer, in chunks, first all keys and values of the layer, then its attention, so that one layer's KV
is on the device whatever the number of layers. It is the block's first step too. What comes next depends on
the request's ``cache``:

* ``none``, exact: every step is a full forward.
* ``prefix`` and ``dual`` (Fast-dLLM, arXiv 2505.22618), approximate: the rows of the full forward stay in
  the arena, those before the block or all but the block's, and the steps that follow compute the window alone
  (`window_step`): the block and what stands behind it, or the block. The next full forward makes them anew.

With offload the cached steps see of the prompt only its sinks, its recent window and the rows that the
block's own queries chose, exactly, while a layer's rows were on the device in the full forward; that is
approximate too. The others are dropped, since the next full forward computes them again. Only where
``refresh_step`` asks for a second choice within the block do the prompt's rows go to the host pool as they
are computed: the CPU selects there, and rows travel back. Rows of the canvas are all kept. Budget 1.0 keeps
every row, hence the tokens of the engine without offload.

`CanvasEngine` takes admission, memory, aborts and ends of requests from `Engine`. Full forwards take turns,
by (layer, read, chunk) units; windows of one length share a step. Where the host knows what a step commits,
it launches the next before it has read the last.
"""

from herald.engine.canvas.engine import CanvasEngine
from herald.engine.canvas.request import CanvasRequest

__all__ = ["CanvasEngine", "CanvasRequest"]
