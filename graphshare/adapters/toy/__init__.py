"""A little engine that decodes speculatively: its files in reading order.

``config`` (sizes), ``attention`` (paged attention in plain torch), ``cache`` (pages), ``model`` and
``draft`` (the two networks), ``batch`` and ``scheduler`` (what runs in a step), ``owner`` (who
writes the attention state), ``forwards`` (the three forwards that graphs capture),
``speculation`` (one step of the engine), ``reference`` (plain greedy decoding, the oracle),
``checkpoint``, ``text`` and ``train``.
"""
