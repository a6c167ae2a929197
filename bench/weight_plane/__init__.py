"""New weights from one process to another: how fast, and whom they hold up."""
