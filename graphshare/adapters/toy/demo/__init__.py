"""The demo of the toy engine: its files in reading order.

``arguments`` (options, checked), ``workload`` (what is decoded), ``metering`` (counts and clocks
around a runner), ``runs`` (one way of running the engine, and what it gave), ``planting`` (faults
put into the running engine), ``faults`` (what each of them is called and shows), ``trials`` (a
fault refused; a fault let through), ``screen`` (text while it comes), ``tables`` (what is shown at
the end), ``command`` (``graphshare demo``).
"""
