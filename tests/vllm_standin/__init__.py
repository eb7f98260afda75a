"""A small vLLM on the CPU: what the adapter touches of it, with the same names and signatures.

``parts`` is what all versions have in common, ``model`` the models, ``managers`` the capture loops,
``speculators`` the draft, ``runner`` the target's steps, ``engine`` requests that run on it,
``modules`` a version under the names that vLLM's modules have, and ``installed`` puts it into
``sys.modules``. A test compares it with ``signatures.json``.
"""
