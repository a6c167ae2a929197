"""One optimiser step: the model as a learner sees it, packed micro-batches, loss and update."""
