"""One file for each subject; each has a function that takes the owner under test.

:func:`graphshare.testing.check_owner` runs them in order: captures first, since the rest compares
with what they return.
"""
