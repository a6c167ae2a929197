"""`dataflow live RUN`: a page, on this machine alone, that shows runs from their folders; it
changes nothing.

`guard` decides: pure, tested with plain values. `series`, `looks`, `rollouts`, `marks` and
`picture` read, each no more than a bound at a time; `answers` says what stands at which address;
`server` speaks HTTP; `page/` is what a browser gets.
"""
