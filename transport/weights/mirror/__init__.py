"""One reader of a host takes the versions of a trainer elsewhere, and offers them to its neighbours in shared memory."""
