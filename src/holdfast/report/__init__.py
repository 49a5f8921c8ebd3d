"""One picture of a run, a checkpoint, or the difference of two: a file that needs nothing else.

`data` is what is shown, `read` finds it, `rules` says what is wrong, `panels` and `content_panels`
draw it, `page` puts it together, `trace` writes it for Perfetto.
"""
