"""A small vLLM on the CPU: what the adapter touches of it, with the same names and signatures.

``parts`` is what all versions have in common, ``managers`` the capture loops, ``speculators`` the
draft, ``runner`` the target's steps, ``engine`` requests that run on it, and ``modules`` puts a
version into ``sys.modules``. A test compares it with ``signatures.json``. Models are arithmetic on
integers, exact and sensitive to every value of the metadata that an attention kernel would read.
"""
