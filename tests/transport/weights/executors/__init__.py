"""How segments and messages get from process to process."""
