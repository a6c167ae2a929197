"""How busy episodes keep a generator whose worlds take their time; `python -m bench.episodes`."""
