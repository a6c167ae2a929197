"""What tests of launchers share: clusters on this machine, the wheel, published schemas."""
