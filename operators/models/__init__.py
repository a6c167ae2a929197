"""Language models as modules: loaded, with low-rank adapters, with adapters merged."""
