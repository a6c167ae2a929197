"""One process has the ledger open, for workers on any host: the service, its clients, and what they
say.
"""
