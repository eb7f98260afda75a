"""One file for each subject; each has a function that takes the owner under test.

They run in the order of :data:`graphshare.testing.conformance.STAGES`: captures first, since the
rest compares with what they return.
"""
