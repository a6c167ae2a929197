"""Not connected to a run yet: sending what changed between two versions in place of the whole."""
