"""One operator in the place of another while the run goes on: what is known, what is decided, who
is answered.
"""
