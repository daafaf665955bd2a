"""The static-shape engine: prefill and decode never share a step, and every step has one of a few sizes.

On accelerators that compile ahead of time each size is a graph; on CPU a graph that Inductor made for that size plays
its part. Chosen with ``--static-shapes`` or by bucket keys in ``--additional-config`` (docs/static-shapes.md);
touches nothing when it is not. ``buckets`` and ``steps`` are pure, ``scheduler`` runs in the engine core's process,
``worker``, ``runner``, ``graphs``, ``store`` and ``warmup`` in the workers'.
"""
