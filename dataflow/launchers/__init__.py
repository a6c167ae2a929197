"""What starts agents on hosts, watches them and stops them."""
