"""Pickles read without being loaded.

`machine.run` interprets one stream and `streams.run_all` all of a bare pickle file: opcodes in, inert values out,
nothing imported or called. `allow.ALLOW` is the list of names that are interpreted, each by a handler that checks its
arguments. `emit.emit` writes pickles that torch's restricted reader accepts, `explain.explain` words a result.
"""
