"""`dataflow live RUN`: a page, on this machine alone, that shows runs from their folders; it
changes nothing.

`series`, `looks`, `rollouts` and `marks` read a run's folder, each no more than a bound at a time.
`command` says what stands at which address; `server` admits requests and answers them with uvicorn
and starlette. `page/` is what a browser gets.
"""
